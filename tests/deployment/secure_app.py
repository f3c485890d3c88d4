"""The app of the secure deployment: clients whose process dies at an exchange that a file names.

``fault`` in a node's directory holds a round and an exchange, and is used up.
"""

import os
import signal
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from flwr_ppsgd import PPSGD, Order, client_app
from flwr_ppsgd.wire import ORDER

Floats = NDArray[np.float64]
SIZE = 6


class Target:
    """½‖w + θ − y‖² for one vector y."""

    num_examples = 1

    def __init__(self, place: Path) -> None:
        self._y = np.load(place / "y.npy")

    def initial_theta(self) -> Floats:
        return np.zeros(SIZE)

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:  # noqa: ARG002
        gradient = w + theta - self._y
        return gradient, gradient

    def evaluate(self, w: Floats, theta: Floats) -> dict[str, float]:
        return {"distance": float(np.sum((w + theta - self._y) ** 2))}


def place_of(context: Context) -> Path:
    return Path(str(context.node_config["place"]))


def learner_for(context: Context) -> Target:
    return Target(place_of(context))


def dying_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    order = Order.from_flat(message.content[ORDER])
    told = place_of(context) / "fault"
    if told.exists() and told.read_text().split() == [str(order.round), str(order.stage)]:
        told.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return call_next(message, context)


client = client_app(learner_for, mods=[dying_mod])
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    out = Path(str(context.run_config["checkpoint-dir"]))
    strategy = PPSGD.from_config(context.run_config)
    strategy.start(
        grid,
        ArrayRecord([np.zeros(SIZE)]),
        num_rounds=int(context.run_config["rounds"]),
        on_round=lambda round_, result: np.save(
            out / f"w-{round_}.npy", result.arrays.to_numpy_ndarrays()[0]
        ),
    )
    (out / "statement.txt").write_text(strategy.privacy_statement())
