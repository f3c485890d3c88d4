"""The app of the fault tests: clients that note what they are asked and fail as a file beside
their data tells them.

``fault`` in a node's directory holds one word and is used up: raise, exit (the process dies), hang.
The server notes w after every round, and dies between charge and release where a file
``die-after-charge`` lies in its directory.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp as LegacyServerApp
from flwr.server import ServerAppComponents
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from flwr_ppsgd import PPSGD, Order, Release, client_app
from flwr_ppsgd.client.app import PPSGDClient
from flwr_ppsgd.server.legacy import PPSGDStrategy
from flwr_ppsgd.server.store import Store

Floats = NDArray[np.float64]
SIZE = 6


class Target:
    """½‖w + θ − y‖² for one vector y."""

    num_examples = 1

    def __init__(self, place: Path, run: str) -> None:
        self._place, self._run = place, run
        self._y = np.load(place / "y.npy")

    def initial_theta(self) -> Floats:
        return np.zeros(SIZE)

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:
        with (self._place / f"{self._run}.jsonl").open("a") as log:
            log.write(
                json.dumps({"visit": order.visit, "round": order.round, "start": len(order.starts)})
                + "\n"
            )
        self._fail()
        gradient = w + theta - self._y
        return gradient, gradient

    def evaluate(self, w: Floats, theta: Floats) -> dict[str, float]:
        return {"distance": float(np.sum((w + theta - self._y) ** 2))}

    def _fail(self) -> None:
        told = self._place / "fault"
        if not told.exists():
            return
        fault = told.read_text().strip()
        told.unlink()
        if fault == "raise":
            raise RuntimeError("told to raise")
        if fault == "exit":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.startswith("hang"):
            time.sleep(float(fault.split()[1]))


def learner_for(context: Context) -> Target:
    return Target(Path(str(context.node_config["place"])), str(context.run_config["ppsgd-run"]))


def note(out: Path, round_: int, w: Floats) -> None:
    """Atomic: whoever looks sees whole files."""
    partial = out / "partial.npy"
    np.save(partial, w)
    os.replace(partial, out / f"w-{round_}.npy")


class Dying(Store):
    """A store whose process dies once, right after a charge is on the disk and before anything
    is released."""

    def charge(self, round_: int, release: Release, *, insecure: bool = False) -> None:
        super().charge(round_, release, insecure=insecure)
        assert self.directory is not None
        told = self.directory / "die-after-charge"
        if told.exists() and int(told.read_text()) == round_:
            told.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def place_of(config: dict[str, Any]) -> Path:
    """Where this run writes; made with a store that can be told to die."""
    import flwr_ppsgd.server.account

    vars(flwr_ppsgd.server.account)["Store"] = Dying
    return Path(str(config["checkpoint-dir"]))


client = client_app(learner_for)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    out = place_of(context.run_config)
    strategy = PPSGD.from_config(context.run_config)
    strategy.start(
        grid,
        ArrayRecord([np.zeros(SIZE)]),
        num_rounds=int(context.run_config["rounds"]),
        on_round=lambda round_, result: note(out, round_, result.arrays.to_numpy_ndarrays()[0]),
    )
    (out / "statement.txt").write_text(strategy.privacy_statement())


class Noting(PPSGDStrategy):
    """The legacy strategy, noting w as the other server does."""

    out: Path

    def evaluate(self, server_round: int, parameters: Parameters) -> None:
        note(self.out, self._first + server_round, parameters_to_ndarrays(parameters)[0])


def client_fn(context: Context) -> Client:
    return PPSGDClient(learner_for(context), context).to_client()


def server_fn(context: Context) -> ServerAppComponents:
    out = place_of(context.run_config)
    strategy = Noting.from_config(
        context.run_config, initial_parameters=ndarrays_to_parameters([np.zeros(SIZE)])
    )
    strategy.out = out
    return ServerAppComponents(
        strategy=strategy, config=strategy.server_config(int(context.run_config["rounds"]))
    )


legacy_client = ClientApp(client_fn=client_fn)
legacy_server = LegacyServerApp(server_fn=server_fn)
