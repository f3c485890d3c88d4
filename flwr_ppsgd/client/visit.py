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

from flwr_ppsgd.algorithm import Vector, bound_scale, length
from flwr_ppsgd.checks import altered, count, require
from flwr_ppsgd.client.personal import (
    Personal,
    all_or_nothing,
    back_of,
    evaluate_with,
    keep,
    keeps_on_disk,
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
from flwr_ppsgd.learner import Learner, Solution
from flwr_ppsgd.tuning import BELOW, encode_size
from flwr_ppsgd.wire import Layout, Order

log = logging.getLogger("flwr.ppsgd")

LOCAL = "local_"  # before the name of a measure: of a model from own rows alone
SHARED = "shared_"  # of w alone
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
    """Serve one Order: send the bounded gradient, make θ and keep it in the node's state.

    θ is kept last: an exception before it leaves θ as it was. A vote leaves θ alone.
    """
    if order.asks == "size":
        return Sent(vote(learner, order))
    personal = step_from(context, order, learner.initial_theta)
    order = altered(order, visit=personal.visit + 1)
    sent, theta = respond(learner, w, personal.theta, order)
    if order.personal == "solve" and keeps_on_disk(context):
        theta = _for_later(learner, w, theta)
    after = personal.stepped(theta, order.round, order.average)
    keep(context, after, back_of(order))
    return sent


def respond(learner: Learner, w: Vector, theta: Vector, order: Order) -> tuple[Sent, Vector]:
    """What one visit sends, and the θ after it: a function of w, θ and the user's data alone."""
    if order.personal == "solve":
        theta = _anchor(learner, w, theta, order)
    g_w, after = visit(learner, w, theta, order)
    actual = _checked_length(learner, "g_w", g_w, w)
    if not order.publishes:
        return Sent(None), after
    measures = _measures(learner, w, theta, order, actual) if order.metrics else {}
    scale = bound_scale(actual, order.clip_norm, order.normalise)
    return Sent(g_w, measures, scale), after


def _for_later(learner: Learner, w: Vector, theta: Vector) -> Vector:
    """The solved θ, which ``PersonalModel`` finds on the node's disk; θ as it is if none can be."""
    solution = solved(learner, w)
    return theta if solution is None else solution.theta


def vote(learner: Learner, order: Order) -> Vector:
    """The bin of the size of the user's own solution; zeros if the learner cannot say."""
    own_size = getattr(learner, "own_size", None)
    size = 0.0 if own_size is None else float(own_size())
    return encode_size(size, order.lowest, order.powers, order.clip_norm)


def _anchor(learner: Learner, w: Vector, kept: Vector, order: Order) -> Vector:
    """The θ at which the gradient of w is taken if θ is solved rather than stepped.

    The solved θ if the server asks for that; else the one before the first visit, or what the
    learner itself trains where that is no model.
    """
    if order.solve_in_training:
        solution = solved(learner, w)
        if solution is not None:
            return solution.theta
    anchor = getattr(learner, "anchor", None)
    if anchor is None:
        return learner.initial_theta()
    trained: Vector = anchor(w, kept, order)
    return trained


def solved(learner: Learner, w: Vector) -> Solution | None:
    """The best θ for w, from own rows alone; None if the learner cannot solve.

    ValueError if what it found does not fit.
    """
    solve = getattr(learner, "solve", None)
    if solve is None:
        return None
    solution: Solution = solve(w)
    _checked_length(learner, "a solved θ", solution.theta, learner.initial_theta())
    return solution


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

    If θ is solved, also those of the user's own model (``local_…``) and of w alone (``shared_…``).
    """
    if order is None:
        kept = recall_or_begin(context, learner.initial_theta)
        return learner.evaluate(w, kept.theta)
    if order.personal == "solve":
        solution = solved(learner, w)
        if solution is not None:
            return compared(learner, w, solution.theta)
    personal = evaluate_with(context, order, learner.initial_theta)
    theta = personal.average(order.round) if order.average else personal.theta
    return learner.evaluate(w, theta)


def num_tested(learner: Learner) -> int:
    """The weight of a user's measures: the number of rows they are measured on, if it is known."""
    return int(getattr(learner, "num_tested", learner.num_examples))


def compared(learner: Learner, w: Vector, theta: Vector) -> dict[str, float]:
    """The measures of (w, θ), beside those of a model from own rows alone and of w alone.

    From own rows alone only if the learner says that w = 0 is where that begins
    (``begins_at_zero``): not so for networks, whose features are part of w. Of w alone only if
    θ = 0 is a model.
    """
    measures = learner.evaluate(w, theta)
    if getattr(learner, "begins_at_zero", False):
        nothing = np.zeros_like(w)
        alone = solved(learner, nothing)
        assert alone is not None
        local = learner.evaluate(nothing, alone.theta)
        measures |= {LOCAL + name: value for name, value in local.items()}
    if getattr(learner, "anchor", None) is None:
        shared = learner.evaluate(w, learner.initial_theta())
        measures |= {SHARED + name: value for name, value in shared.items()}
    return measures


def visit(learner: Learner, w: Vector, theta: Vector, order: Order) -> tuple[Vector, Vector]:
    """(g_w, θ after the visit).

    A learner may step θ in its own way, by ``personal_step(w, theta, order)``: that costs no
    privacy. If θ is solved, it stays where g_w was taken. ValueError if the step does not fit; g_w
    is as the learner gave it.
    """
    # a mask, or whatever else a kind of array of its own does, is not for a bound to rest on
    g_w, g_theta = map(np.asarray, learner.gradients(w, theta, order))
    if order.personal == "solve":
        return g_w, theta
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


def _measures(
    learner: Learner, w: Vector, theta: Vector, order: Order, actual: float
) -> dict[str, float]:
    """The training measures that the server releases privately; only those it names leave."""
    measures: dict[str, float] = {}
    asked = [name for name in order.metrics if name != BELOW]
    if len(asked) < len(order.metrics):
        measures[BELOW] = 0.5 if actual <= order.clip_norm else -0.5
    if not asked:
        return measures
    name = type(learner).__name__
    training_measures = getattr(learner, "training_measures", None)
    if training_measures is None:
        raise ValueError(
            f"the server asks for {', '.join(asked)} and {name} has no "
            "training_measures(w, theta, order): add it, or leave out metrics"
        )
    given = training_measures(w, theta, order)
    missing = set(asked).difference(given)
    if missing:
        raise ValueError(
            f"{name} has no measure {sorted(missing)}, only {sorted(given)}: ask for those"
        )
    return {**measures, **{measure: float(given[measure]) for measure in asked}}


def _checked_length(learner: Learner, name: str, vector: Vector, at: Vector) -> float:
    """The length of a vector in the form that the algorithm needs, or one line that says what the
    learner did."""
    _check_shape(learner, name, vector, at)
    actual = length(vector)
    if not math.isfinite(actual):
        owner = type(learner).__name__
        raise ValueError(f"{owner}.gradients returned {name} that is not finite: lower the step")
    return actual


def _check_shape(learner: Learner, name: str, vector: Vector, at: Vector) -> None:
    if vector.shape != at.shape:
        owner = type(learner).__name__
        raise ValueError(
            f"{owner}.gradients returned {name} of shape {vector.shape} where the parameters have "
            f"{at.shape}: return one flat vector for each block"
        )
