"""The app of the fault tests: clients note what they are asked, and fail if a file says so.

``fault`` in a node's directory says how: ``raise ROUND``, ``exit ROUND`` (the process
dies), ``hang ROUND`` (while the file is there) or, in a secure sum, ``die ROUND EXCHANGE``. The
server notes w after every round, and dies between charge and release if its directory has a file
``die-after-charge`` with the number of the round.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp as LegacyServerApp
from flwr.server import ServerAppComponents
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from flwr_ppsgd import PPSGD, Order, Release, client_app
from flwr_ppsgd.legacy import PPSGDClient, PPSGDStrategy
from flwr_ppsgd.server.store import Store
from flwr_ppsgd.wire import ORDER

Floats = NDArray[np.float64]
SIZE = 6


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Target:
    """½‖w + θ − y‖² for one vector y."""

    num_examples = 1

    def __init__(self, place: Path, run: str) -> None:
        self._place = place
        self._notes = place / f"{run}.jsonl"
        self._y = np.load(place / "y.npy")

    def initial_theta(self) -> Floats:
        return np.zeros(SIZE)

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:
        with self._notes.open("a") as notes:
            notes.write(json.dumps({"visit": order.visit, "round": order.round}) + "\n")
        self._fail(order.round)
        gradient = w + theta - self._y
        return gradient, gradient

    def evaluate(self, w: Floats, theta: Floats) -> dict[str, float]:
        return {"distance": float(np.sum((w + theta - self._y) ** 2))}

    def _fail(self, round_: int) -> None:
        path = self._place / "fault"
        fault = path.read_text() if path.exists() else ""
        if fault == f"raise {round_}":
            path.unlink()
            raise RuntimeError("asked to raise")
        if fault == f"exit {round_}":
            path.unlink()
            die()
        while fault == f"hang {round_}" and path.exists():
            time.sleep(0.2)


def place_of(context: Context) -> Path:
    return Path(str(context.node_config["place"]))


def learner_for(context: Context) -> Target:
    return Target(place_of(context), str(context.run_config["ppsgd-run"]))


def dying_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    path = place_of(context) / "fault"
    if path.exists() and ORDER in message.content:
        order = Order.from_flat(message.content[ORDER])
        if path.read_text().split() == ["die", str(order.round), str(order.stage)]:
            path.unlink()
            die()
    return call_next(message, context)


def note(out: Path, round_: int, w: Floats) -> None:
    """Atomic: whoever looks sees whole files."""
    partial = out / "partial.npy"
    np.save(partial, w)
    os.replace(partial, out / f"w-{round_}.npy")


class Dying(Store):
    """A store whose process dies once, after a charge is on the disk and before the release."""

    def charge(self, round_: int, release: Release, *, insecure: bool = False) -> None:
        super().charge(round_, release, insecure=insecure)
        assert self.directory is not None
        path = self.directory / "die-after-charge"
        if path.exists() and int(path.read_text()) == round_:
            path.unlink()
            die()


def out_of(context: Context) -> Path:
    """Where this run writes, with a store that can be made to die."""
    import flwr_ppsgd.server.account

    vars(flwr_ppsgd.server.account)["Store"] = Dying
    return Path(str(context.run_config["checkpoint-dir"]))


client = client_app(learner_for, mods=[dying_mod])
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    out = out_of(context)
    strategy = PPSGD.from_config(context.run_config)
    strategy.start(
        grid,
        ArrayRecord([np.zeros(SIZE)]),
        num_rounds=int(context.run_config["rounds"]),
        on_round=lambda round_, result: note(out, round_, result.arrays.to_numpy_ndarrays()[0]),
    )
    (out / "statement.txt").write_text(strategy.privacy_statement())


def client_fn(context: Context) -> Client:
    return PPSGDClient(learner_for(context), context).to_client()


def server_fn(context: Context) -> ServerAppComponents:
    out = out_of(context)

    def evaluate(round_: int, arrays: list[Any], _: Any) -> None:
        note(out, round_, arrays[0])

    strategy = PPSGDStrategy.from_config(
        context.run_config,
        initial_parameters=ndarrays_to_parameters([np.zeros(SIZE)]),
        evaluate_fn=evaluate,
    )
    rounds = strategy.server_config(int(context.run_config["rounds"]))
    return ServerAppComponents(strategy=strategy, config=rounds)


legacy_client = ClientApp(client_fn=client_fn)
legacy_server = LegacyServerApp(server_fn=server_fn)
