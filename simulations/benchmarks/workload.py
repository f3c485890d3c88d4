"""What is measured: 1,000 users with rows of their own, ten per round, a linear model of 784×10."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from flwr_ppsgd import PPSGD, Ledger, Order, Poisson, Release, Steps
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.lab.engine import Engine
from flwr_ppsgd.lab.linear_engine import LinearEngine
from flwr_ppsgd.lab.population import FinitePopulation
from flwr_ppsgd.learner import Minibatches
from flwr_ppsgd.models.additive_linear import AdditiveLinear
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.wire import ARRAYS, METRICS, NUM_EXAMPLES
from simulations.benchmarks.measuring import Comparison
from simulations.benchmarks.yardsticks import random_table, take

USERS = 1000
FEATURES = 784
CLASSES = 10
SAMPLES = 100  # per user
BATCH = 10
REPLIES = 10
LARGE = 10**6
CLIP_NORM = 1.0
DELTA = 1e-4


def strategy(cohort: Poisson) -> PPSGD:
    """With secret coins and noise, as in a deployment."""
    release = Release(cohort, clip_norm=CLIP_NORM, noise_multiplier=1.0)
    steps = Steps(shared=0.1, personal=0.1)
    return PPSGD(release=release, steps=steps, delta=DELTA)


def linear_learner(context: Context) -> AdditiveLinear:
    """A node's own 100 samples and an additive linear model with softmax.

    Beyond 1000 users, rows are used again, which saves memory.
    """
    table = linear_table()
    user = int(context.node_config["partition-id"])
    start = user % USERS * SAMPLES
    rows = slice(start, start + SAMPLES)
    batches = Minibatches(table.x[rows], table.y[rows], BATCH, seed=1, user=user)
    return AdditiveLinear(batches, FEATURES, CLASSES, loss="softmax")


def train(server: PPSGD, grid: Grid, arrays: ArrayRecord) -> Iterator[int]:
    """Rounds without end; yields the number of each."""
    round_ = 0
    while True:
        round_ += 1
        messages = server.configure_train(round_, arrays, ConfigRecord(), grid)
        arrays, _ = server.aggregate_train(round_, grid.send_and_receive(messages))
        yield round_


def reply(records: Mapping[str, ArrayRecord | MetricRecord], message: Message) -> Message:
    return Message(RecordDict({**records}), reply_to=message)


def ledgers(release: Release) -> Iterator[Ledger]:
    """The ledger after one round, after two, and so on."""
    for rounds in itertools.count(1):
        yield Ledger(DELTA).record(release, rounds)


class Constant:
    """The same gradient whatever the parameters are. θ has one number, so that nearly all memory
    is the server's."""

    num_examples = 1
    takes_float32 = True

    def initial_theta(self) -> Vector:
        return np.zeros(1)

    def gradients(self, w: Vector, theta: Vector, order: Order) -> tuple[Vector, Vector]:  # noqa: ARG002
        return np.ones_like(w), np.ones_like(theta)

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:  # noqa: ARG002
        return {}


def constant_learner(context: Context) -> Constant:  # noqa: ARG001
    return Constant()


def stock_rounds(
    trained: Callable[[NDArray[Any], Context], NDArray[Any]], nodes: int, w: ArrayRecord
) -> Iterator[int]:
    """Rounds without end of Flower's FedAvg with ten of the nodes; ``trained`` is what a client
    does to w."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content[ARRAYS]
        assert isinstance(arrays, ArrayRecord)
        (w,) = arrays.to_numpy_ndarrays()
        weight = MetricRecord({NUM_EXAMPLES: 1})
        after = ArrayRecord([trained(w, context)])
        return reply({ARRAYS: after, METRICS: weight}, message)

    stock = FedAvg(fraction_train=REPLIES / nodes, fraction_evaluate=0.0)
    grid = InProcessGrid(app, nodes)
    for round_ in itertools.count(1):
        stock_round(stock, grid, w)
        yield round_


def fedavg(w: ArrayRecord) -> Iterator[int]:
    """Rounds without end of Flower's FedAvg, whose clients take a step along ``Constant``."""
    return stock_rounds(lambda w, _: w - 0.1 * np.ones_like(w), REPLIES, w)


def stock_round(stock: FedAvg, grid: Grid, arrays: ArrayRecord) -> None:
    """One round of FedAvg, without Flower's pauses."""
    messages = stock.configure_train(1, arrays, ConfigRecord(), grid)
    stock.aggregate_train(1, list(grid.send_and_receive(messages)))


@functools.cache
def linear_table() -> FinitePopulation:
    return random_table(USERS, SAMPLES, FEATURES, CLASSES)


def warmed(engine: LinearEngine, rounds: int = 500) -> LinearEngine:
    """The engine after enough rounds that most rows have been drawn. Before that, θ is memory that
    nothing has touched."""
    several(engine, rounds)
    return engine


def several(engine: Engine, rounds: int) -> None:
    for _ in range(rounds):
        engine.advance()


def against(
    loop: Iterator[float],
    engine: Engine,
    *,
    settings: int,
    repetitions: int,
    rounds: int,
) -> Comparison:
    return Comparison(
        lambda: take(rounds, loop),
        lambda: several(engine, rounds),
        settings=settings,
        repetitions=repetitions,
        rounds=rounds,
    )
