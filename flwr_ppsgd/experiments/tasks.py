"""A problem on data of one's own, as each engine sees it: one user's learner, everyone's table, a network's engine."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import DTypeLike

from flwr_ppsgd.client.message_api import Learner
from flwr_ppsgd.data import PerUser, linear_learner, network_learner
from flwr_ppsgd.data.learners import NetworkBatches, check_loss, network_targets
from flwr_ppsgd.experiments.problem import Problem, visits_in
from flwr_ppsgd.models.cnn import paper_cnn
from flwr_ppsgd.models.split import AdditiveHead, Loss
from flwr_ppsgd.simulation.batches import Table
from flwr_ppsgd.simulation.linear import Setting
from flwr_ppsgd.simulation.networks import NetworkEngine

PIXELS = 28 * 28


def learner(problem: Problem, user: int) -> Learner:
    """One user's model and data."""
    data = problem.per_user()
    if problem.model == "cnn":
        return network_learner(network(problem), data, user, batch_size=problem.batch_size, seed=problem.data_seed)
    return linear_learner(
        data, user, batch_size=problem.batch_size, seed=problem.data_seed, loss=loss_of(problem),
        shift=problem.target_shift,
    )  # fmt: skip


def initial_arrays(problem: Problem) -> ArrayRecord:
    """w before the first round."""
    if problem.model == "cnn":
        return network(problem).initial_arrays()
    data = problem.per_user()
    check_loss(data, loss_of(problem), problem.target_shift)
    return ArrayRecord([np.zeros(data.features * data.outputs)])


def loss_of(problem: Problem) -> Loss:
    return cast(Loss, problem.loss)


@functools.lru_cache(maxsize=1)
def table(problem: Problem, dtype: DTypeLike, dropped_after: float | None = None) -> Table:
    """Everyone's rows, for the cohort engine of linear models. dropped_after: so many passes a user drops out."""
    data = problem.per_user()
    check_loss(data, loss_of(problem), problem.target_shift)
    train, test = (data.part(test=test, shift=problem.target_shift, dtype=dtype) for test in (False, True))
    return Table(
        *train, batch_size=problem.batch_size, seed=problem.data_seed, loss=loss_of(problem), test=test,
        task=data.task, most_visits=visits_in(problem, dropped_after),
    )  # fmt: skip


def network(problem: Problem) -> AdditiveHead:
    """The paper's CNN, for data that it fits."""
    return _network(problem.data_seed, _images(problem.per_user()).outputs)


@functools.lru_cache(maxsize=1)
def _network(seed: int, classes: int) -> AdditiveHead:
    return paper_cnn(seed, classes)


def _images(data: PerUser) -> PerUser:
    if data.features != PIXELS or data.task != "classification":
        raise ValueError(
            f"{data.source}: the cnn is for classes of images of 28 × 28 = {PIXELS} pixels and this has "
            f"{data.features} features, {data.task}: use model = 'linear'"
        )
    return data


def network_engine(
    problem: Problem, settings: Sequence[Setting], *, seed: int | None, average: bool, dropped_after: float | None
) -> NetworkEngine:
    """Everyone's minibatches and test parts, for the cohort engine of networks."""
    data, size = problem.per_user(), problem.batch_size
    batches = [NetworkBatches(data, user, size, seed=problem.data_seed, shift=0.0) for user in range(len(data))]
    rows = [data.rows(user, test=True) for user in range(len(data))]
    tests: list[Any] = [(data.matrix(own), network_targets(data, own)) for own in rows]
    return NetworkEngine(
        network(problem), batches, settings, seed=seed, average=average, tests=tests,
        most_visits=visits_in(problem, dropped_after),
    )  # fmt: skip


def network_bytes(problem: Problem, settings: int) -> int:
    """About how much memory so many networks side by side take: θ of every user, w, and a cohort's gradients."""
    model, users = network(problem), len(problem.per_user())
    w, theta = len(model.initial_w()), len(model.initial_theta())
    return 8 * (settings * (2 * users * theta + 4 * w) + 16 * w * users)
