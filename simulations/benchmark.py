"""Speeds and memory against their targets. Ratios are taken within one run, since machines are
noisy.

A time is CPU time on one thread; the two sides of a ratio take turns. It is the shortest of several
repetitions; where a plain loop is the other side, the median of the ratios of all turns.
"""

import os

# read when numpy is imported
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that this runs as a file, too

import functools
import itertools
import logging
import math
import statistics
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from numpy.typing import DTypeLike
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_ppsgd import (
    PPSGD,
    Ledger,
    Order,
    Poisson,
    Release,
    SecureSum,
    Steps,
    affordable_rounds,
    calibrate_noise,
    client_app,
    clip,
    torch_client,
)
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.client.personal import Personal
from flwr_ppsgd.client.shelf import Shelf
from flwr_ppsgd.data import load
from flwr_ppsgd.data.synthetic import Synthetic
from flwr_ppsgd.learner import Minibatches, all_rows, generator
from flwr_ppsgd.models.cnn import paper_cnn
from flwr_ppsgd.models.linear import AdditiveLinear, Matrix
from flwr_ppsgd.models.split import AdditiveHead, SplitLearner
from flwr_ppsgd.noise import Coins, GridSum, secure_input
from flwr_ppsgd.recipe import recipe
from flwr_ppsgd.secure.coordinator import Coordinator
from flwr_ppsgd.secure.messages import Partners, Roster
from flwr_ppsgd.secure.participant import Keyed, Session
from flwr_ppsgd.server.training import Training
from flwr_ppsgd.simulation.batches import Fresh, Table
from flwr_ppsgd.simulation.engine import Engine, Setting
from flwr_ppsgd.simulation.grid import InProcessGrid
from flwr_ppsgd.simulation.learners import Found, LearnerEngine
from flwr_ppsgd.simulation.linear import CohortEngine
from flwr_ppsgd.simulation.networks import NetworkEngine
from flwr_ppsgd.wire import ARRAYS, GRADIENT, METRICS, NUM_EXAMPLES, ORDER
from simulations.yardsticks import (
    STEPS,
    autograd_loop,
    bags_of_words,
    from_table,
    plain_loop,
    random_table,
    settings,
    small_cnn,
    take,
    whole_cohort_loop,
)

USERS = 1000
FEATURES = 784
CLASSES = 10
SAMPLES = 100  # per user
BATCH = 10
REPLIES = 10
SMALL = FEATURES * CLASSES
LARGE = 10**6
CLIP_NORM = 1.0
DELTA = 1e-4
THETA = 400_000
# of a sample's gradient in the paper's CNN: 2 for each of 422,208 products forward, as many for the
# gradient of the parameters, and 221,504 for that of all inputs but the image
PAPER_CNN_OPERATIONS = 2 * (2 * 422_208 + 221_504)
NODES = 100  # for orientation: rounds of the Message API


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.WARNING)
    print(f"{'measurement':66s} {'measured':>9s}   target")
    show_accounting()
    show_server()
    show_noise()
    show_memory()
    show_clients()
    show_secure()
    show_cohort_engine()
    show_orientation()


def show_accounting() -> None:
    """CPU seconds for what people wait for before a training, and in the middle of one."""
    calibrating, counting = rare_rounds_seconds()
    show("k. calibrate_noise at q = 1e-4, T = 10^6, in s", calibrating, at_most=3)
    show("k. affordable_rounds, the same, in s", counting, at_most=3)
    show("k. epsilon of a ledger of 50 kinds of release, in s", mixed_seconds(), at_most=1)


def show_server() -> None:
    show(
        "a. rounds per CPU second: 10 of 1000 nodes, 784×10, minibatch 10",
        rounds_per_second(),
        at_least=200,
    )
    show_against_loop("a. the same / a plain loop", message_api(), least=0.15)
    show("a. the same, a round of 10 of 10^6 nodes / of 1000 nodes", scale_ratio(), at_most=3)
    for dtype in (np.float32, np.float64):
        name = f"b. aggregate_train / FedAvg's, 10 {dtype.__name__} replies of"
        show(f"{name} 7,840", server_ratio(SMALL, dtype, repetitions=200), at_most=2)
        show(f"{name} 10^6", server_ratio(LARGE, dtype, repetitions=15), at_most=3)


def show_noise() -> None:
    name = "c. quick_epsilon in ms per round,"
    show(f"{name} cohorts by coin", epsilon_ms(rate=0.01), at_most=1)
    show(f"{name} everyone in every round", epsilon_ms(rate=1.0), at_most=1)
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


def show_clients() -> None:
    show("j. CPU of a message in a new process / a stock client's", message_ratio(), at_most=1.4)
    show("j. a round of 10 users and 10^7 parameters / FedAvg's", large_ratio(), at_most=1.3)
    show(
        "g. the engine's evaluation of 100 users' CNNs / one by one",
        evaluation_ratio(),
        at_most=0.67,
    )
    show(
        "g. AdditiveHead on a small CNN / a loop of autograd calls, 10 users",
        head_ratio(),
        at_most=1.3,
    )
    name = "g. a round of 10 clients / FedAvg's, one pass over 128 rows, 10^6 parameters:"
    show(f"{name} convolutions", network_ratio(convolutions, (1, 28, 28), "7.*"), at_most=1.15)
    show(f"{name} linear layers", network_ratio(layers, (FEATURES,), "4.*"), at_most=1.15)
    saving, loading = theta_ms(THETA)
    show(
        "h. θ of 400,000 floats to disk, with w and the note of what left, in ms",
        saving,
        at_most=30,
    )
    show("h. θ of 400,000 floats from disk, in ms", loading, at_most=10)
    show(
        "i. seconds to load 64,716 images of 580 users from one .npz",
        loading_seconds(),
        at_most=2,
    )


def show_secure() -> None:
    few = SecureSum(honest=95, colluding=2, neighbours=20)
    everyone = SecureSum(honest=95, colluding=2, neighbours=99)
    name = "j. a round / a plain one, 100 clients, 10^4×10, minibatch 10,"
    show(f"{name} 20 neighbours", secure_ratio(few), at_most=10)
    show(f"{name} all neighbours", secure_ratio(everyone), at_most=40)
    show(
        "j. seconds of CPU per client and round at 10^6, 32 neighbours",
        secure_client_seconds(LARGE, neighbours=32),
        at_most=1,
    )
    many, few_bytes = (secure_server_bytes(clients) for clients in (40, 20))
    show("j. peak memory of the sum at 10^6, 40 clients / 20", many / few_bytes, at_most=1.1)


def show_cohort_engine() -> None:
    print(
        "\nThe cohort engine in setting-rounds per CPU second, over those of a plain loop, one "
        "setting at a time:"
    )
    for name, comparison, least in COHORTS:
        show_against_loop(name, comparison(), least)
    show(
        "f. the sparse sweep: what memory and secret normals need / a round",
        words_share(),
        at_least=0.4,
    )
    for classes in (10, 62):
        of_products, of_square = recipe_shares(classes)
        name = f"f. a round of the recipe, 784×{classes}:"
        show(f"{name} BLAS for its two products / all of it", of_products, at_least=0.6)
        print(
            f"{'   the same as a share of the rate of a large square product':66s} {of_square:9.3g}"
        )


def show_orientation() -> None:
    print(
        "\nFor orientation, rounds per second of wall time, 784×10, minibatch 10, 10 of 100 nodes:"
    )
    in_process = message_api_rounds(InProcessGrid)
    print(f"{'Message API on InProcessGrid':66s} {in_process:9.3g}")
    on_ray = ray_rounds()
    name = "Message API on the Ray engine of Flower (start-up left out)"
    print(f"{name:66s} {on_ray:9.3g}", flush=True)
    name = "The paper's CNN on the cohort engine, share of sgemm's speed"
    print(f"{name:66s} {paper_network_share():9.3g}", flush=True)


def show(name: str, value: float, *, at_least: float = 0.0, at_most: float = math.inf) -> None:
    """One line of the table."""
    target = f"≥ {at_least:g}" if at_least else f"≤ {at_most:g}"
    verdict = "ok" if at_least <= value <= at_most else "MISSED"
    print(f"{name:66s} {value:9.3g}   {target:6s} {verdict}", flush=True)


@dataclass(frozen=True)
class Comparison:
    """Rounds of a plain loop with one setting, and rounds of the engine with all of them.

    Args:
        loop: runs ``rounds`` rounds of the loop.
        engine: runs ``rounds`` rounds of the engine.
        settings: the number of settings that the engine trains.
        repetitions: how often the two take turns.
        rounds: the number of rounds in one turn.
    """

    loop: Callable[[], object]
    engine: Callable[[], object]
    settings: int
    repetitions: int
    rounds: int = 1


def show_against_loop(name: str, compared: Comparison, least: float) -> None:
    """The median ratio over all turns, and the median time of a round on both sides.

    Ratios are taken within a turn, since a machine that others share changes its speed from second
    to second. What only the first rounds pay (fresh memory, Gram matrices) is left out.
    """
    compared.loop()
    compared.engine()
    loop_seconds = []
    engine_seconds = []
    ratios = []
    for _ in range(compared.repetitions):
        loop_seconds.append(seconds(compared.loop))
        engine_seconds.append(seconds(compared.engine))
        ratios.append(loop_seconds[-1] / engine_seconds[-1])
    loop_ms = 1000 * statistics.median(loop_seconds) / compared.rounds
    engine_ms = 1000 * statistics.median(engine_seconds) / compared.rounds
    times = statistics.median(ratios) * compared.settings
    show(f"{name}, {loop_ms:.3g} → {engine_ms:.3g} ms", times, at_least=least)


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


def rare_rounds_seconds() -> tuple[float, float]:
    """For calibrating a million rounds in which one of ten thousand takes part, and for counting
    how many such rounds can be paid for."""
    cohort = Poisson(10**6, rate=1e-4)

    def calibrated() -> float:
        return calibrate_noise(epsilon=1.0, delta=1e-6, cohort=cohort, rounds=10**6)

    def counted() -> int:
        release = Release(cohort, CLIP_NORM, noise_multiplier=0.7327)
        return affordable_rounds(max_epsilon=1.0, delta=1e-6, release=release)

    return seconds(calibrated), seconds(counted)


def mixed_seconds() -> float:
    """For ε of fifty noise multipliers, twenty rounds each."""
    ledger = Ledger(1e-5)
    for kind in range(50):
        noise = 1 + 0.02 * kind
        ledger = ledger.record(Release(Poisson(USERS, 0.01), CLIP_NORM, noise), 20)
    return seconds(ledger.epsilon)


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
    shortest = min(seconds(lambda: take(rounds, turns)) for _ in range(repetitions))
    return rounds / shortest


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


def train(server: PPSGD, grid: Grid, arrays: ArrayRecord) -> Iterator[int]:
    """Rounds without end; yields the number of each."""
    round_ = 0
    while True:
        round_ += 1
        messages = server.configure_train(round_, arrays, ConfigRecord(), grid)
        arrays, _ = server.aggregate_train(round_, grid.send_and_receive(messages))
        yield round_


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

    return shortest_ratio(one(round_) for round_ in range(1, repetitions + 1))


def theta_ms(size: int, repetitions: int = 20) -> tuple[float, float]:
    """Milliseconds of wall time, the disk included, to save and to load one user's θ."""
    saving = []
    loading = []
    vector = generator("theta").normal(size=size)
    w = vector.astype(np.float32).tobytes()
    stamp = Personal(vector, run=1).stamp()
    with tempfile.TemporaryDirectory(dir=".") as directory:
        shelf = Shelf(Path(directory), "run", "user")
        for serial in range(repetitions):
            start = time.perf_counter()
            with shelf.writing():
                shelf.note({"bytes": {}})
                shelf.put_shared({"w": w}, 1, "")
                shelf.put(1, stamp, {"theta": vector}, seen=serial, base=serial)
            between = time.perf_counter()
            next(shelf.saves())
            saving.append(between - start)
            loading.append(time.perf_counter() - between)
    return 1000 * min(saving), 1000 * min(loading)


def gradients(size: int) -> list[Vector]:
    """Replies of norm about 10·C: all of them are clipped."""
    source = generator("gradients", size)
    std = 10 * CLIP_NORM / math.sqrt(size)
    return [source.normal(0, std, size) for _ in range(REPLIES)]


def reply(records: Mapping[str, ArrayRecord | MetricRecord], message: Message) -> Message:
    return Message(RecordDict({**records}), reply_to=message)


def epsilon_ms(rate: float, rounds: int = 100, repetitions: int = 5) -> float:
    """Milliseconds for ε after one round, asked for after every round as the strategy does.

    What only the first one pays is left out, and no ledger is asked twice, since an answer may be
    kept.
    """
    release = Release(Poisson(USERS, rate), CLIP_NORM, noise_multiplier=1.0)
    growing = ledgers(release)
    next(growing).quick_epsilon()

    def ask() -> None:
        for ledger in itertools.islice(growing, rounds):
            ledger.quick_epsilon()

    shortest = min(seconds(ask) for _ in range(repetitions))
    return 1000 * shortest / rounds


def ledgers(release: Release) -> Iterator[Ledger]:
    """The ledger after one round, after two, and so on."""
    for rounds in itertools.count(1):
        yield Ledger(DELTA).record(release, rounds)


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


class Constant:
    """The same gradient whatever the parameters are. θ has one number, so that nearly all memory
    is the server's."""

    num_examples = 1

    def initial_theta(self) -> Vector:
        return np.zeros(1)

    def gradients(self, w: Vector, theta: Vector, order: Order) -> tuple[Vector, Vector]:  # noqa: ARG002
        return np.ones_like(w), np.ones_like(theta)

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:  # noqa: ARG002
        return {}


def constant_learner(context: Context) -> Constant:  # noqa: ARG001
    return Constant()


def large_ratio(size: int = 10**7, repetitions: int = 3) -> float:
    """Rounds of a model whose θ is small, such as a head: what large messages cost.

    The clients' gradients take no time on either side, so this is the worst case.
    """
    w = ArrayRecord([np.zeros(size, np.float32)])
    server = strategy(Poisson(REPLIES, rate=1.0))
    ours = train(server, InProcessGrid(client_app(constant_learner), REPLIES), w)
    theirs = fedavg(w)
    take(1, ours)
    take(1, theirs)
    return ratio(lambda: take(1, ours), lambda: take(1, theirs), repetitions)


def fedavg(w: ArrayRecord) -> Iterator[int]:
    """Rounds without end of Flower's FedAvg, whose clients take a step along ``Constant``."""
    app = ClientApp()

    @app.train()
    def step(message: Message, context: Context) -> Message:  # noqa: ARG001
        arrays = message.content[ARRAYS]
        assert isinstance(arrays, ArrayRecord)
        (w,) = arrays.to_numpy_ndarrays()
        trained = w - 0.1 * np.ones_like(w)
        weight = MetricRecord({NUM_EXAMPLES: 1})
        return reply({ARRAYS: ArrayRecord([trained]), METRICS: weight}, message)

    stock = FedAvg(fraction_evaluate=0.0)
    grid = InProcessGrid(app, REPLIES)
    for round_ in itertools.count(1):
        stock_round(stock, grid, w)
        yield round_


# Flower starts a process for every message: what it loads, and one gradient of 784×10 numbers.
STOCK_MESSAGE = """
import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    x = np.ones((10, 784))
    trained = w - 0.1 * x.T @ (x @ w)
    metrics = MetricRecord({"num-examples": 10})
    content = RecordDict({"arrays": ArrayRecord([trained]), "metrics": metrics})
    return Message(content, reply_to=message)
"""
OUR_MESSAGE = """
import numpy as np
from flwr_ppsgd import client_app
from simulations.deployment.client_app import LeastSquares

def learner_for(context):
    rows = np.ones((10, 784)), np.ones((10, 10))
    return LeastSquares(*rows, 10, rows)

app = client_app(learner_for)
"""
SEND_MESSAGE = """
import time
from math import inf
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
records = {"arrays": ArrayRecord([np.zeros((784, 10))]), "ORDER": ConfigRecord(FLAT)}
context = Context(1, 1, {}, RecordDict(), {})
reply = app(Message(RecordDict(records), 1, "train"), context)
assert not reply.has_error()
print(time.process_time())
"""


def message_ratio(repetitions: int = 5) -> float:
    """CPU time of a process that loads a client and answers one message."""
    pairs = []
    for _ in range(repetitions):
        pairs.append((message_seconds(OUR_MESSAGE), message_seconds(STOCK_MESSAGE)))
    return shortest_ratio(pairs)


def message_seconds(client: str) -> float:
    order = Order(1, 0.1, 1.0, "mean", True).to_flat()
    send = SEND_MESSAGE.replace("ORDER", ORDER).replace("FLAT", repr(order))
    return float(in_a_process(client + send).stdout)


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


WIDE = 10**5
SECURE_CLIENTS = 100
SESSION = Session(training=1, run=1, start=1, round=1)


@functools.cache
def wide_rows() -> tuple[Matrix, Matrix]:
    """Rows of x, which all users share to save memory, and classes as one-hot rows."""
    source = generator("wide")
    x = source.normal(size=(SAMPLES, WIDE // CLASSES))
    return x, np.eye(CLASSES)[source.integers(CLASSES, size=SAMPLES)]


def wide_learner(context: Context) -> AdditiveLinear:
    """An additive linear model with softmax and 10^5 coordinates."""
    x, y = wide_rows()
    user = int(context.node_config["partition-id"])
    batches = Minibatches(x, y, BATCH, seed=1, user=user)
    return AdditiveLinear(batches, WIDE // CLASSES, CLASSES, loss="softmax")


def secure_ratio(rules: SecureSum, repetitions: int = 2) -> float:
    """CPU of a round with a secure sum over that of a plain round; both in this process."""

    def round_with(aggregation: SecureSum | None) -> float:
        release = Release(Poisson(SECURE_CLIENTS, 1.0), CLIP_NORM, 1.0)
        steps = Steps(shared=0.1, personal=0.1)
        server = PPSGD(release=release, steps=steps, delta=DELTA, aggregation=aggregation)
        grid = InProcessGrid(client_app(wide_learner), SECURE_CLIENTS)
        moments: list[float] = []
        server.start(
            grid,
            ArrayRecord([np.zeros(WIDE)]),
            num_rounds=2,
            on_round=lambda *_: moments.append(time.process_time()),
        )
        return moments[-1] - moments[-2]

    return shortest_ratio((round_with(rules), round_with(None)) for _ in range(repetitions))


def secure_client_seconds(size: int, neighbours: int) -> float:
    """What one client works in all four exchanges, with as many neighbours as there are others."""
    rules = SecureSum(honest=neighbours - 1, colluding=2)
    release = Release(Poisson(neighbours + 1, 1.0), CLIP_NORM, 1.0, aggregation=rules)
    vector = np.full(size, 1e-6)
    keyed = [Keyed.new(SESSION) for _ in range(neighbours + 1)]
    server = Coordinator[int](rules, SESSION, size)
    for node, state in enumerate(keyed):
        server.take_keys(node, state.message.to_bytes())
    rosters = {node: Roster.from_bytes(data) for node, data in server.rosters().items()}
    sent = [state.share(rosters[node], rules) for node, state in enumerate(keyed)]
    for node, (_, shares) in enumerate(sent):
        server.take_shares(node, shares.to_bytes())
    partners = Partners.from_bytes(server.partners()[0], len(keyed))

    def one_client() -> None:
        Keyed.new(SESSION)
        shared, _ = keyed[0].share(rosters[0], rules)
        x = secure_input(vector, size, release, None, Coins.secret())
        masked, _ = sent[0][0].masked(partners, rules, x)
        masked.reveal(partners.members, rules)
        assert shared.roster.place == 0

    return min(seconds(one_client) for _ in range(3))


def secure_server_bytes(clients: int) -> int:
    """The most memory that the server's part of a sum of 10^6 takes."""
    rules = SecureSum(honest=clients - 2, colluding=0)
    keyed = [Keyed.new(SESSION) for _ in range(clients)]
    words = np.zeros(LARGE, np.uint64)
    tracemalloc.start()
    server = Coordinator[int](rules, SESSION, LARGE)
    for node, state in enumerate(keyed):
        server.take_keys(node, state.message.to_bytes())
    rosters = server.rosters()
    for node, state in enumerate(keyed):
        _, shares = state.share(Roster.from_bytes(rosters[node]), rules)
        server.take_shares(node, shares.to_bytes())
    server.partners()
    for node in range(clients):
        server.take_masked(node, words)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def one_setting() -> Comparison:
    """ε after every round, on both sides."""
    release = Release(Poisson(USERS, rate=0.01), clip_norm=10.0, noise_multiplier=1.0)
    setting = Setting(release, Steps(0.001, 0.001))
    table = linear_table()
    loop = plain_loop(from_table(table), (FEATURES, CLASSES), setting)
    engine = warmed(CohortEngine(table, [setting], seed=1, rounds=20_000))
    growing = ledgers(release)

    def rounds() -> None:
        for ledger in itertools.islice(growing, 50):
            engine.advance()
            ledger.quick_epsilon()

    return Comparison(lambda: take(50, loop), rounds, settings=1, repetitions=40, rounds=50)


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


def linear_sweep() -> Comparison:
    release = Release(Poisson(USERS, rate=0.01), clip_norm=10.0, noise_multiplier=1.0)
    table = linear_table()
    grid = settings(release, (1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01))
    loop = plain_loop(from_table(table), (FEATURES, CLASSES), grid[20])
    engine = warmed(CohortEngine(table, grid, seed=1, rounds=10_000))
    return against(loop, engine, settings=len(grid), repetitions=20, rounds=20)


def synthetic_sweep() -> Comparison:
    problem = Synthetic.draw(USERS, 100, seed=1)
    release = Release(Poisson(USERS, rate=1.0), clip_norm=10.0, noise_multiplier=10.0)
    grid = settings(release, STEPS)
    loop = whole_cohort_loop(problem, BATCH, grid[50])
    engine = CohortEngine(Fresh(problem, BATCH), grid, seed=1)
    return against(loop, engine, settings=len(grid), repetitions=12, rounds=5)


def words_sweep() -> Comparison:
    release = Release(Poisson(500, rate=0.02), clip_norm=0.01, noise_multiplier=1.0)
    table = bags_of_words(500, SAMPLES, 5000, 80)
    grid = settings(release, (2.0, 5.0, 10.0, 20.0))
    loop = plain_loop(from_table(table), (5000, 80), grid[10])
    take(100, loop)
    engine = warmed(CohortEngine(table, grid, seed=1, rounds=2000))
    return against(loop, engine, settings=len(grid), repetitions=12, rounds=5)


def words_share(rounds: int = 5, repetitions: int = 8) -> float:
    """How near the sparse sweep is to what bounds it: the rows of V and θ that a round must read
    or write, at the speed of a large copy, and one secret normal for each coordinate of w."""
    release = Release(Poisson(500, rate=0.02), clip_norm=0.01, noise_multiplier=1.0)
    table = bags_of_words(500, SAMPLES, 5000, 80)
    grid = settings(release, (2.0, 5.0, 10.0, 20.0))
    engine = warmed(CohortEngine(table, grid, seed=1, rounds=2000))
    must_move = words_bytes(table, columns=32 * 80)  # one α has no θ, another has no w
    source = np.ones(10**7)
    target = np.ones(10**7)
    shares = []
    for _ in range(repetitions):
        copying = seconds(lambda: np.copyto(target, source))
        moving = must_move * copying / (2 * source.nbytes)
        drawing = seconds(lambda: Coins.secret().normals(5000 * 80))
        shares.append(rounds * (moving + drawing) / seconds(lambda: several(engine, rounds)))
    return statistics.median(shares)


def words_bytes(table: Table, columns: int) -> float:
    """Bytes that a round of ten users cannot avoid to read or write.

    The rows of V for the words of the cohort: read for scores, read and written by the step. A_i
    of each user (see ``Span``): read, and the rows of the minibatch written. Σ_t n_t: read and
    written.
    """
    users = np.arange(0, len(table), len(table) // 10)
    batch = table.batch(users, np.ones(len(users), dtype=np.intp), np.dtype(np.float64))
    _, columns_with_entries = batch.flat.nonzero()
    words = len(np.unique(columns_with_entries))
    own_rows = len(users) * (SAMPLES + BATCH)
    noise = 2 * table.features * table.outputs
    return 8.0 * (3 * words * columns + own_rows * columns + noise)


def recipe_shares(classes: int, users: int = 150, repetitions: int = 8) -> tuple[float, float]:
    """(Time that BLAS needs for X_i w and X_iᵀR_i of everyone over that of a round; speed of the
    round in multiplications per second over that of a large square product).

    Everyone takes part with all rows, gradients are normalised, and the server steps by Adam.
    """
    engine, batches = recipe_engine(classes, users)
    w = np.zeros((FEATURES, classes))
    residual = np.zeros((SAMPLES, classes))
    rows = [all_rows(own)[0] for own in batches]
    square = generator("square").normal(size=(1000, 1000))

    def products() -> None:
        for x in rows:
            np.matmul(x, w)
            np.matmul(x.T, residual)

    several(engine, 1)
    of_products = []
    of_square = []
    multiplications = 2.0 * users * SAMPLES * FEATURES * classes
    for _ in range(repetitions):
        round_seconds = seconds(engine.advance)
        square_seconds = seconds(lambda: np.matmul(square, square))
        of_products.append(seconds(products) / round_seconds)
        of_square.append(multiplications / round_seconds * square_seconds / 1e9)
    return statistics.median(of_products), statistics.median(of_square)


def recipe_engine(classes: int, users: int) -> tuple[LearnerEngine, list[Minibatches]]:
    """``method = "auto"`` without its vote, which comes once, and everyone's rows."""
    table = random_table(users, SAMPLES, FEATURES, classes)
    batches = []
    for user in range(users):
        own = slice(user * SAMPLES, (user + 1) * SAMPLES)
        x = table.x[own].astype(np.float64)
        batches.append(Minibatches(x, table.y[own], BATCH, seed=1, user=user))
    learners = [AdditiveLinear(own, FEATURES, classes) for own in batches]
    planned = recipe(population=users, delta=DELTA, noise_multiplier=10.0)
    arguments = planned.arguments() | {"vote": None}
    training = Training(**arguments, insecure_seed=1)
    nothing = Found({}, np.zeros(0))
    engine = LearnerEngine(
        training,
        learners.__getitem__,
        np.zeros(FEATURES * classes),
        lambda w, thetas: nothing,  # noqa: ARG005
    )
    return engine, batches


def loading_seconds(users: int = 580, rows: int = 64_716) -> float:
    """CPU seconds to load a compressed file of one's own data, mostly background as images are."""
    source = generator("file")
    pixels = source.integers(256, size=(rows, FEATURES), dtype=np.uint8)
    x = pixels * (source.random((rows, FEATURES)) < 0.2)
    y = source.integers(CLASSES, size=rows)
    user = np.sort(np.arange(rows) % users)
    test = np.arange(rows) % 10 == 0
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "images.npz"
        np.savez_compressed(path, x=x, y=y, user=user, test=test)
        return min(seconds(lambda: load(str(path))) for _ in range(3))


def network(settings: int = 1) -> Comparison:
    """What is compared is a cohort's gradients by products against a loop over users."""
    setting = network_setting()
    batches = [images(user) for user in range(50)]
    engine = NetworkEngine(head(), batches, [setting] * settings, seed=1)
    loop = head_loop(setting)
    return against(loop, engine, settings=settings, repetitions=16, rounds=10)


def network_setting(users: int = 50) -> Setting:
    release = Release(Poisson(users, rate=0.2), clip_norm=0.1, noise_multiplier=1.0)
    return Setting(release, Steps(0.1, 0.1))


def paper_network_share(settings: int = 8, repetitions: int = 10) -> float:
    """The speed at which the engine trains the paper's CNN, over that of a product of two large
    float32 matrices: the most that any engine could reach."""
    users = 10
    source = generator("pixels")
    batches = []
    for user in range(users):
        x = source.random((SAMPLES, FEATURES), dtype=np.float32)
        y = source.integers(CLASSES, size=SAMPLES)
        batches.append(Minibatches(x, y, BATCH, seed=1, user=user))
    release = Release(Poisson(users, rate=1.0), clip_norm=0.1, noise_multiplier=1.0)
    setting = Setting(release, Steps(0.1, 0.1))
    engine = NetworkEngine(paper_cnn(0), batches, [setting] * settings, seed=1)
    matrix = source.random((1024, 1024), dtype=np.float32)
    engine.advance()
    operations = settings * users * BATCH * PAPER_CNN_OPERATIONS
    slowdown = ratio(engine.advance, lambda: matrix @ matrix, repetitions)
    return operations / (2 * 1024**3) / slowdown


def head_ratio(rounds: int = 5, repetitions: int = 30) -> float:
    """Rounds of the Message API on ``InProcessGrid``, everyone in every round, against Algorithm 3
    as a loop."""
    server = strategy(Poisson(REPLIES, rate=1.0))
    grid = InProcessGrid(client_app(head_learner), REPLIES)
    turns = train(server, grid, head().initial_arrays())
    loop = head_loop(Setting(server.release, server.steps))
    return ratio(lambda: take(rounds, turns), lambda: take(rounds, loop), repetitions)


def layers() -> nn.Module:
    """784 → 1,000 → 200 → 10: 987,210 parameters."""
    return nn.Sequential(
        nn.Linear(FEATURES, 1000),
        nn.ReLU(),
        nn.Linear(1000, 200),
        nn.ReLU(),
        nn.Linear(200, CLASSES),
    )


def convolutions() -> nn.Module:
    """Two convolutions and two linear layers: 983,606 parameters."""
    features = [nn.Conv2d(1, 32, 5), nn.MaxPool2d(2), nn.ReLU()]
    features += [nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(1024, 900), nn.Linear(900, CLASSES))


@functools.cache
def network_rows(shape: tuple[int, ...]) -> DataLoader[tuple[torch.Tensor, ...]]:
    """128 rows as pictures or as vectors."""
    table = linear_table()
    x = table.x[:128]
    y = table.y[:128]
    inputs = torch.tensor(x).float().reshape(128, *shape)
    return DataLoader(TensorDataset(inputs, torch.tensor(y).argmax(dim=1)), batch_size=32)


def stock_client(network: Callable[[], nn.Module], shape: tuple[int, ...]) -> ClientApp:
    """An epoch as Flower's quickstart has it: load, step by step, send all parameters."""
    app = ClientApp()

    @app.train()
    def train_one_epoch(message: Message, context: Context) -> Message:  # noqa: ARG001
        module = network()
        module.load_state_dict(message.content.array_records[ARRAYS].to_torch_state_dict())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for x, y in network_rows(shape):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        metrics = MetricRecord({NUM_EXAMPLES: 128})
        content = RecordDict({ARRAYS: ArrayRecord(module.state_dict()), METRICS: metrics})
        return Message(content, reply_to=message)

    return app


def network_ratio(
    network: Callable[[], nn.Module],
    shape: tuple[int, ...],
    personal: str,
    repetitions: int = 10,
) -> float:
    """A round of PPSGD over a round of FedAvg, both on ``InProcessGrid``.

    The gradient of w is that of all rows, so both sides pass over them once.
    """
    initial = ArrayRecord(network().state_dict())
    ours = torch_client(
        network,
        personal,
        lambda _: (network_rows(shape), None),
        additive=True,
        full_batch=True,
    )
    server = strategy(Poisson(REPLIES, rate=1.0))
    turns = train(server, InProcessGrid(ours, REPLIES), initial)
    stock = FedAvg(fraction_evaluate=0.0, min_available_nodes=REPLIES)
    theirs = InProcessGrid(stock_client(network, shape), REPLIES)
    return ratio(
        lambda: take(1, turns),
        lambda: stock_round(stock, theirs, initial),
        repetitions,
    )


def stock_round(stock: FedAvg, grid: Grid, arrays: ArrayRecord) -> None:
    """One round of FedAvg, without Flower's pauses."""
    messages = stock.configure_train(1, arrays, ConfigRecord(), grid)
    stock.aggregate_train(1, list(grid.send_and_receive(messages)))


def evaluation_ratio(users: int = 100, repetitions: int = 5) -> float:
    """What it saves that the engine measures users with 5 to 17 rows each in large calls of the
    network."""
    source = generator("evaluation")
    tests = []
    for size in source.integers(5, 18, size=users).tolist():
        x = source.normal(size=(size, 1, 28, 28)).astype(np.float32)
        tests.append((x, source.integers(CLASSES, size=size)))
    model = head()
    batches = [images(user) for user in range(users)]
    engine = NetworkEngine(model, batches, [network_setting(users)], seed=1, tests=tests)

    def one_by_one() -> None:
        for user, rows in enumerate(tests):
            model.evaluate(engine.w(0), engine.theta(0, user), rows)

    return ratio(engine.measures, one_by_one, repetitions)


def head_loop(setting: Setting) -> Iterator[float]:
    draws = map(images(0), itertools.count(1))
    module = head().module_with(head().initial_w())
    return autograd_loop(module.train(), draws, setting, personal="personal")


@functools.cache
def head() -> AdditiveHead:
    torch.set_num_threads(1)
    return AdditiveHead(small_cnn(), num_features=32, num_outputs=10)


@functools.cache
def images(user: int) -> Minibatches:
    source = generator("images")
    x = source.normal(size=(SAMPLES, 1, 28, 28)).astype(np.float32)
    y = source.integers(10, size=SAMPLES)
    return Minibatches(x, y, BATCH, seed=1, user=user)


@functools.cache
def head_learner_of(user: int) -> SplitLearner:
    return head().learner(images(user))


def head_learner(context: Context) -> SplitLearner:
    return head_learner_of(int(context.node_config["partition-id"]))


@functools.cache
def linear_table() -> Table:
    return random_table(USERS, SAMPLES, FEATURES, CLASSES)


def warmed(engine: CohortEngine, rounds: int = 500) -> CohortEngine:
    """The engine after enough rounds that most rows have been drawn. Before that, θ is memory that
    nothing has touched."""
    several(engine, rounds)
    return engine


def several(engine: Engine, rounds: int) -> None:
    for _ in range(rounds):
        engine.advance()


COHORTS: tuple[tuple[str, Callable[[], Comparison], float], ...] = (
    ("f. one setting, 784×10, Q=10, ε every round", one_setting, 1.5),
    ("f. 63 settings, the same", linear_sweep, 10),
    ("f. 99 settings, synthetic, N=1000, d=100, Q=N", synthetic_sweep, 15),
    ("f. 36 settings, sparse 5000×80, N=500, Q=10", words_sweep, 100),
    ("f. CNN with additive head, Q=10", network, 2),
    ("f. 8 settings, the same", functools.partial(network, 8), 2),
)


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
from simulations import benchmark

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


def in_a_process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


if __name__ == "__main__":
    main()
