"""A toy that a reader can redo by hand: every user knows one vector and wants w + θ to equal it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_ppsgd import PPSGD, Order, Poisson, Release, Steps, client_app
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.wire import GRADIENT

SIZE = 6
Floats = NDArray[np.float64]


@dataclass
class Toy:
    """f = ½‖w + θ − target‖², so both gradients are w + θ − target."""

    target: Floats
    num_examples: int = 3

    def initial_theta(self) -> Floats:
        return np.zeros(len(self.target))

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:  # noqa: ARG002
        gradient = w + theta - self.target
        return gradient, gradient

    def evaluate(self, w: Floats, theta: Floats) -> dict[str, float]:
        return {"distance": float(np.sum((w + theta - self.target) ** 2))}


def target(partition: int) -> Floats:
    return np.random.default_rng(partition).normal(size=SIZE)


def toy_learner(context: Context) -> Toy:
    return Toy(target(int(context.node_config["partition-id"])))


def w0(*arrays: Floats) -> ArrayRecord:
    return ArrayRecord(list(arrays) or [np.zeros(SIZE)])


def release(
    population: int = 5, rate: float = 1.0, clip_norm: float = 1.0, z: float = 0.0
) -> Release:
    return Release(Poisson(population, rate), clip_norm, z)


def grid(population: int = 5, app: ClientApp | None = None) -> InProcessGrid:
    return InProcessGrid(app or client_app(toy_learner), population)


def opened(strategy: PPSGD, on: InProcessGrid, arrays: ArrayRecord | None = None) -> list[Message]:
    """The messages of round 1, with the ids that a grid gives them."""
    messages = strategy.configure_train(1, arrays or w0(), ConfigRecord(), on)
    on.push_messages(messages)
    return messages


def answer(message: Message, *arrays: Floats, name: str = GRADIENT) -> Message:
    return Message(RecordDict({name: ArrayRecord(list(arrays))}), reply_to=message)


def flat(record: ArrayRecord) -> Floats:
    return np.concatenate([array.reshape(-1) for array in record.to_numpy_ndarrays()])


def strategy(**changes: object) -> PPSGD:
    """PPSGD for five toy users, without noise unless told otherwise."""
    settings: dict[str, object] = {
        "release": release(),
        "steps": Steps(shared=1.0, personal=0.5),
        "delta": 1e-4,
        **changes,
    }
    return PPSGD(**settings)  # type: ignore[arg-type]


def make_replies(messages: Iterable[Message], vector: Callable[[int], Floats]) -> list[Message]:
    return [answer(message, vector(place)) for place, message in enumerate(messages)]
