"""The Message-API client: w comes in, a clipped gradient goes out, θ stays."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_ppsgd.algorithm import Vector, client_step, length
from flwr_ppsgd.personal import Personal, keep, recall
from flwr_ppsgd.wire import ARRAYS, GRADIENT, METRICS, NUM_EXAMPLES, ORDER, Layout, Order


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


def client_app(learner_for: Callable[[Context], Learner]) -> ClientApp:
    """A ClientApp that serves PPSGD.

    learner_for: builds the learner of the node in whose context it is called. Make it a module-level function: Flower
        pickles the app with every message, and everything the function closes over goes along.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _train(message, context, learner_for(context))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _evaluate(message, context, learner_for(context))

    return app


def _train(message: Message, context: Context, learner: Learner) -> Message:
    """One visit. The reply holds the clipped gradient and nothing else; θ is written last."""
    layout, w = _shared(message)
    order = Order.from_record(cast(ConfigRecord, message.content[ORDER]))
    personal = _personal(context, learner)
    sent, theta = visit(learner, w, personal.theta, replace(order, visit=personal.visit + 1))
    content = RecordDict({GRADIENT: layout.unflatten(sent)} if order.publishes else {})
    keep(context, personal.stepped(theta, order.round))
    return Message(content, reply_to=message)


def _evaluate(message: Message, context: Context, learner: Learner) -> Message:
    _, w = _shared(message)
    measures = learner.evaluate(w, _personal(context, learner).theta)
    metrics = MetricRecord({**measures, NUM_EXAMPLES: learner.num_examples})
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


def visit(learner: Learner, w: Vector, theta: Vector, order: Order) -> tuple[Vector, Vector]:
    """(what is sent, the new θ); ValueError where the learner's gradients do not fit, and θ stays as it was."""
    g_w, g_theta = learner.gradients(w, theta, order)
    for name, gradient, at in (("g_w", g_w, w), ("g_θ", g_theta, theta)):
        if gradient.shape != at.shape:
            raise ValueError(
                f"{type(learner).__name__}.gradients returned {name} of shape {gradient.shape} where the parameters "
                f"have {at.shape}: return one flat vector for each block"
            )
        if not math.isfinite(length(gradient)):
            raise ValueError(f"{type(learner).__name__}.gradients returned a {name} that is not finite: lower the step")
    return client_step(theta, g_w, g_theta, order.clip_norm, order.step)


def _shared(message: Message) -> tuple[Layout, Vector]:
    record = cast(ArrayRecord, message.content[ARRAYS])
    layout = Layout.of(record)
    return layout, layout.flatten(record)


def _personal(context: Context, learner: Learner) -> Personal:
    return recall(context) or Personal(learner.initial_theta(), run=context.run_id)
