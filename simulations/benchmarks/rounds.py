"""Rounds through Flower's messages beside those of its FedAvg, and what a client costs."""

import functools
import math
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_ppsgd import Order, Poisson, client_app, torch_client
from flwr_ppsgd.client.theta import Theta, ThetaStamp
from flwr_ppsgd.client.theta_store import DiskStore
from flwr_ppsgd.learner import generator
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.wire import ARRAYS, METRICS, NUM_EXAMPLES, ORDER
from simulations.benchmarks.measuring import in_a_process, median_ratio, ratio, show
from simulations.benchmarks.workload import (
    CLASSES,
    FEATURES,
    LARGE,
    REPLIES,
    USERS,
    constant_learner,
    fedavg,
    linear_learner,
    linear_table,
    stock_round,
    stock_rounds,
    strategy,
    train,
)
from simulations.benchmarks.yardsticks import take

THETA = 400_000
HUGE = 10**7


def show_rounds() -> None:
    """Ratios within one run, memory, and files."""
    name = "a round / FedAvg's:"
    show(f"{name} 10 of 1000 users, 784×10, minibatch 10", stock_ratio(), at_most=1.6)
    show(f"{name} 10 users and 10^7 parameters", large_ratio(), at_most=1.6)
    show(f"{name} a CNN of 10^6", network_ratio(convolutions, (1, 28, 28), "7.*"), at_most=1.6)
    show(f"{name} linear layers of 10^6", network_ratio(layers, (FEATURES,), "4.*"), at_most=1.6)
    show("a message in a new process / a stock client's", message_ratio(), at_most=1.4)
    show("a round of 10 of 10^6 nodes / of 1000 nodes", scale_ratio(), at_most=3)
    few = peak_bytes(replies=5)
    many = peak_bytes(replies=50)
    show("peak memory of 50 replies of 10^6, in models", many / (8 * LARGE), at_most=10)
    show("the same, 50 replies / 5 replies", many / few, at_most=1.1)
    saving, loading = theta_ms(THETA)
    show("θ of 400,000 numbers to disk, with w and what has left, in ms", saving, at_most=30)
    show("θ of 400,000 numbers from disk, in ms", loading, at_most=10)


def stock_ratio(rounds: int = 10, repetitions: int = 40) -> float:
    """Rounds through Flower's messages over those of its FedAvg, whose clients take one step on the
    same rows: no θ, no clipping, no noise, no account."""
    w = ArrayRecord([np.zeros((FEATURES, CLASSES))])
    grid = InProcessGrid(client_app(linear_learner), USERS)
    ours = train(strategy(Poisson(USERS, rate=0.01)), grid, w)
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


def large_ratio(repetitions: int = 5) -> float:
    """What large messages cost: the clients' gradients take next to no time on either side."""
    w = ArrayRecord([np.zeros(HUGE, np.float32)])
    grid = InProcessGrid(client_app(constant_learner), REPLIES)
    ours = train(strategy(Poisson(REPLIES, rate=1.0)), grid, w)
    theirs = fedavg(w)
    take(1, ours)
    take(1, theirs)
    return ratio(lambda: take(1, ours), lambda: take(1, theirs), repetitions)


def layers() -> nn.Module:
    """784 → 1,000 → 200 → 10: 987,210 parameters."""
    hidden = [nn.Linear(FEATURES, 1000), nn.ReLU(), nn.Linear(1000, 200), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(200, CLASSES))


def convolutions() -> nn.Module:
    """Two convolutions and two linear layers: 983,606 parameters."""
    features = [nn.Conv2d(1, 32, 5), nn.MaxPool2d(2), nn.ReLU()]
    features += [nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(1024, 900), nn.Linear(900, CLASSES))


@functools.cache
def network_rows(shape: tuple[int, ...], batch_size: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """128 rows as pictures or as vectors."""
    table = linear_table()
    inputs = torch.tensor(table.x[:128]).float().reshape(128, *shape)
    data = TensorDataset(inputs, torch.tensor(table.y[:128]).argmax(dim=1))
    return DataLoader(data, batch_size=batch_size)


def stock_client(network: Callable[[], nn.Module], shape: tuple[int, ...]) -> ClientApp:
    """An epoch as Flower's quickstart has it: load, step by step, send all parameters."""
    app = ClientApp()

    @app.train()
    def train_one_epoch(message: Message, context: Context) -> Message:  # noqa: ARG001
        module = network()
        module.load_state_dict(message.content.array_records[ARRAYS].to_torch_state_dict())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for x, y in network_rows(shape, batch_size=32):
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
    """A client of PPSGD has all its rows in one minibatch, so both sides pass over them once."""
    torch.set_num_threads(1)
    initial = ArrayRecord(network().state_dict())
    ours = torch_client(
        network, personal, lambda _: (network_rows(shape, batch_size=128), None), additive=True
    )
    turns = train(strategy(Poisson(REPLIES, rate=1.0)), InProcessGrid(ours, REPLIES), initial)
    stock = FedAvg(fraction_evaluate=0.0, min_available_nodes=REPLIES)
    theirs = InProcessGrid(stock_client(network, shape), REPLIES)
    return ratio(lambda: take(1, turns), lambda: stock_round(stock, theirs, initial), repetitions)


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
                store.put_shared({"w": w}, "")
                stamp = ThetaStamp(visit=visit, round=visit)
                store.put_theta(Theta(vector, stamp, seen=seen), None)
            between = time.perf_counter()
            store.load(store.stamps()[0])
            store.close()
            saving.append(between - start)
            loading.append(time.perf_counter() - between)
    return 1000 * min(saving), 1000 * min(loading)


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
