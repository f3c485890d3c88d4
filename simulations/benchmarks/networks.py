"""Rounds of networks: through messages, and on their engine."""

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_ppsgd import Poisson, Release, Steps, client_app, torch_client
from flwr_ppsgd.lab.cnn import paper_cnn
from flwr_ppsgd.lab.engine import Setting
from flwr_ppsgd.lab.network_engine import NetworkEngine
from flwr_ppsgd.learner import Minibatches, generator
from flwr_ppsgd.models.torch_model import AdditiveHead
from flwr_ppsgd.models.torch_training import SplitLearner
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.wire import ARRAYS, METRICS, NUM_EXAMPLES
from simulations.benchmarks.measuring import Comparison, ratio
from simulations.benchmarks.workload import (
    BATCH,
    CLASSES,
    FEATURES,
    REPLIES,
    SAMPLES,
    against,
    linear_table,
    stock_round,
    strategy,
    train,
)
from simulations.yardsticks import autograd_loop, small_cnn, take

# of a sample's gradient in the paper's CNN: 2 for each of 422,208 products forward, as many for the
# gradient of the parameters, and 221,504 for that of all inputs but the image
PAPER_CNN_OPERATIONS = 2 * (2 * 422_208 + 221_504)


def network(settings: int = 1) -> Comparison:
    """A cohort's gradients by ``torch.func.vmap``, against a loop over users."""
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
def network_rows(
    shape: tuple[int, ...], batch_size: int = 32
) -> DataLoader[tuple[torch.Tensor, ...]]:
    """128 rows as pictures or as vectors."""
    table = linear_table()
    x = table.x[:128]
    y = table.y[:128]
    inputs = torch.tensor(x).float().reshape(128, *shape)
    data = TensorDataset(inputs, torch.tensor(y).argmax(dim=1))
    return DataLoader(data, batch_size=batch_size)


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

    A client of PPSGD has all its rows in one minibatch, so both sides pass over them once.
    """
    initial = ArrayRecord(network().state_dict())
    ours = torch_client(
        network,
        personal,
        lambda _: (network_rows(shape, batch_size=128), None),
        additive=True,
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
