"""A federation to break, and the two things that must hold whatever was broken: θ is a replay of
the rounds that completed, and the ledger has every release."""

import json
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.client.theta import Theta
from flwr_ppsgd.server.store import NAME, Store
from simulations.deployment.federation import Federation, wait_for, write_app
from tests.support.kept import kept_in

USERS = ("ada", "ben", "cleo")
STEP, ALPHA_Q = 0.2, 0.5
COMPONENTS = {
    "message": {"serverapp": "faulty_app:server", "clientapp": "faulty_app:client"},
    "legacy": {"serverapp": "faulty_app:legacy_server", "clientapp": "faulty_app:legacy_client"},
}
MODULE = Path(__file__).with_name("faulty_app.py")


class Deployment:
    """One SuperLink and a SuperNode for each user; any number of trainings, each under a name of
    its own."""

    def __init__(self, directory: Path, *, secure: bool = True) -> None:
        self.directory = directory
        self.federation = Federation(directory, secure=secure)
        self.secure = secure

    def start(self, users: tuple[str, ...] = USERS, *, proxy: bool = False) -> None:
        self.federation.start_superlink()
        if proxy:
            self.federation.start_proxy()
        for number, user in enumerate(users):
            self.place(user).mkdir(exist_ok=True)
            np.save(self.place(user) / "y.npy", np.random.default_rng(number).normal(size=6))
            if self.secure:
                self.federation.register(user)
            self.federation.start_supernode(user, self.node_config(user))

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

    def begin(self, name: str, rounds: int, *, api: str = "message", **changes: object) -> int:
        """``flwr run`` of a training; under a name that was there before, it goes on."""
        self.server(name).mkdir(exist_ok=True)
        config = {
            "population": len(USERS),
            "rate": 1.0,
            "clip-norm": 1.0,
            "noise-multiplier": 0.5,
            "delta": 1e-4,
            "step": STEP,
            "alpha-q": ALPHA_Q,
            "rounds": rounds,
            "min-online": 0.6,
            "round-timeout": 60.0,
            "checkpoint-dir": str(self.server(name)),
            "ppsgd-run": name,
            **({"enrolled": ",".join(USERS)} if self.secure else {}),
            **{key.replace("_", "-"): value for key, value in changes.items()},
        }
        app = write_app(self.directory / f"{api}-app", [MODULE], COMPONENTS[api], config)
        return self.federation.run(app)

    def finish(self, run: int, seconds: float = 400) -> str:
        wait_for(
            "the run to end", lambda: self.federation.status(run).startswith("finished"), seconds
        )
        return self.federation.status(run)

    def rounds_done(self, name: str) -> int:
        if not (self.server(name) / NAME).exists():
            return 0
        found = Store.read(self.server(name)).load()
        return found.round if found else 0

    def wait_for_round(self, name: str, number: int, seconds: float = 300) -> None:
        wait_for(f"round {number}", lambda: self.rounds_done(name) >= number, seconds)

    def wait_for_visit(self, name: str, user: str, round_: int, seconds: float = 200) -> None:
        """Until this user's client is at work in a round."""
        wait_for(
            f"{user} in round {round_}",
            lambda: any(n["round"] == round_ for n in self.notes(name, user)),
            seconds,
        )

    def notes(self, name: str, user: str) -> list[dict[str, int]]:
        path = self.place(user) / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def kept(self, name: str, user: str) -> Theta | None:
        return kept_in(self.place(user) / "state", user, name)

    def charges(self, name: str) -> list[int]:
        return [round_ for round_, *_ in Store.read(self.server(name)).charge_rows()]

    def log(self) -> str:
        return self.federation.log("superlink")


def replayed(deployment: Deployment, name: str, user: str) -> tuple[NDArray[np.float64], list[int]]:
    """θ after the visits that this user's θ has had, each at the w of the round before; and the
    rounds they were in.

    Of several notes for one visit the last one counts: the others failed, or were in rounds that
    the server lost.
    """
    save = deployment.kept(name, user)
    visits = {note["visit"]: note["round"] for note in deployment.notes(name, user)}
    rounds = [visits[visit] for visit in range(1, (save.stamp.visit if save else 0) + 1)]
    y, theta = np.load(deployment.place(user) / "y.npy"), np.zeros(6)
    for round_ in rounds:
        w = np.load(deployment.server(name) / f"w-{round_ - 1}.npy")
        theta = theta - STEP * (w + theta - y)
    return theta, rounds


def check(
    deployment: Deployment, name: str, rounds: int, users: Mapping[str, list[int]] | None = None
) -> None:
    """Every θ is its replay, of rounds that follow each other, and every round of w is charged.

    users: the rounds in which each θ must have been stepped, where the test knows them.
    """
    assert deployment.rounds_done(name) == rounds
    charges = deployment.charges(name)
    assert sorted(set(charges)) == list(range(1, rounds + 1)), charges
    for user in USERS:
        theta, stepped = replayed(deployment, name, user)
        save = deployment.kept(name, user)
        if save is not None:
            np.testing.assert_allclose(save.theta, theta, rtol=1e-12, atol=1e-12)
        assert stepped == sorted(set(stepped)), f"{user} was stepped twice in a round: {stepped}"
        if users and user in users:
            assert stepped == users[user], user


def pause(seconds: float) -> None:
    time.sleep(seconds)
