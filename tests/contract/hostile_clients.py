"""Five users who know one vector each, and nodes and grids that do not do what they are asked.

Everything goes through names that users have. What a reply holds is found in an honest one.
"""

import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from numpy.typing import NDArray

from flwr_ppsgd import PPSGD, Poisson, Release, client_app
from flwr_ppsgd.legacy import PPSGDStrategy
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract.command import ppsgd
from tests.contract.targets import DELTA, SIZE, STEPS, USERS, Floats, Target, flat, user_of

App = Callable[[Message, Context], Message]
Meddle = Callable[[list[Message], list[Message]], list[Message]]


def target(user: int) -> Floats:
    """Longer than the clip norm: a user's first gradient is clipped."""
    return 2 * np.random.default_rng(user).normal(size=SIZE)


def learner_for(context: Context) -> Target:
    return Target(target(user_of(context)))


APP: ClientApp = client_app(learner_for)


def w0(size: int = SIZE) -> ArrayRecord:
    return ArrayRecord([np.zeros(size)])


def release(
    z: float = 1.0, population: int = USERS, rate: float = 1.0, clip_norm: float = 1.0, **more: Any
) -> Release:
    return Release(Poisson(population, rate), clip_norm, z, **more)


def strategy(**changes: Any) -> PPSGD:
    """A training of five users; everything has a value unless it is given."""
    return PPSGD(**{"release": release(), "steps": STEPS, "delta": DELTA, **changes})


def legacy_strategy(**changes: Any) -> PPSGDStrategy:
    """The same for Flower's legacy API."""
    settings: dict[str, Any] = {
        "release": release(),
        "steps": STEPS,
        "delta": DELTA,
        "initial_parameters": ndarrays_to_parameters([np.zeros(SIZE)]),
        **changes,
    }
    return PPSGDStrategy(**settings)


def grid(app: App = APP, users: int = USERS) -> InProcessGrid:
    return InProcessGrid(app, users)  # type: ignore[arg-type]


def trained(ppsgd: PPSGD, on: InProcessGrid, rounds: int = 2) -> Floats:
    """w after this number of rounds."""
    return flat(ppsgd.start(on, w0(), num_rounds=rounds).arrays)


def new_context(user: int = 0, node: Mapping[str, Any] | None = None) -> Context:
    """The context of a node that has answered nothing yet."""
    config = {"partition-id": user, "num-partitions": USERS, **(node or {})}
    return Context(1, user + 1, config, RecordDict(), {})


class MeddlingGrid(InProcessGrid):
    """A grid that changes what comes back from training.

    Args:
        meddle: is given the messages and their replies, and returns what the server gets.
    """

    def __init__(self, meddle: Meddle, app: App = APP, users: int = USERS) -> None:
        super().__init__(app, users)  # type: ignore[arg-type]
        self.meddle = meddle

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Any:
        sent = list(messages)
        replies = list(super().send_and_receive(sent, timeout=timeout))
        if any(is_training(message) for message in sent):
            return self.meddle(sent, replies)
        return replies


class OwnedNode:
    """The app on nodes of which the first user's has an owner with limits.

    Args:
        node: what the owner sets in the node config.
        app: what every node runs.
    """

    def __init__(self, node: Mapping[str, Any], app: App = APP) -> None:
        self._node = node
        self._app = app
        self.replies: list[Message] = []  # of the first user

    def __call__(self, message: Message, context: Context) -> Message:
        if user_of(context):
            return self._app(message, context)
        context.node_config.update(self._node)
        reply = self._app(message, context)
        self.replies.append(reply)
        return reply


def is_training(message: Message) -> bool:
    return message.metadata.message_type.partition(".")[0] == "train"


def without_first(_: list[Message], replies: list[Message]) -> list[Message]:
    """The first user stays silent."""
    return replies[1:]


def sent_vector(reply: Message) -> tuple[str, Floats]:
    """The name of the only array record of an honest reply, and its numbers."""
    ((name, record),) = reply.content.array_records.items()
    return name, flat(record)


def npy(array: NDArray[Any]) -> bytes:
    """An array as Flower serialises it."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def array_of(data: bytes, shape: tuple[int, ...] = (SIZE,), dtype: str = "float64") -> Array:
    """An array whose bytes need not be what it says."""
    return Array(dtype, shape, "numpy.ndarray", data)


def content_bytes(message: Message) -> bytes:
    """Everything that a message holds, as bytes."""
    parts = []
    for name, record in sorted(message.content.items()):
        parts.append(name.encode())
        if isinstance(record, ArrayRecord):
            parts += [key.encode() + array.data for key, array in record.items()]
        else:
            parts.append(repr(sorted(record.items())).encode())
    return b"\n".join(parts)


def ppsgd_command(*arguments: object) -> str:
    """What ``ppsgd`` prints if it succeeds."""
    ended = ppsgd(*arguments)
    assert ended.status == 0, ended.err
    return ended.out


def pinned(directory: Path) -> dict[str, Any]:
    """The node config that pins the key of the training in a directory."""
    (line,) = [
        line
        for line in ppsgd_command("ledger", directory).splitlines()
        if "ppsgd-server-key" in line
    ]
    _, _, key = line.partition(" = ")
    return {"ppsgd-server-key": key.strip()}


class Named(ClientProxy):
    """A client of the legacy API that is only a name."""

    def get_properties(self, *_: Any) -> Any: ...
    def get_parameters(self, *_: Any) -> Any: ...
    def fit(self, *_: Any) -> Any: ...
    def evaluate(self, *_: Any) -> Any: ...
    def reconnect(self, *_: Any) -> Any: ...


def named_clients(count: int = USERS) -> SimpleClientManager:
    """Clients that are only names."""
    clients = SimpleClientManager()
    for user in range(count):
        clients.register(Named(str(user)))
    return clients


def legacy_round(ppsgd: PPSGDStrategy) -> list[tuple[Any, FitIns]]:
    """The clients that are asked in round 1, in order, with what each is asked for."""
    clients = named_clients()
    parameters = ppsgd.initialize_parameters(clients)
    asked = ppsgd.configure_fit(1, parameters, clients)
    return sorted(asked, key=lambda each: each[0].cid)


def published_by(server: Any) -> list[Any]:
    """Every w that a legacy strategy publishes from now on, in order."""
    published: list[Any] = []
    aggregate = server.aggregate_fit

    def record(*arguments: Any) -> Any:
        parameters, metrics = aggregate(*arguments)
        published.append(parameters_to_ndarrays(parameters)[0])
        return parameters, metrics

    server.aggregate_fit = record
    return published
