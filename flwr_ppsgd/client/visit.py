"""One visit of the server to a client, the same for both of Flower's APIs.

w comes in, a clipped gradient goes out, θ stays.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from flwr.app import ArrayRecord, Context

from flwr_ppsgd.algorithm import Vector, clip, length, scale_for
from flwr_ppsgd.checks import altered, count, require
from flwr_ppsgd.client.personal import (
    Personal,
    all_or_nothing,
    back_of,
    evaluate_with,
    keep,
    keep_model,
    note,
    recall_or_begin,
    step_from,
)
from flwr_ppsgd.client.policy import Policy
from flwr_ppsgd.client.refusal import (
    REFUSED_ORDER,
    REFUSED_POLICY,
    DiskError,
    RefusedError,
    coded,
    refusing,
)
from flwr_ppsgd.client.sent import Leaving
from flwr_ppsgd.learner import Learner, OwnModel, Solver
from flwr_ppsgd.recipe import scalar_pair
from flwr_ppsgd.wire import BEFORE_ROUNDS, Layout, Order

log = logging.getLogger("flwr.ppsgd")

Answer = TypeVar("Answer")


class Request(NamedTuple):
    """What a message asks of this client, as it came.

    Args:
        kind: ``train``, ``evaluate``, or another type of message.
        order: the Order as a flat record; None in a message of a stock strategy.
        arrays: the serialised arrays that came along, by name.
        serves_stock: whether the app was built with ``local_step``.
    """

    kind: str
    order: Mapping[str, Any] | None
    arrays: Callable[[], Mapping[str, bytes]]
    serves_stock: bool


def serve(
    context: Context,
    request: Request,
    answer: Callable[[Order | None], Answer],
    leaving: Callable[[Answer, Order | None], Leaving],
) -> Answer:
    """The reply, or a ClientError that says no more than a code; noted either way.

    The owner's limits come first, before the learner or a mod sees anything.

    Args:
        context: the node.
        request: what is asked.
        answer: makes the reply.
        leaving: what the reply takes along.
    """
    order = None
    try:
        policy = Policy.of(context.node_config)
        order = _read(request)
        policy.admit(
            order,
            request.kind,
            serves_stock=request.serves_stock,
            arrays=request.arrays,
        )
        return all_or_nothing(context, order, answer, leaving)
    except Exception as error:
        told = coded(error)
    _note_error(context, Leaving(request.kind, order=order, code=told.code))
    # raised here, where no exception is being handled: what it would bring along is sent too
    raise told


def _read(request: Request) -> Order | None:
    flat = request.order
    if flat is None:
        return None
    return refusing(REFUSED_ORDER, Order.from_flat, flat)


def _note_error(context: Context, leaving: Leaving) -> None:
    """An error that cannot be noted is an error all the same."""
    try:
        note(context, leaving)
    except Exception as error:
        log.error("This reply could not be noted: %s", error)


@contextmanager
def hidden_failures(context: Context, order: Order) -> Iterator[None]:
    """Keep a learner's failure on this machine if its owner answers secure sums only.

    An Order that publishes nothing then gets the same reply whatever the learner does: whether it
    fails may depend on its data, and the server chooses w.

    Args:
        context: the node.
        order: what the server asks for.
    """
    try:
        yield
    except (RefusedError, DiskError):
        raise
    except Exception:
        if order.publishes or not Policy.of(context.node_config).secure:
            raise
        log.exception("The client failed; the server is not told")


@contextmanager
def private_failures() -> Iterator[None]:
    """Keep every failure on this machine: an Order that asks for nothing has one reply from all.

    Whether a personal model can be made may depend on the user's data, and the server chooses w.
    """
    try:
        yield
    except Exception:
        log.exception("The personal model could not be made; the server is not told")


@dataclass(frozen=True)
class Sent:
    """What a visit sends to the server, as numbers.

    Args:
        unscaled: the gradient, or the trained parameters; None if nothing is published.
        measures: training measures that the server releases privately.
        scale: what bounds the gradient.
    """

    unscaled: Vector | None
    measures: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0

    @functools.cached_property
    def vector(self) -> Vector | None:
        """The clipped gradient, or the trained parameters."""
        if self.unscaled is None or self.scale == 1.0:
            return self.unscaled
        return self.unscaled * self.scale

    def record(self, layout: Layout) -> ArrayRecord:
        """The same as named arrays, scaled on the way."""
        assert self.unscaled is not None
        return layout.unflatten(self.unscaled, scale=self.scale)


@dataclass(frozen=True)
class LocalSteps:
    """How a stock strategy is answered: by steps on w.

    Args:
        size: of a step.
        count: the number of steps.
    """

    size: float
    count: int

    @classmethod
    def of(cls, context: Context, size: float | None, steps: int | None) -> Self:
        """What the app says, or else the run config.

        Whether stock strategies are answered at all, no run config decides: see ``Policy``.
        """
        return refusing(REFUSED_POLICY, cls._read, context.run_config, size, steps)

    @classmethod
    def _read(cls, config: Mapping[str, Any], size: float | None, steps: int | None) -> Self:
        if size is None:
            size = config.get("local-step")
        if steps is None:
            steps = config.get("local-steps", 1)
        number = isinstance(size, int | float) and not isinstance(size, bool)
        rule = "local-step must be a positive number"
        remedy = "set it in the run config, or pass local_step to client_app"
        require(number and 0 < float(size or 0) < math.inf, rule, size, remedy)
        return cls(float(size or 0), count("local-steps", steps or 0))


def check_shared(model: object, shapes: Mapping[str, Sequence[int]]) -> None:
    """ValueError if a learner, or what makes one, knows its shared parameters and has others.

    Args:
        model: the learner; one without ``check_shared`` takes what comes.
        shapes: of the server's arrays, by name.
    """
    check = getattr(model, "check_shared", None)
    if check is not None:
        check(shapes)


def answer_order(context: Context, learner: Learner, w: Vector, order: Order) -> Sent:
    """Serve one Order: send the bounded vector, make θ and keep it in the node's state.

    θ is kept last: an exception before it leaves θ as it was. What is asked before the first round
    leaves θ alone.
    """
    if order.asks in BEFORE_ROUNDS:
        return Sent(answer_before(solver_of(learner, order), w, order))
    initial = learner.initial_theta if order.asks == "gradient" else _nothing
    personal = step_from(context, order, initial)
    order = altered(order, visit=personal.visit + 1)
    sent, theta = respond(learner, w, personal.theta, order)
    after = personal.stepped(theta, order.round, order.average)
    keep(context, after, back_of(order))
    return sent


def _nothing() -> Vector:
    """θ while the recipe's rounds run: it is made when the last w comes."""
    return np.zeros(0)


def respond(learner: Learner, w: Vector, theta: Vector, order: Order) -> tuple[Sent, Vector]:
    """What one visit sends, and the θ after it: a function of w, θ and the user's data alone."""
    if order.asks == "solution":
        return _solution(solver_of(learner, order), w, order), theta
    g_w, after = visit(learner, w, theta, order)
    actual = _checked_length(learner, "g_w", g_w, w)
    if not order.publishes:
        return Sent(None), after
    measures = _measures(learner, w, theta, order) if order.metrics else {}
    return Sent(g_w, measures, scale_for(actual, order.clip_norm)), after


def _solution(learner: Solver, w: Vector, order: Order) -> Sent:
    """−solution/C, clipped to 1."""
    found = -np.asarray(learner.solution(w, order))
    actual = _checked_length(learner, "a solution", found, w)
    return Sent(found, {}, scale_for(actual / order.size, order.clip_norm) / order.size)


def answer_before(learner: Solver, w: Vector, order: Order) -> Vector:
    """The answer to what is asked before the first round, bounded by the Order's clip norm."""
    if order.asks == "columns":
        return clip(own_columns(learner, order) / order.size, order.clip_norm)
    if order.asks == "unit":
        value = learner.spread()
    elif order.asks == "size":
        origin = getattr(learner, "origin", np.zeros_like)
        value = length(learner.solution(origin(w), order))
    else:
        value = math.sqrt(own_columns(learner, order).sum())
    return scalar_pair(value)


def own_columns(learner: Solver, order: Order) -> Vector:
    """1 for each sparse column that the user has, else 0; ValueError if there are others."""
    own = np.asarray(learner.own_columns(), dtype=np.float64)
    if own.shape != (len(order.sparse),):
        raise ValueError(
            f"the server counts {len(order.sparse)} sparse columns and this learner has "
            f"{own.size}: give auto(sparse=…) and the learner the same columns"
        )
    return own


def solver_of(learner: object, order: Order) -> Solver:
    """The learner, which can answer ``auto``; ValueError in one line if it cannot."""
    if not isinstance(learner, Solver):
        raise ValueError(
            f"PPSGD.auto asks for solutions and {type(learner).__name__} has no solution(w, "
            "order): use AdditiveLinear or torch_client, or PPSGD(release, steps, …) for gradients"
        )
    if learner.task != order.task:
        raise ValueError(
            f"the server trains for {order.task} and this client's model is for {learner.task}: "
            f"give task={learner.task!r} to PPSGD.auto, or to the learner task={order.task!r}"
        )
    return learner


def personal_model(learner: Learner, w: Vector, order: Order) -> OwnModel:
    """The user's own model around the published w."""
    variance = np.array(order.variance) if order.variance else np.zeros(1)
    return solver_of(learner, order).personal_model(w, variance, order)


def answer_stock(
    context: Context,
    learner: Learner,
    w: Vector,
    local: LocalSteps,
    proximal: float,
) -> Sent:
    """Serve a stock strategy: send the trained parameters; θ is left alone.

    Args:
        context: the node.
        learner: the model with this user's data.
        w: the parameters that came.
        local: how many steps of which size.
        proximal: μ of FedProx, 0 for any other strategy.
    """
    trained, after = local_training(
        learner,
        w,
        recall_or_begin(context, learner.initial_theta),
        local=local,
        proximal=proximal,
    )
    keep(context, after)
    return Sent(trained)


def measure(context: Context, learner: Learner, w: Vector, order: Order | None) -> dict[str, float]:
    """The learner's measures at w and this user's θ, or its average if the server asks for that.

    Under the recipe those of the personal model, of one from own rows alone (``local_…``) and of w
    alone (``shared_…``); if w is the last one, the personal model is kept.
    """
    if order is None:
        kept = recall_or_begin(context, learner.initial_theta)
        return learner.evaluate(w, kept.theta)
    if order.task:
        model = personal_model(learner, w, order)
        if order.last:
            keep_model(context, order.training, model.arrays())
        return {} if order.asks == "nothing" else model.measures()
    personal = evaluate_with(context, order, learner.initial_theta)
    theta = personal.average(order.round) if order.average else personal.theta
    return learner.evaluate(w, theta)


def num_tested(learner: Learner) -> int:
    """The weight of a user's measures: the number of rows they are measured on, if it is known."""
    return int(getattr(learner, "num_tested", learner.num_examples))


def visit(learner: Learner, w: Vector, theta: Vector, order: Order) -> tuple[Vector, Vector]:
    """(g_w, θ after the visit).

    A learner may step θ in its own way, by ``personal_step(w, theta, order)``: that costs no
    privacy. ValueError if the step does not fit; g_w is as the learner gave it.
    """
    # a mask, or whatever else a kind of array of its own does, is not for a bound to rest on
    g_w, g_theta = map(np.asarray, learner.gradients(w, theta, order))
    _check_shape(learner, "g_θ", g_theta, theta)
    with np.errstate(all="ignore"):
        change = order.step * g_theta
        in_place = change if change.dtype == theta.dtype else None  # θ may be a large model
        stepped: Vector = np.subtract(theta, change, out=in_place)
    personal_step = getattr(learner, "personal_step", None)
    if personal_step is not None:
        stepped = personal_step(w, theta, order)
    _checked_length(learner, "a step of θ", stepped, theta)
    return g_w, stepped


def local_training(
    learner: Learner,
    w: Vector,
    personal: Personal,
    *,
    local: LocalSteps,
    proximal: float,
) -> tuple[Vector, Personal]:
    """w after local steps on f_i(·, θ) + (μ/2)‖· − w‖²; each step is one visit."""
    trained = w
    for _ in range(local.count):
        order = Order(0, 0.0, math.inf, "mean", True, visit=personal.visit + 1)
        gradient, _ = learner.gradients(trained, personal.theta, order)
        _checked_length(learner, "g_w", gradient, w)
        pull = proximal * (trained - w)
        trained = trained - local.size * (gradient + pull)
        personal = personal.stepped(personal.theta, personal.round)
    return trained, personal


def _measures(learner: Learner, w: Vector, theta: Vector, order: Order) -> dict[str, float]:
    """The training measures that the server releases privately; only those it names leave."""
    name = type(learner).__name__
    training_measures = getattr(learner, "training_measures", None)
    if training_measures is None:
        raise ValueError(
            f"the server asks for {', '.join(order.metrics)} and {name} has no "
            "training_measures(w, theta, order): add it, or leave out metrics"
        )
    given = training_measures(w, theta, order)
    missing = set(order.metrics).difference(given)
    if missing:
        raise ValueError(
            f"{name} has no measure {sorted(missing)}, only {sorted(given)}: ask for those"
        )
    return {measure: float(given[measure]) for measure in order.metrics}


def _checked_length(learner: object, name: str, vector: Vector, at: Vector) -> float:
    """The length of a vector in the form that the algorithm needs, or one line that says what the
    learner did."""
    _check_shape(learner, name, vector, at)
    actual = length(vector)
    if not math.isfinite(actual):
        owner = type(learner).__name__
        raise ValueError(f"{owner}.gradients returned {name} that is not finite: lower the step")
    return actual


def _check_shape(learner: object, name: str, vector: Vector, at: Vector) -> None:
    if vector.shape != at.shape:
        owner = type(learner).__name__
        raise ValueError(
            f"{owner}.gradients returned {name} of shape {vector.shape} where the parameters have "
            f"{at.shape}: return one flat vector for each block"
        )
