"""One visit of the server to a client, the same for both of Flower's APIs.

w comes in, a clipped gradient goes out, θ stays.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from flwr.app import Context

from flwr_ppsgd.algorithm import Vector, client_step, length
from flwr_ppsgd.client.personal import Personal, evaluate_with, keep, recall, step_from
from flwr_ppsgd.learner import Learner
from flwr_ppsgd.wire import Order

SERVES_PPSGD_ONLY = (
    "a message without an Order: this client serves PPSGD only; for a stock strategy pass "
    "local_step to client_app or PPSGDClient, or set local-step in the run config"
)


@dataclass(frozen=True)
class Sent:
    """What a visit sends to the server, as numbers.

    Args:
        vector: the clipped gradient, or the trained parameters; None if nothing is published.
        measures: training measures that the server releases privately.
    """

    vector: Vector | None
    measures: Mapping[str, float]


@dataclass(frozen=True)
class LocalSteps:
    """How a stock strategy is answered: by steps on w.

    Args:
        size: of a step; None if the client was not told.
        count: the number of steps.
    """

    size: float | None
    count: int

    @classmethod
    def of(cls, context: Context, size: float | None, count: int | None) -> Self:
        """What the app says, or else the run config."""
        config: Mapping[str, Any] = context.run_config
        if size is None:
            size = config.get("local-step")
        if count is None:
            count = int(config.get("local-steps", 1))
        return cls(None if size is None else float(size), count)


def answer_order(context: Context, learner: Learner, w: Vector, order: Order) -> Sent:
    """Serve one Order: send the clipped gradient, step θ and keep it in the node's state.

    θ is kept last: an exception before it leaves θ as it was.
    """
    personal = step_from(context, order, learner.initial_theta)
    order = replace(order, visit=personal.visit + 1)
    gradient, theta = visit(learner, w, personal.theta, order)
    measures = {}
    if order.publishes and order.metrics:
        measures = _measures(learner, w, personal.theta, order)
    after = personal.stepped(theta, order.round, order.average)
    keep(context, after, before=personal if order.starts else None)
    return Sent(gradient if order.publishes else None, measures)


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
        personal_of(context, learner),
        local=local,
        proximal=proximal,
    )
    keep(context, after)
    return Sent(trained, {})


def measure(context: Context, learner: Learner, w: Vector, order: Order | None) -> dict[str, float]:
    """The learner's measures at w and this user's θ, or its average if the server asks for that."""
    kept = evaluate_with(context, order) if order else recall(context)
    personal = kept or Personal(learner.initial_theta(), run=context.run_id)
    theta = personal.theta
    if order and order.average:
        theta = personal.average(order.round)
    return learner.evaluate(w, theta)


def visit(learner: Learner, w: Vector, theta: Vector, order: Order) -> tuple[Vector, Vector]:
    """(what is sent, the new θ).

    ValueError if the learner's gradients do not fit; θ stays as it was.
    """
    g_w, g_theta = learner.gradients(w, theta, order)
    _check(learner, "g_w", g_w, w)
    if g_theta is not g_w:
        _check(learner, "g_θ", g_theta, theta)
    with np.errstate(all="ignore"):
        sent, stepped = client_step(theta, g_w, g_theta, order.clip_norm, order.step)
    _check(learner, "a step of θ", stepped, theta)
    return sent, stepped


def local_training(
    learner: Learner,
    w: Vector,
    personal: Personal,
    *,
    local: LocalSteps,
    proximal: float,
) -> tuple[Vector, Personal]:
    """w after local steps on f_i(·, θ) + (μ/2)‖· − w‖²; each step is one visit."""
    if local.size is None:
        raise ValueError(SERVES_PPSGD_ONLY)
    trained = w
    for _ in range(local.count):
        order = Order(0, 0.0, math.inf, "mean", True, visit=personal.visit + 1)
        gradient, _ = learner.gradients(trained, personal.theta, order)
        _check(learner, "g_w", gradient, w)
        pull = proximal * (trained - w)
        trained = trained - local.size * (gradient + pull)
        personal = personal.stepped(personal.theta, personal.round)
    return trained, personal


def personal_of(context: Context, learner: Learner) -> Personal:
    """What this node keeps, or the learner's initial θ."""
    return recall(context) or Personal(learner.initial_theta(), run=context.run_id)


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


def _check(learner: Learner, name: str, vector: Vector, at: Vector) -> None:
    """The form that the algorithm needs, or one line that says what the learner did."""
    owner = type(learner).__name__
    if vector.shape != at.shape:
        raise ValueError(
            f"{owner}.gradients returned {name} of shape {vector.shape} where the parameters have "
            f"{at.shape}: return one flat vector for each block"
        )
    if not math.isfinite(length(vector)):
        raise ValueError(f"{owner}.gradients returned {name} that is not finite: lower the step")
