"""Rounds through Flower's messages, and the server's part of them."""

import functools
import math
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from numpy.typing import DTypeLike, NDArray

from flwr_ppsgd import PPSGD, Order, Poisson, Release, Steps, client_app
from flwr_ppsgd.algorithm import clip
from flwr_ppsgd.lab.engine import Setting
from flwr_ppsgd.lab.population import Table
from flwr_ppsgd.learner import Minibatches
from flwr_ppsgd.models.additive_linear import AdditiveLinear
from flwr_ppsgd.noise import Coins, GridSum
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.wire import ARRAYS, GRADIENT, METRICS, NUM_EXAMPLES
from simulations.benchmarks.measuring import (
    Comparison,
    in_a_process,
    median_ratio,
    median_seconds,
    ratio,
    seconds,
    show,
    show_against_loop,
)
from simulations.benchmarks.workload import (
    BATCH,
    CLASSES,
    CLIP_NORM,
    DELTA,
    FEATURES,
    LARGE,
    REPLIES,
    SAMPLES,
    SMALL,
    USERS,
    constant_learner,
    gradients,
    linear_learner,
    linear_table,
    reply,
    stock_rounds,
    strategy,
    train,
)
from simulations.yardsticks import from_table, plain_loop, random_table, take

NODES = 100  # for orientation: rounds of the Message API


def show_server() -> None:
    show(
        "a. rounds per CPU second: 10 of 1000 nodes, 784×10, minibatch 10",
        rounds_per_second(),
        at_least=200,
    )
    show_against_loop("a. the same / a plain loop", message_api(), least=0.27)
    show("a. the same / FedAvg's rounds with the same gradients", stock_ratio(), at_most=1.6)
    show(
        "a. seconds of auto: 580 users × 112 rows, all rounds and personal models",
        recipe_seconds(),
        at_most=15,
    )
    show("a. the same, a round of 10 of 10^6 nodes / of 1000 nodes", scale_ratio(), at_most=3)
    for dtype in (np.float32, np.float64):
        name = f"b. aggregate_train / FedAvg's, 10 {dtype.__name__} replies of"
        show(f"{name} 7,840", server_ratio(SMALL, dtype, repetitions=200), at_most=2)
        show(f"{name} 10^6", server_ratio(LARGE, dtype, repetitions=15), at_most=3)
    show_sums()
    show_memory()
    show_orientation()


def show_sums() -> None:
    """What exact sums and secret coins cost."""
    show("d. clip, quantise and sum / plain clip and sum, 10 of 10^6", grid_ratio(), at_most=2)
    show("d. secret normals / np.random.normal, 10^6", normals_ratio(), at_most=3)


def show_memory() -> None:
    few = peak_bytes(replies=5)
    many = peak_bytes(replies=50)
    show(
        "e. peak memory of aggregate_train, 50 replies of 10^6, in models",
        many / (8 * LARGE),
        at_most=10,
    )
    show("e. the same, 50 replies / 5 replies", many / few, at_most=1.1)


def show_orientation() -> None:
    print(
        "\nFor orientation, rounds per second of wall time, 784×10, minibatch 10, 10 of 100 nodes:"
    )
    in_process = message_api_rounds(InProcessGrid)
    print(f"{'Message API on InProcessGrid':66s} {in_process:9.3g}")
    on_ray = ray_rounds()
    name = "Message API on the Ray engine of Flower (start-up left out)"
    print(f"{name:66s} {on_ray:9.3g}", flush=True)


def scale_ratio(rounds: int = 30, repetitions: int = 5) -> float:
    """What a larger population costs, if the cohorts stay the same size."""
    turns = []
    for nodes in (10**6, USERS):
        server = strategy(Poisson(nodes, rate=REPLIES / nodes))
        grid = InProcessGrid(client_app(linear_learner), nodes)
        own = train(server, grid, ArrayRecord([np.zeros((FEATURES, CLASSES))]))
        next(own)
        turns.append(own)
    many, few = turns
    return ratio(lambda: take(rounds, many), lambda: take(rounds, few), repetitions)


def rounds_per_second(rounds: int = 100, repetitions: int = 8) -> float:
    """Whole rounds: the draw, the messages, the clients, the sum, the noise and the charge."""
    grid = InProcessGrid(client_app(linear_learner), USERS)
    server = strategy(Poisson(USERS, rate=0.01))
    turns = train(server, grid, ArrayRecord([np.zeros((FEATURES, CLASSES))]))
    next(turns)  # what is made once is made before the clock starts
    return rounds / median_seconds(lambda: take(rounds, turns), repetitions)


def message_api(rounds: int = 20) -> Comparison:
    """Whole rounds through Flower's messages, and those of a plain loop on the same rows."""
    cohort = Poisson(USERS, rate=0.01)
    setting = Setting(Release(cohort, CLIP_NORM, noise_multiplier=1.0), Steps(0.1, 0.1))
    loop = plain_loop(from_table(linear_table()), (FEATURES, CLASSES), setting)
    grid = InProcessGrid(client_app(linear_learner), USERS)
    turns = train(strategy(cohort), grid, ArrayRecord([np.zeros((FEATURES, CLASSES))]))
    return Comparison(
        lambda: take(rounds, loop),
        lambda: take(rounds, turns),
        settings=1,
        repetitions=20,
        rounds=rounds,
    )


def stock_ratio(rounds: int = 10, repetitions: int = 40) -> float:
    """Rounds through Flower's messages over those of its FedAvg, whose clients take one step on the
    same rows: no θ, no clipping, no noise, no account."""
    w = ArrayRecord([np.zeros((FEATURES, CLASSES))])
    ours = train(
        strategy(Poisson(USERS, rate=0.01)),
        InProcessGrid(client_app(linear_learner), USERS),
        w,
    )
    theirs = stock_rounds(one_step, USERS, w)
    take(100, ours)
    take(100, theirs)
    return ratio(lambda: take(rounds, ours), lambda: take(rounds, theirs), repetitions)


def one_step(w: NDArray[Any], context: Context) -> NDArray[Any]:
    """w after one step on a minibatch of the node's rows."""
    learner = linear_learner(context)
    order = Order(1, 0.0, math.inf, "mean", True, visit=1)
    gradient, _ = learner.gradients(w.reshape(-1), learner.initial_theta(), order)
    return w - 0.1 * gradient.reshape(w.shape)


def recipe_seconds(users: int = 580, rows: int = 112) -> float:
    """A whole training by ``auto`` through messages, with its delivery."""
    server = PPSGD.auto(population=users, epsilon=1.0, delta=DELTA)
    grid = InProcessGrid(client_app(functools.partial(full_learner, rows=rows)), users)
    start = ArrayRecord([np.zeros((FEATURES, CLASSES))])
    return median_seconds(lambda: server.start(grid, start), 1)


@functools.lru_cache(maxsize=1)
def full_table(rows: int) -> Table:
    return random_table(USERS, rows, FEATURES, CLASSES)


@functools.lru_cache(maxsize=USERS)
def full_learner_of(user: int, rows: int) -> AdditiveLinear:
    """A user whose learner stays in this process, as that of a simulation may."""
    table = full_table(rows)
    own = slice(user * rows, (user + 1) * rows)
    x = table.x[own].astype(np.float64)
    return AdditiveLinear(Minibatches(x, table.y[own], BATCH, seed=1, user=user), FEATURES, CLASSES)


def full_learner(context: Context, rows: int) -> AdditiveLinear:
    return full_learner_of(int(context.node_config["partition-id"]), rows)


def server_ratio(size: int, dtype: DTypeLike, repetitions: int) -> float:
    """PPSGD over stock FedAvg in ``aggregate_train``, both of replies that hold the same arrays.

    FedAvg sums in the dtype of the replies, PPSGD always in float64: float32 is the harder
    comparison.
    """
    server = strategy(Poisson(REPLIES, rate=1.0))
    stock = FedAvg()
    grid = InProcessGrid(client_app(constant_learner), REPLIES)
    arrays = ArrayRecord([np.zeros(size, dtype)])
    asked = server.configure_train(1, arrays, ConfigRecord(), grid)
    records = [ArrayRecord([gradient.astype(dtype)]) for gradient in gradients(size)]
    weight = MetricRecord({NUM_EXAMPLES: SAMPLES})
    ours = []
    theirs = []
    for record, message in zip(records, asked, strict=True):
        ours.append(reply({GRADIENT: record}, message))
        theirs.append(reply({ARRAYS: record, METRICS: weight}, message))

    def one(round_: int) -> tuple[float, float]:
        server.configure_train(round_, arrays, ConfigRecord(), grid)
        own_seconds = seconds(lambda: server.aggregate_train(round_, ours))
        stock_seconds = seconds(lambda: stock.aggregate_train(round_, theirs))
        return own_seconds, stock_seconds

    return median_ratio(one(round_) for round_ in range(1, repetitions + 1))


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

    def secret() -> None:
        Coins.secret().normals(LARGE)

    def plain() -> None:
        np.random.normal(size=LARGE)

    return ratio(secret, plain, repetitions)


def peak_bytes(replies: int) -> int:
    """The most memory that ``aggregate_train`` holds at once in addition to w; its clients, in the
    same process, are included."""
    server = strategy(Poisson(replies, rate=1.0))
    grid = InProcessGrid(client_app(constant_learner), replies)
    messages = server.configure_train(1, ArrayRecord([np.zeros(LARGE)]), ConfigRecord(), grid)
    tracemalloc.start()
    server.aggregate_train(1, grid.send_and_receive(messages))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def message_api_rounds(make_grid: Callable[[ClientApp, int], Grid], rounds: int = 50) -> float:
    """Rounds per second of wall time."""
    grid = make_grid(client_app(linear_learner), NODES)
    server = strategy(Poisson(NODES, rate=0.1))
    turns = train(server, grid, ArrayRecord([np.zeros((FEATURES, CLASSES))]))
    next(turns)
    start = time.monotonic()
    take(rounds, turns)
    elapsed = time.monotonic() - start
    return rounds / elapsed


ON_RAY = """
import logging, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.ERROR)
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from simulations.benchmarks import server as benchmark

server = ServerApp()

@server.main()
def main(grid, context):
    rounds = benchmark.message_api_rounds(lambda app, nodes: grid, int(sys.argv[1]))
    print("rounds", rounds, flush=True)

client = benchmark.client_app(benchmark.linear_learner)
resources = {"client_resources": {"num_cpus": 1}}
run_simulation(server, client, benchmark.NODES, backend_config=resources)
"""


def ray_rounds(rounds: int = 20) -> float:
    """The same ClientApp on Flower's own simulation engine, in a process of its own; NaN if that
    fails."""
    done = in_a_process(ON_RAY, str(rounds))
    for line in done.stdout.splitlines():
        if line.startswith("rounds "):
            _, found = line.split()
            return float(found)
    return math.nan
