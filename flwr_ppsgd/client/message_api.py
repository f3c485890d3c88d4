"""The Message-API client: w comes in, a clipped gradient goes out, θ stays."""

import math
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from flwr_ppsgd.algorithm import Vector, client_step, length
from flwr_ppsgd.client.personal import Personal, all_or_nothing, evaluate_with, keep, recall, step_from
from flwr_ppsgd.client.sent import Leaving
from flwr_ppsgd.wire import ARRAYS, CONFIG, GRADIENT, METRICS, NUM_EXAMPLES, ORDER, Layout, Order


class Learner(Protocol):
    """A model together with one user's data.

    A complete one, for the mean of a user's numbers, f_i(w, θ) = ½·mean((w + θ − y)²)::

        class MeanLearner:
            def __init__(self, y): self.y, self.num_examples = y, len(y)
            def initial_theta(self): return np.zeros(1)
            def gradients(self, w, theta, order):
                g = np.array([np.mean(w + theta - self.y)])
                return g, g
            def evaluate(self, w, theta): return {"mse": float(np.mean((w + theta - self.y) ** 2))}
    """

    num_examples: int

    def initial_theta(self) -> Vector:
        """θ before the first visit."""
        ...

    def gradients(self, w: Vector, theta: Vector, order: Order) -> tuple[Vector, Vector]:
        """(g_w, g_θ), both at (w, θ), over the minibatch of ``order.visit``, reduced as ``order.reduction`` says."""
        ...

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:
        """Measures of (w, θ) on this user's data. They are outside the guarantee once they leave the node."""
        ...

    # Optional, for private training metrics: measures of (w, θ) on the minibatch of ``order.visit``.
    # def training_measures(self, w: Vector, theta: Vector, order: Order) -> dict[str, float]


def client_app(
    learner_for: Callable[[Context], Learner],
    *,
    local_step: float | None = None,
    local_steps: int | None = None,
    mods: list[Mod] | None = None,
) -> ClientApp:
    """A ClientApp that serves PPSGD, and with ``local_step`` any stock strategy too.

    learner_for: builds the learner of the node in whose context it is called. Make it a module-level function: Flower
        pickles the app with every message, and everything the function closes over goes along.
    local_step, local_steps: how a message without an Order, as stock strategies send it, is answered: so many steps
        (default 1) of that size on w, θ left alone, then the parameters and ``num-examples``. Where they are not given,
        the run config's ``local-step`` and ``local-steps`` are taken.
    mods: Flower client mods, applied to training and evaluation alike.
    """
    app = _App(learner_for, mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        learner = learner_for(context)
        if ORDER in message.content:
            return _train(message, context, learner)
        return _train_locally(message, context, learner, LocalSteps.of(context, local_step, local_steps))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _evaluate(message, context, learner_for(context))

    return app


@dataclass(frozen=True)
class LocalSteps:
    """So many steps of this size on w, in answer to a stock strategy; None where the client was not told."""

    size: float | None
    count: int

    @classmethod
    def of(cls, context: Context, size: float | None, count: int | None) -> Self:
        config = context.run_config
        size = config.get("local-step") if size is None else size  # type: ignore[assignment]
        count = int(config.get("local-steps", 1)) if count is None else count
        return cls(None if size is None else float(size), count)


class _App(ClientApp):
    """A ClientApp that says what is wrong where it cannot be sent to Flower's workers."""

    def __init__(self, learner_for: Callable[[Context], Learner], mods: list[Mod] | None) -> None:
        super().__init__(mods=mods)
        self._learner_for = learner_for

    def __call__(self, message: Message, context: Context) -> Message:
        """The reply after all mods, and only then θ for good."""
        asked = message.content.copy()  # mods may change what the client sees
        return all_or_nothing(
            context,
            lambda: super(_App, self).__call__(message, context),
            lambda reply: _leaving(reply, asked),
        )

    def __getstate__(self) -> dict[str, object]:
        pickler = sys.modules.get("ray.cloudpickle", pickle)
        try:
            pickler.dumps(self._learner_for)
        except Exception as error:
            raise TypeError(
                f"learner_for={self._learner_for!r} cannot be pickled for Flower's workers ({error}): make it a "
                "module-level function that opens files, locks and caches when it is called"
            ) from None
        return self.__dict__


def _train(message: Message, context: Context, learner: Learner) -> Message:
    """One visit. The reply holds the clipped gradient and nothing else; θ is written last."""
    layout, w = _shared(message)
    order = cast(Order, _order(message.content))
    personal = step_from(context, order, learner.initial_theta)
    sent, theta = visit(learner, w, personal.theta, replace(order, visit=personal.visit + 1))
    content = RecordDict({GRADIENT: layout.unflatten(sent)} if order.publishes else {})
    if order.publishes and order.metrics:
        content[METRICS] = MetricRecord(_measures(learner, w, personal.theta, order, personal.visit + 1))
    reply = Message(content, reply_to=message)
    keep(context, personal.stepped(theta, order.round, order.average), before=personal if order.starts else None)
    return reply


def _train_locally(message: Message, context: Context, learner: Learner, local: LocalSteps) -> Message:
    """The answer to a stock strategy, with the proximal term of FedProx where it asks for one."""
    layout, w = _shared(message)
    config = cast(Mapping[str, Any], message.content.get(CONFIG, {}))
    proximal = float(config.get("proximal-mu", 0.0))
    personal = personal_of(context, learner)
    trained, after = local_training(learner, w, personal, local=local, proximal=proximal)
    metrics = MetricRecord({NUM_EXAMPLES: learner.num_examples})
    reply = Message(RecordDict({ARRAYS: layout.unflatten(trained), METRICS: metrics}), reply_to=message)
    keep(context, after)
    return reply


def _evaluate(message: Message, context: Context, learner: Learner) -> Message:
    _, w = _shared(message)
    theta = theta_to_evaluate(context, learner, _order(message.content))
    metrics = MetricRecord({**learner.evaluate(w, theta), NUM_EXAMPLES: learner.num_examples})
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


def _measures(learner: Learner, w: Vector, theta: Vector, order: Order, visit: int) -> dict[str, Any]:
    """The training measures that the server releases privately; only those it names leave the node."""
    measure = getattr(learner, "training_measures", None)
    if measure is None:
        raise ValueError(
            f"the server asks for {', '.join(order.metrics)} and {type(learner).__name__} has no "
            "training_measures(w, theta, order): add it, or leave out metrics"
        )
    given = measure(w, theta, replace(order, visit=visit))
    if missing := set(order.metrics).difference(given):
        raise ValueError(
            f"{type(learner).__name__} has no measure {sorted(missing)}, only {sorted(given)}: ask for those"
        )
    return {name: float(given[name]) for name in order.metrics}


def visit(learner: Learner, w: Vector, theta: Vector, order: Order) -> tuple[Vector, Vector]:
    """(what is sent, the new θ); ValueError where the learner's gradients do not fit, and θ stays as it was."""
    g_w, g_theta = learner.gradients(w, theta, order)
    _check(learner, "g_w", g_w, w)
    if g_theta is not g_w:
        _check(learner, "g_θ", g_theta, theta)
    with np.errstate(all="ignore"):
        sent, stepped = client_step(theta, g_w, g_theta, order.clip_norm, order.step)
    _check(learner, "a step of θ", stepped, theta)
    return sent, stepped


def local_training(
    learner: Learner, w: Vector, personal: Personal, *, local: LocalSteps, proximal: float
) -> tuple[Vector, Personal]:
    """w after local steps on f_i(·, θ) + (μ/2)‖· − w‖²; θ is left alone, each step is one visit."""
    if local.size is None:
        raise ValueError(
            "a message without an Order: this client serves PPSGD only; for a stock strategy pass local_step to "
            "client_app or PPSGDClient, or set local-step in the run config"
        )
    trained = w
    for _ in range(local.count):
        order = Order(0, 0.0, math.inf, "mean", True, visit=personal.visit + 1)
        gradient, _ = learner.gradients(trained, personal.theta, order)
        _check(learner, "g_w", gradient, w)
        trained = trained - local.size * (gradient + proximal * (trained - w))
        personal = personal.stepped(personal.theta, personal.round)
    return trained, personal


def theta_to_evaluate(context: Context, learner: Learner, order: Order | None) -> Vector:
    """θ as it is, or its average iterate where the server asks for that."""
    kept = evaluate_with(context, order) if order else recall(context)
    personal = kept or Personal(learner.initial_theta(), run=context.run_id)
    return personal.average(order.round) if order and order.average else personal.theta


def personal_of(context: Context, learner: Learner) -> Personal:
    return recall(context) or Personal(learner.initial_theta(), run=context.run_id)


def _leaving(reply: Message, asked: RecordDict) -> Leaving:
    """What a reply takes along, in answer to what."""
    w = asked.get(ARRAYS)
    arrays = {name: array.data for name, array in w.items()} if isinstance(w, ArrayRecord) else {}
    return Leaving.of(reply.content if reply.has_content() else RecordDict(), _order(asked), arrays)


def _order(content: RecordDict) -> Order | None:
    order = content.get(ORDER)
    return Order.from_flat(order) if isinstance(order, ConfigRecord) else None


def _check(learner: Learner, name: str, vector: Vector, at: Vector) -> None:
    """The form that the algorithm needs, or one line that says what the learner did."""
    if vector.shape != at.shape:
        raise ValueError(
            f"{type(learner).__name__}.gradients returned {name} of shape {vector.shape} where the parameters have "
            f"{at.shape}: return one flat vector for each block"
        )
    if not math.isfinite(length(vector)):
        raise ValueError(f"{type(learner).__name__}.gradients returned {name} that is not finite: lower the step")


def _shared(message: Message) -> tuple[Layout, Vector]:
    record = message.content.get(ARRAYS)
    if not isinstance(record, ArrayRecord):
        raise ValueError(
            f"no ArrayRecord {ARRAYS!r} in a message that holds {sorted(message.content)}: let the strategy use "
            f"arrayrecord_key={ARRAYS!r}"
        )
    layout = Layout.of(record)
    return layout, layout.flatten(record)
