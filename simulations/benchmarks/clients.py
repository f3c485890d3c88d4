"""What a client costs: a message, a large model, files."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context

from flwr_ppsgd import Learner, Order, Poisson, client_app
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.client.theta import Stamp, Theta
from flwr_ppsgd.client.theta_store import DiskStore, Shared
from flwr_ppsgd.lab.loading import load
from flwr_ppsgd.learner import generator
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.wire import ORDER
from simulations.benchmarks.measuring import in_a_process, median_ratio, ratio, seconds, show
from simulations.benchmarks.networks import (
    convolutions,
    evaluation_ratio,
    head_ratio,
    layers,
    network_ratio,
)
from simulations.benchmarks.workload import (
    CLASSES,
    FEATURES,
    REPLIES,
    Constant,
    constant_learner,
    stock_rounds,
    strategy,
    train,
)
from simulations.yardsticks import take

THETA = 400_000
HUGE = 10**7


def show_clients() -> None:
    show("j. CPU of a message in a new process / a stock client's", message_ratio(), at_most=1.4)
    name = "j. a round of 10 users and 10^7 parameters / FedAvg's,"
    show(f"{name} a small θ", large_ratio(constant_learner), at_most=1.3)
    show(f"{name} θ as large as w", large_ratio(large_learner), at_most=2)
    show(
        "g. the engine's evaluation of 100 users' CNNs / one by one",
        evaluation_ratio(),
        at_most=0.67,
    )
    show(
        "g. AdditiveHead on a small CNN / a loop of autograd calls, 10 users",
        head_ratio(),
        at_most=1.1,
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


def theta_ms(size: int, repetitions: int = 20) -> tuple[float, float]:
    """Milliseconds of wall time, the disk included, to save and to load one user's θ."""
    saving = []
    loading = []
    vector = generator("theta").normal(size=size)
    w = vector.astype(np.float32).tobytes()
    with tempfile.TemporaryDirectory(dir=".") as directory:
        for visit in range(1, repetitions + 1):
            start = time.perf_counter()
            store = DiskStore(Path(directory), "user", "run")
            stamps = store.stamps()
            seen = stamps[0].serial if stamps else 0
            with store.writing():
                store.note({"bytes": {}})
                store.put_shared(Shared({"w": w}, 1, ""))
                store.put_theta(Theta(vector, Stamp(visit=visit, round=visit), seen=seen), back=0)
            between = time.perf_counter()
            store.load(store.stamps()[0])
            store.close()
            saving.append(between - start)
            loading.append(time.perf_counter() - between)
    return 1000 * min(saving), 1000 * min(loading)


class LargeConstant(Constant):
    """The same with θ as large as w, and one gradient for both, as an additive model has."""

    def initial_theta(self) -> Vector:
        return np.zeros(HUGE)

    def gradients(self, w: Vector, theta: Vector, order: Order) -> tuple[Vector, Vector]:  # noqa: ARG002
        gradient = np.ones_like(w)
        return gradient, gradient


def large_learner(context: Context) -> LargeConstant:  # noqa: ARG001
    return LargeConstant()


def large_ratio(learner_for: Callable[[Context], Learner], repetitions: int = 5) -> float:
    """What large messages cost: the clients' gradients take next to no time on either side."""
    w = ArrayRecord([np.zeros(HUGE, np.float32)])
    server = strategy(Poisson(REPLIES, rate=1.0))
    ours = train(server, InProcessGrid(client_app(learner_for), REPLIES), w)
    theirs = fedavg(w)
    take(1, ours)
    take(1, theirs)
    return ratio(lambda: take(1, ours), lambda: take(1, theirs), repetitions)


def fedavg(w: ArrayRecord) -> Iterator[int]:
    """Rounds without end of Flower's FedAvg, whose clients take a step along ``Constant``."""
    return stock_rounds(lambda w, _: w - 0.1 * np.ones_like(w), REPLIES, w)


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
    return median_ratio(pairs)


def message_seconds(client: str) -> float:
    order = Order(1, 0.1, 1.0, "mean", True).to_flat()
    send = SEND_MESSAGE.replace("ORDER", ORDER).replace("FLAT", repr(order))
    return float(in_a_process(client + send).stdout)


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
