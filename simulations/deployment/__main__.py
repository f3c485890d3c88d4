"""PPSGD in a deployment that is killed and goes on: ``python -m simulations.deployment``.

Makes keys and certificates, starts a SuperLink (TLS, authentication, a database), a proxy in front
of it that lets only SuperNodes through (if nginx is installed), and a SuperNode for each user, all
on free loopback ports. Trains with ``flwr run``, kills a SuperNode in the middle of a round and
later the SuperLink, starts both again, and shows that θ, w and the ledger went on. Exit status: 0
if all of them did, 1 if not, 2 for wrong arguments, 130 after Ctrl-C, 143 after SIGTERM; nothing is
left running in any case. Takes about five minutes.
"""

import argparse
import logging
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from flwr_ppsgd.arrays import record_from
from flwr_ppsgd.client.personal_model import PersonalModel
from flwr_ppsgd.client.report import client_report
from flwr_ppsgd.client.theta_store import NAME, DiskStore
from flwr_ppsgd.server.reports import status_of, status_text
from flwr_ppsgd.server.store import NAME as SERVER_STORE
from flwr_ppsgd.server.store import Checkpoint, Store
from simulations.deployment.client_app import learner_from
from simulations.deployment.federation import Federation, has_nginx, wait_for, write_app

USERS = ("ada", "ben", "cleo", "dan")
RUN = "deployment-example"
ROUNDS = 8
COMPONENTS = {
    "message": {"serverapp": "server_app:app", "clientapp": "client_app:app"},
    "legacy": {"serverapp": "server_app:legacy_app", "clientapp": "client_app:legacy_app"},
}
MODULES = [Path(__file__).with_name(name) for name in ("server_app.py", "client_app.py")]


class Example:
    """What happens, and what is to be true afterwards."""

    def __init__(self, directory: Path, federation: Federation, api: str) -> None:
        self.directory = directory
        self.federation = federation
        self.server = directory / "server"
        sizes = split(directory)
        self.app = write_app(
            directory / "deployed",
            MODULES,
            COMPONENTS[api],
            config(self.server, sizes, list(map(federation.public_key, USERS))),
        )
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:5.0f} s] {text}", flush=True)

    def start_all(self) -> None:
        self.federation.start_superlink()
        self.say(
            f"SuperLink on 127.0.0.1:{self.federation.port} with TLS, authentication and a database"
        )
        self.start_proxy()
        for user in USERS:
            home = self.directory / user
            self.federation.register(user)
            own = {
                "data": str(home / "data.npz"),
                "ppsgd-state-dir": str(home / "state"),
                "ppsgd-user": user,
            }
            self.federation.start_supernode(user, own)
        self.say(f"SuperNodes registered by public key and started: {', '.join(USERS)}")

    def start_proxy(self) -> None:
        if not has_nginx():
            self.say(
                "NO PROXY: nginx is not installed. On a network, whoever reaches this SuperLink "
                "could run code on every client"
            )
            return
        self.federation.start_proxy()
        self.say(
            f"proxy on 127.0.0.1:{self.federation.proxy_port}: SuperNodes pass, nobody else does"
        )

    def rounds_done(self) -> int:
        if not (self.server / SERVER_STORE).exists():
            return 0
        found = Store.read(self.server).load()
        return found.round if found else 0

    def visits(self, user: str) -> int:
        state = self.directory / user / "state"
        if not list(state.glob(f"*/{NAME}")):
            return 0
        store = DiskStore(state, user, RUN, read_only=True)
        stamps = store.stamps()
        store.close()
        return stamps[0].visit if stamps else 0

    def wait_for_round(self, number: int) -> None:
        wait_for(f"round {number}", lambda: self.rounds_done() >= number)
        self.say(f"round {self.rounds_done()} of {ROUNDS} is done; visits: {self.all_visits()}")

    def all_visits(self) -> dict[str, int]:
        return {user: self.visits(user) for user in USERS}

    def lose_a_supernode(self, user: str) -> None:
        before = self.visits(user)
        self.federation.kill(user)
        self.say(f"killed the SuperNode of {user} (kill -9); its θ has had {before} visits")
        self.wait_for_round(self.rounds_done() + 1)
        self.federation.start_supernode(user)
        self.say(f"started the SuperNode of {user} again: same key, same directory")

    def lose_the_superlink(self) -> int:
        self.federation.kill("superlink")
        done = self.rounds_done()
        self.say(
            f"killed the SuperLink and the ServerApp with it (kill -9); w is that of round {done}"
        )
        self.federation.start_superlink()
        self.say("started the SuperLink again with its database")
        return self.federation.run(self.app)


def run_example(example: Example, api: str) -> list[str]:
    """Everything in order; what turned out wrong."""
    example.start_all()
    run = example.federation.run(example.app)
    example.say(f"flwr run ({api} API): run {run}")
    example.wait_for_round(2)
    example.lose_a_supernode(USERS[1])
    example.wait_for_round(example.rounds_done() + 1)
    between = example.all_visits()
    run = example.lose_the_superlink()
    example.say(f"flwr run again: run {run}")
    wait_for("the run to end", lambda: example.federation.status(run).startswith("finished"))
    example.say(f"run {run}: {example.federation.status(run)}")
    return check(example, between, example.federation.status(run))


def check(example: Example, between: dict[str, int], status: str) -> list[str]:
    """θ went on from where it was, w has had all rounds, and every release is charged."""
    store = Store.read(example.server)
    final = store.load()
    charges = store.charge_count
    visits = example.all_visits()
    example.say(
        f"visits: {visits}; rounds in w: {final.round if final else 0}; charges in the ledger: "
        f"{charges}"
    )
    claims = {
        "the run ended well": status == "finished:completed",
        f"w has had {ROUNDS} rounds": final is not None and final.round == ROUNDS,
        "every round is charged, at most the one in flight twice": ROUNDS <= charges <= ROUNDS + 1,
        "every θ went on after the SuperLink was lost": all(
            visits[user] > between[user] for user in USERS
        ),
        "no θ was stepped more often than there were rounds": all(
            visits[user] <= ROUNDS for user in USERS
        ),
    }
    for claim, holds in claims.items():
        example.say(f"{'yes' if holds else 'NO '}  {claim}")
    if final is not None:
        show_models(example, final)
        print("\n" + status_text(status_of(example.server)) + "\n")
    return [claim for claim, holds in claims.items() if not holds]


def show_models(example: Example, final: Checkpoint) -> None:
    """What a user's machine can do now: predict with w + θ, and show what left it."""
    w = record_from(final.arrays)
    for user in USERS:
        model = PersonalModel.load(example.directory / user / "state", user, w=w)
        learner = learner_from(str(example.directory / user / "data.npz"), 1)
        shared, personal = (
            learner.evaluate(model.w, theta)["mse"] for theta in (0 * model.theta, model.theta)
        )
        example.say(f"{user}: test error with w alone {shared:.4g}, with w + θ {personal:.4g}")
    print("\n" + client_report(example.directory / USERS[0] / "state"))


def split(directory: Path) -> tuple[int, int]:
    """One file for each user, in that user's own directory; (features, outputs)."""
    made = synthetic()
    for user, arrays in zip(USERS, made, strict=True):
        (directory / user).mkdir(parents=True, exist_ok=True)
        np.savez(directory / user / "data.npz", **arrays)
    return made[0]["x"].shape[1], made[0]["y"].shape[1]


def synthetic() -> list[dict[str, Any]]:
    """What all users have in common, plus something of each user's own."""
    source = np.random.default_rng(1)
    common = source.normal(size=(10, 1))
    users = []
    for _ in USERS:
        x = source.normal(size=(200, 10)) / np.sqrt(10)
        y = x @ (common + 0.5 * source.normal(size=common.shape)) + 0.05 * source.normal(
            size=(200, 1)
        )
        users.append({"x": x[:150], "y": y[:150], "x_test": x[150:], "y_test": y[150:]})
    return users


def config(server: Path, sizes: tuple[int, int], keys: list[str]) -> dict[str, Any]:
    """The run config.

    Four users cannot hide in a crowd: the noise here is for show, not for a small epsilon. They are
    enrolled by their public keys: a name is not an identity.
    """
    return {
        "population": len(USERS),
        "enrolled": ",".join(keys),
        "min-online": 1.0,
        "rate": 1.0,
        "clip-norm": 1.0,
        "noise-multiplier": 1.0,
        "delta": 1e-4,
        "step": 0.5,
        "alpha-q": 0.5,
        "rounds": ROUNDS,
        "round-timeout": 40.0,
        "checkpoint-dir": str(server),
        "ppsgd-run": RUN,
        "features": sizes[0],
        "outputs": sizes[1],
        "batch-size": 20,
    }


def end(number: int, _frame: object) -> NoReturn:
    """Leave through every ``with``: they stop what they have started."""
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m simulations.deployment", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--api",
        choices=sorted(COMPONENTS),
        default="message",
        help="Flower's API (default: message)",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="work in DIR and leave everything there"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGHUP, end)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        directory = (given.keep or Path(temporary)).resolve()
        try:
            with Federation(directory) as federation:
                failed = run_example(Example(directory, federation, given.api), given.api)
        except KeyboardInterrupt:
            return 130
        except RuntimeError as error:
            print(f"deployment: {error}", file=sys.stderr)
            return 1
    print(
        "deployment: θ, w and the ledger went on"
        if not failed
        else f"deployment: FAILED: {'; '.join(failed)}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
