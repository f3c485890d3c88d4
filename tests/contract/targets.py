"""A problem to redo by hand: each user knows one vector and wants w + θ to equal it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from numpy.typing import NDArray

from flwr_ppsgd import PPSGD, Order, Poisson, Release, Steps, client_app
from flwr_ppsgd.simulation import InProcessGrid

Floats = NDArray[np.float64]
SIZE = 6
USERS = 5
NOISY = Release(Poisson(USERS, 1.0), clip_norm=1.0, noise_multiplier=3.0)
SILENT = Release(Poisson(USERS, 1.0), clip_norm=1.0, noise_multiplier=0.0)
STEPS = Steps(shared=1.0, personal=0.5)
DELTA = 1e-4


@dataclass
class Target:
    """f = ½‖w + θ − target‖²: both gradients are w + θ − target, times the samples in a sum."""

    target: Floats
    num_examples: int = 3

    def initial_theta(self) -> Floats:
        return np.zeros(len(self.target))

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:
        weight = self.num_examples if order.reduction == "sum" else 1
        gradient = weight * (w + theta - self.target)
        return gradient, gradient

    def evaluate(self, w: Floats, theta: Floats) -> dict[str, float]:
        return {"distance": float(np.sum((w + theta - self.target) ** 2))}


def target(user: int) -> Floats:
    return np.random.default_rng(user).normal(size=SIZE)


def user_of(context: Context) -> int:
    return int(context.node_config["partition-id"])


def learner_for(context: Context) -> Target:
    return Target(target(user_of(context)))


def nodes(population: int = USERS) -> InProcessGrid:
    return InProcessGrid(client_app(learner_for), population)


def zeros(size: int = SIZE) -> ArrayRecord:
    return ArrayRecord([np.zeros(size)])


def flat(record: ArrayRecord) -> Floats:
    return np.concatenate([array.reshape(-1) for array in record.to_numpy_ndarrays()])


def strategy(release: Release = NOISY, **settings: Any) -> PPSGD:
    """A training of five users; everything but the release has a value unless it is given."""
    return PPSGD(**{"release": release, "steps": STEPS, "delta": DELTA, **settings})


def train(directory: Path, rounds: int, **settings: Any) -> PPSGD:
    """The strategy after this number of rounds in all, in a directory that keeps them."""
    ppsgd = strategy(checkpoint_dir=directory, **settings)
    ppsgd.start(nodes(), zeros(), num_rounds=rounds)
    return ppsgd


def run_legacy(server: Any, on: InProcessGrid, config: ServerConfig) -> None:
    """A training through Flower's own legacy loop."""
    parts = ServerAppComponents(config=config, strategy=server)
    ServerApp(server_fn=lambda _: parts)(on, Context(1, 1, {}, RecordDict(), {}))
