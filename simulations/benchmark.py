"""Speeds and memory against their targets. Ratios are taken within one run, since machines are noisy.

A time is CPU time on one thread, the shortest of several repetitions; the two sides of a ratio take turns.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")  # read when numpy is imported

import functools
import itertools
import logging
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from numpy.typing import DTypeLike

from flwr_ppsgd import PPSGD, Ledger, Order, Poisson, Release, Steps, client_app, clip
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.datasets import Minibatches, generator
from flwr_ppsgd.models import AdditiveLinear, Matrix
from flwr_ppsgd.noise import Coins, GridSum
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.wire import ARRAYS, GRADIENT, METRICS, NUM_EXAMPLES

USERS, FEATURES, CLASSES = 1000, 784, 10
SAMPLES, BATCH = 100, 10
POOL_USERS = 100  # so many users have rows of their own; the others share theirs, which saves memory
REPLIES = 10
SMALL, LARGE = FEATURES * CLASSES, 10**6
CLIP_NORM = 1.0


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.WARNING)
    print(f"{'measurement':66s} {'measured':>9s}   target")
    show("a. rounds per CPU second: 10 of 1000 nodes, 784×10, minibatch 10", rounds_per_second(), at_least=150)
    for dtype in (np.float32, np.float64):
        name = f"b. aggregate_train / FedAvg's, 10 {dtype.__name__} replies of"
        show(f"{name} 7,840", server_ratio(SMALL, dtype, repetitions=200), at_most=2)
        show(f"{name} 10^6", server_ratio(LARGE, dtype, repetitions=15), at_most=3)
    show("c. quick_epsilon in ms a round, cohorts by coin", epsilon_ms(rate=0.01), at_most=1)
    show("c. quick_epsilon in ms a round, everyone in every round", epsilon_ms(rate=1.0), at_most=1)
    show("d. clip, quantise and sum / plain clip and sum, 10 of 10^6", grid_ratio(), at_most=2)
    show("d. secret normals / np.random.normal, 10^6", normals_ratio(), at_most=3)
    few, many = peak_bytes(replies=5), peak_bytes(replies=50)
    show("e. peak memory of aggregate_train, 50 replies of 10^6, in models", many / (8 * LARGE), at_most=10)
    show("e. the same, 50 replies / 5 replies", many / few, at_most=1.1)


def show(name: str, value: float, *, at_least: float = 0.0, at_most: float = float("inf")) -> None:
    """One line of the table."""
    target = f"≥ {at_least:g}" if at_least else f"≤ {at_most:g}"
    verdict = "ok" if at_least <= value <= at_most else "MISSED"
    print(f"{name:66s} {value:9.3g}   {target:6s} {verdict}", flush=True)


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def ratio(ours: Callable[[], object], theirs: Callable[[], object], repetitions: int) -> float:
    """Shortest time of ours over shortest time of theirs."""
    return shortest_ratio((seconds(ours), seconds(theirs)) for _ in range(repetitions))


def shortest_ratio(pairs: Iterable[tuple[float, float]]) -> float:
    ours, theirs = zip(*pairs, strict=True)
    return float(min(ours) / min(theirs))


def strategy(cohort: Poisson) -> PPSGD:
    """With secret coins and noise, as in a deployment."""
    release = Release(cohort, clip_norm=CLIP_NORM, noise_multiplier=1.0)
    return PPSGD(release=release, steps=Steps(shared=0.1, personal=0.1), delta=1e-4)


@functools.cache
def pool() -> tuple[Matrix, Matrix]:
    """Rows of x, and classes as one-hot rows."""
    source = generator("benchmark")
    x = source.normal(size=(POOL_USERS * SAMPLES, FEATURES))
    return x, np.eye(CLASSES)[source.integers(CLASSES, size=len(x))]


def linear_learner(context: Context) -> AdditiveLinear:
    """A node's 100 samples and an additive linear model with softmax."""
    x, y = pool()
    user = int(context.node_config["partition-id"])
    rows = slice(user % POOL_USERS * SAMPLES, (user % POOL_USERS + 1) * SAMPLES)
    return AdditiveLinear(Minibatches(x[rows], y[rows], BATCH, seed=1, user=user), FEATURES, CLASSES, loss="softmax")


def rounds_per_second(rounds: int = 100, repetitions: int = 8) -> float:
    """Whole rounds: the draw, the messages, the clients, the sum, the noise and the charge."""
    grid = InProcessGrid(client_app(linear_learner), USERS)
    turns = train(strategy(Poisson(USERS, rate=0.01)), grid, ArrayRecord([np.zeros((FEATURES, CLASSES))]))
    pool()
    return rounds / min(seconds(lambda: [next(turns) for _ in range(rounds)]) for _ in range(repetitions))


def train(server: PPSGD, grid: InProcessGrid, arrays: ArrayRecord) -> Iterator[int]:
    """Rounds without end, one at each step of the iterator."""
    round_ = 0
    while True:
        round_ += 1
        messages = server.configure_train(round_, arrays, ConfigRecord(), grid)
        arrays, _ = server.aggregate_train(round_, grid.send_and_receive(messages))
        yield round_


def server_ratio(size: int, dtype: DTypeLike, repetitions: int) -> float:
    """PPSGD over stock FedAvg in ``aggregate_train``, both of replies that hold the same arrays.

    FedAvg sums in the dtype of the replies, PPSGD in float64 always: float32 is the harder comparison.
    """
    server, stock = strategy(Poisson(REPLIES, rate=1.0)), FedAvg()
    grid = InProcessGrid(client_app(constant_learner), REPLIES)
    arrays = ArrayRecord([np.zeros(size, dtype)])
    asked = server.configure_train(1, arrays, ConfigRecord(), grid)
    records = [ArrayRecord([gradient.astype(dtype)]) for gradient in gradients(size)]
    weight = MetricRecord({NUM_EXAMPLES: SAMPLES})
    ours = [reply({GRADIENT: record}, message) for record, message in zip(records, asked, strict=True)]
    theirs = [reply({ARRAYS: record, METRICS: weight}, message) for record, message in zip(records, asked, strict=True)]

    def one(round_: int) -> tuple[float, float]:
        server.configure_train(round_, arrays, ConfigRecord(), grid)
        mine = seconds(lambda: server.aggregate_train(round_, ours))
        return mine, seconds(lambda: stock.aggregate_train(round_, theirs))

    return shortest_ratio(one(round_) for round_ in range(1, repetitions + 1))


def gradients(size: int) -> list[Vector]:
    """Replies of norm about 10·C: all of them are clipped."""
    source = generator("gradients", size)
    return [source.normal(0, 10 * CLIP_NORM / size**0.5, size) for _ in range(REPLIES)]


def reply(records: Mapping[str, ArrayRecord | MetricRecord], message: Message) -> Message:
    return Message(RecordDict({**records}), reply_to=message)


def epsilon_ms(rate: float, rounds: int = 100, repetitions: int = 5) -> float:
    """ε after each of so many rounds, one by one, as the strategy asks for it; what only the first one pays is left
    out, and no ledger is asked twice, since an answer may be kept."""
    release = Release(Poisson(USERS, rate), CLIP_NORM, noise_multiplier=1.0)
    ledgers = (Ledger(1e-4).record(release, times) for times in itertools.count(1))
    next(ledgers).quick_epsilon()
    best = min(
        seconds(lambda: [ledger.quick_epsilon() for ledger in itertools.islice(ledgers, rounds)])
        for _ in range(repetitions)
    )
    return 1000 * best / rounds


def grid_ratio(repetitions: int = 10) -> float:
    """What exact sums cost: the grid against plain float64."""
    release = Release(Poisson(USERS, rate=0.01), CLIP_NORM, noise_multiplier=1.0)
    vectors = gradients(LARGE)

    def on_the_grid() -> None:
        total = GridSum(LARGE, release)
        for vector in vectors:
            total.add(vector)

    def plain() -> None:
        total = np.zeros(LARGE)
        for vector in vectors:
            total += clip(vector, CLIP_NORM)

    return ratio(on_the_grid, plain, repetitions)


def normals_ratio(repetitions: int = 10) -> float:
    """What secret coins cost."""
    return ratio(lambda: Coins.secret().normals(LARGE), lambda: np.random.normal(size=LARGE), repetitions)


class Constant:
    """The same gradient whatever the parameters; next to no θ, so that memory is all the server's."""

    num_examples = 1

    def initial_theta(self) -> Vector:
        return np.zeros(1)

    def gradients(self, w: Vector, theta: Vector, order: Order) -> tuple[Vector, Vector]:  # noqa: ARG002
        return np.ones_like(w), np.ones_like(theta)

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:  # noqa: ARG002
        return {}


def constant_learner(context: Context) -> Constant:  # noqa: ARG001
    return Constant()


def peak_bytes(replies: int) -> int:
    """The most memory that ``aggregate_train`` holds at once on top of w, its clients in the same process included."""
    server = strategy(Poisson(replies, rate=1.0))
    grid = InProcessGrid(client_app(constant_learner), replies)
    messages = server.configure_train(1, ArrayRecord([np.zeros(LARGE)]), ConfigRecord(), grid)
    tracemalloc.start()
    server.aggregate_train(1, grid.send_and_receive(messages))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


if __name__ == "__main__":
    main()
