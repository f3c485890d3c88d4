"""A federation to break, and the two things that must hold whatever was broken: θ is a replay of
the rounds that completed, and the ledger has every release."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.client.theta import Theta
from flwr_ppsgd.database import StoreError
from flwr_ppsgd.server.store import Store
from simulations.deployment.federation import CONNECTION, Federation, wait_for, write_app
from tests.support.kept import kept_in

USERS = ("ada", "ben", "cleo")
STEP = 0.2
ALPHA_Q = 0.5
COMPONENTS = {
    "message": {"serverapp": "faulty_app:server", "clientapp": "faulty_app:client"},
    "legacy": {"serverapp": "faulty_app:legacy_server", "clientapp": "faulty_app:legacy_client"},
}
MODULE = Path(__file__).with_name("faulty_app.py")
LOG_TAIL = 2000  # characters
QUIET = 2.0  # seconds that a command of Flower's takes on a machine with nothing else to do


DEPLOYMENTS: list["Deployment"] = []


def end_all() -> str:
    """Kill the processes of all deployments; the ends of their logs."""
    return "\n".join(deployment.end() for deployment in DEPLOYMENTS)


class Deployment:
    """One SuperLink and a SuperNode for each user; any number of trainings, each under a name of
    its own.

    Args:
        directory: where everything is kept.
        users: the SuperNodes, by name.
        secure: whether there are TLS and authentication.
    """

    def __init__(
        self, directory: Path, users: Sequence[str] = USERS, *, secure: bool = True
    ) -> None:
        self.directory = directory
        self.users = users
        self.secure = secure
        self.federation = Federation(directory, secure=secure)
        self._runs: list[int] = []
        DEPLOYMENTS.append(self)

    def start(self, *, proxy: bool = False, port: int | None = None) -> None:
        """The SuperNodes, after the SuperLink unless that has been started with a port to use."""
        if port is None:
            self.federation.start_superlink()
        if proxy:
            self.federation.start_proxy()
        for number, user in enumerate(self.users):
            self.place(user).mkdir(exist_ok=True)
            np.save(self.place(user) / "y.npy", np.random.default_rng(number).normal(size=6))
            if self.secure:
                self.federation.register(user)
            self.federation.start_supernode(user, self.node_config(user), port=port)

    @contextmanager
    def cleaned(self) -> Iterator[None]:
        """However a test ends, the next one finds no fault, no run, and all processes."""
        try:
            yield
        finally:
            for user in self.users:
                for name in ("fault", "disk"):
                    (self.place(user) / name).unlink(missing_ok=True)
            self.federation.restore(["superlink", *self.users])
            for run in self._runs:
                with suppress(RuntimeError):  # it has ended
                    self.federation.flwr("stop", str(run), CONNECTION)
            self._runs.clear()

    def end(self) -> str:
        """Kill everything; what the logs say at their ends."""
        tails = []
        for name in ("superlink", *self.users):
            with suppress(KeyError):  # it is not running
                self.federation.kill(name)
            tails.append(f"--- {name}: {self.federation.log(name)[-LOG_TAIL:]}")
        return "\n".join(tails)

    def seconds(self, quiet: float) -> float:
        """What takes this many seconds on a quiet machine may take so many now."""
        began = time.monotonic()
        self.federation.flwr("list", CONNECTION, "--format", "json")
        return quiet * max(1.0, (time.monotonic() - began) / QUIET)

    def node_config(self, user: str) -> dict[str, str | int]:
        return {
            "place": str(self.place(user)),
            "ppsgd-state-dir": str(self.place(user) / "state"),
            "ppsgd-user": user,
        }

    def place(self, user: str) -> Path:
        return self.directory / user

    def server(self, name: str) -> Path:
        return self.directory / f"server-{name}"

    def tell(self, user: str, fault: str) -> None:
        (self.place(user) / "fault").write_text(fault)

    def release(self, user: str) -> None:
        """A client that hangs goes on; none will hang."""
        (self.place(user) / "fault").unlink()

    def begin(self, name: str, rounds: int, *, api: str = "message", **changes: object) -> int:
        """``flwr run`` of a training; under a name that was there before, it goes on."""
        self.server(name).mkdir(exist_ok=True)
        config: dict[str, Any] = {
            "population": len(self.users),
            "rate": 1.0,
            "clip-norm": 1.0,
            "noise-multiplier": 0.5,
            "delta": 1e-4,
            "step": STEP,
            "alpha-q": ALPHA_Q,
            "rounds": rounds,
            "min-online": 0.6,
            "round-timeout": self.seconds(60.0),
            "checkpoint-dir": str(self.server(name)),
            "ppsgd-run": name,
        }
        if self.secure:
            config["enrolled"] = ",".join(self.users)
        config |= {key.replace("_", "-"): value for key, value in changes.items()}
        app = write_app(self.directory / f"{api}-app", [MODULE], COMPONENTS[api], config)
        run = self.federation.run(app)
        self._runs.append(run)
        return run

    def finish(self, run: int) -> str:
        wait_for("the run to end", lambda: self.has_ended(run))
        return self.federation.status(run)

    def has_ended(self, run: int) -> bool:
        return self.federation.status(run).startswith("finished")

    def rounds_done(self, name: str) -> int:
        """0 also while the store is being made: a slow server has a file before it has rows."""
        try:
            found = Store.read(self.server(name)).load()
        except StoreError:
            return 0
        return found.round if found else 0

    def wait_for_round(self, name: str, number: int, run: int | None = None) -> None:
        """Until this round is done, or until the run has ended, if one is given."""

        def happened() -> bool:
            ended = run is not None and self.has_ended(run)
            return ended or self.rounds_done(name) >= number

        wait_for(f"round {number}", happened)

    def wait_for_visit(self, name: str, user: str, round_: int) -> None:
        """Until this user's client is at work in a round."""

        def at_work() -> bool:
            return round_ in [note["round"] for note in self.notes(name, user)]

        wait_for(f"{user} in round {round_}", at_work)

    def notes(self, name: str, user: str) -> list[dict[str, int]]:
        path = self.place(user) / f"{name}.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]

    def kept(self, name: str, user: str) -> Theta | None:
        return kept_in(self.place(user) / "state", user, name)

    def charges(self, name: str) -> list[int]:
        return [round_ for round_, *_ in Store.read(self.server(name)).notes("charge")]

    def facts(self, name: str) -> list[dict[str, Any]]:
        """What the server has noted for its operator alone."""
        return [fact for _, fact in Store.read(self.server(name)).facts()]


def replayed(deployment: Deployment, name: str, user: str) -> tuple[NDArray[np.float64], list[int]]:
    """θ after the visits that this user's θ has had, each at the w of the round before; and the
    rounds they were in.

    Of several notes for one visit the last one counts: the others failed, or were in rounds that
    the server lost.
    """
    save = deployment.kept(name, user)
    visits = {note["visit"]: note["round"] for note in deployment.notes(name, user)}
    count = save.stamp.visit if save else 0
    rounds = [visits[visit] for visit in range(1, count + 1)]
    y = np.load(deployment.place(user) / "y.npy")
    theta = np.zeros(6)
    for round_ in rounds:
        w = np.load(deployment.server(name) / f"w-{round_ - 1}.npy")
        theta = theta - STEP * (w + theta - y)
    return theta, rounds


def check(
    deployment: Deployment, name: str, rounds: int, users: Mapping[str, list[int]] | None = None
) -> None:
    """Every θ is its replay, of rounds that follow each other, and every round of w is charged.

    Args:
        deployment: where the training was.
        name: of the training.
        rounds: the number that w has had.
        users: the rounds in which each θ must have been stepped, where the test knows them.
    """
    assert deployment.rounds_done(name) == rounds
    charges = deployment.charges(name)
    assert sorted(set(charges)) == list(range(1, rounds + 1)), charges
    for user in deployment.users:
        theta, stepped = replayed(deployment, name, user)
        save = deployment.kept(name, user)
        if save is not None:
            np.testing.assert_allclose(save.theta, theta, rtol=1e-12, atol=1e-12)
        assert stepped == sorted(set(stepped)), f"{user} was stepped twice in a round: {stepped}"
        if users and user in users:
            assert stepped == users[user], user
