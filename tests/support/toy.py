"""Five users of ``contract.targets`` whose rounds are driven by hand, without noise."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_ppsgd import PPSGD, Poisson, Release, client_app
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.wire import GRADIENT
from tests.contract import targets
from tests.contract.targets import SIZE, Floats, flat, target
from tests.contract.targets import Target as Toy
from tests.contract.targets import learner_for as toy_learner

__all__ = ["SIZE", "Floats", "Toy", "flat", "target", "toy_learner"]


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


def strategy(**changes: Any) -> PPSGD:
    """PPSGD for five users, without noise unless told otherwise."""
    return targets.strategy(**{"release": release(), **changes})


def make_replies(messages: Iterable[Message], vector: Callable[[int], Floats]) -> list[Message]:
    return [answer(message, vector(place)) for place, message in enumerate(messages)]
