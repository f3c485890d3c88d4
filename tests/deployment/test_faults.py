"""Faults on real processes: SuperLink and SuperNodes with TLS and authentication, both APIs."""

import errno
import os
import random
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from flwr_ppsgd.algorithm import clip
from flwr_ppsgd.client.report import client_report
from flwr_ppsgd.client.theta_store import DiskStore
from tests.deployment.harness import USERS, Deployment, check
from tests.support.kept import all_kept_in

slow = pytest.mark.deployment
apis = pytest.mark.parametrize("api", ["message", "legacy"])
INJECTED = str(Path(__file__).with_name("injected"))
ADA, BEN, CLEO = USERS


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("federation"))
    with made.federation:
        made.start()
        yield made


@pytest.fixture
def deployment(started: Deployment) -> Iterator[Deployment]:
    with started.cleaned():
        yield started


def faults(place: Path) -> dict[str, str]:
    """The environment of a process whose disk and clock fail if files in a directory say so."""
    path = INJECTED + os.pathsep + os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": path, "PPSGD_TEST_FAULTS": str(place)}


def facts_of(deployment: Deployment, name: str, round_: int) -> dict[str, Any]:
    """The server-private line of a round; of one that was run twice, the last."""
    return [fact for fact in deployment.facts(name) if fact.get("round") == round_][-1]


def test_a_client_that_raises_counts_as_zero_and_keeps_its_theta(deployment: Deployment) -> None:
    """The quick half: TLS, authentication, enrolment by name, two rounds, one exception."""
    deployment.tell(ADA, "raise 1")
    run = deployment.begin("raise", 2, min_online=1.0)
    assert deployment.finish(run) == "finished:completed"
    check(deployment, "raise", 2, {ADA: [2], BEN: [1, 2], CLEO: [1, 2]})
    facts = facts_of(deployment, "raise", 1)
    assert (facts["used"], facts["zeros"]) == (2, {"client error": 1})
    shown = deployment.federation.flwr("log", str(run), "deployment", "--show")
    assert "[ROUND 2/2]" in shown
    assert "private" not in shown
    assert "client error" not in shown
    statement = (deployment.server("raise") / "statement.txt").read_text()
    assert "To each of the 3 enrolled users" in statement
    assert "NOT claimed" not in statement
    report = client_report(deployment.place(ADA) / "state")
    assert "nothing but the clipped gradient" in report
    assert "planned rounds for each of 3 users" in report


@slow
@apis
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_client_process_and_a_supernode_that_end_in_the_middle_of_a_round(
    deployment: Deployment, how: str, api: str
) -> None:
    """cleo's client is killed, and ben's SuperNode gets SIGTERM or SIGKILL: the round ends without
    them. Started again, the SuperNode goes on with its θ."""
    name = f"ends-{how}-{api}"
    deployment.tell(CLEO, "exit 2")
    deployment.tell(BEN, "hang 2")
    run = deployment.begin(name, 4, api=api)
    deployment.wait_for_visit(name, BEN, 2)
    getattr(deployment.federation, how)(BEN)
    deployment.release(BEN)
    deployment.wait_for_visit(name, CLEO, 2)
    deployment.wait_for_round(name, 2)
    deployment.federation.start_supernode(BEN)
    assert deployment.finish(run) == "finished:completed"
    check(deployment, name, 4, {ADA: [1, 2, 3, 4]})
    save = deployment.kept(name, BEN)
    assert save is not None
    assert 1 <= save.stamp.visit <= 3
    shown = deployment.federation.flwr("log", str(run), "deployment", "--show")
    assert "epsilon" in shown
    assert not re.search("sampled|received|failures|client error|private:", shown), shown


@slow
@apis
def test_a_client_that_hangs_past_the_timeout_counts_as_zero_and_is_not_counted_later(
    deployment: Deployment, api: str
) -> None:
    """Its reply of round 1 comes in round 2. w is only what the others sent in round 1."""
    name = f"hang-{api}"
    deployment.tell(ADA, "hang 1")
    timeout = deployment.seconds(40)
    run = deployment.begin(
        name, 3, api=api, round_timeout=timeout, noise_multiplier=0.0, clip_norm=100.0
    )
    deployment.wait_for_round(name, 1)
    deployment.release(ADA)
    assert deployment.finish(run) == "finished:completed"
    check(deployment, name, 3, {BEN: [1, 2, 3], CLEO: [1, 2, 3]})
    others = sum(np.load(deployment.place(user) / "y.npy") for user in (BEN, CLEO))
    np.testing.assert_allclose(
        np.load(deployment.server(name) / "w-1.npy"), 0.1 * others / 3, atol=1e-6
    )


@slow
@apis
def test_a_serverapp_killed_between_charge_and_release_and_then_the_superlink(
    deployment: Deployment, api: str
) -> None:
    """The round that was charged is charged twice, released once, and θ is stepped once in it. A
    SuperLink that is killed is started with its database."""
    name = f"server-{api}"
    deployment.server(name).mkdir()
    (deployment.server(name) / "die-after-charge").write_text("2")
    run = deployment.begin(name, 5, api=api)
    assert deployment.finish(run) == "finished:failed"
    assert deployment.charges(name) == [1, 2]
    deployment.begin(name, 5, api=api, min_online=1.0)
    deployment.wait_for_round(name, 3)
    deployment.federation.kill("superlink")
    done = deployment.rounds_done(name)
    deployment.federation.start_superlink()
    run = deployment.begin(name, 5, api=api, min_online=1.0)
    assert deployment.finish(run) == "finished:completed"
    assert done < 5
    assert deployment.charges(name)[:4] == [1, 2, 2, 3]
    check(deployment, name, 5, {user: [1, 2, 3, 4, 5] for user in USERS})


@slow
def test_a_disk_that_is_full(deployment: Deployment) -> None:
    """Reported, the round counts as zero, θ as before; when there is room again, the client goes
    on."""
    name = "disk"
    deployment.federation.kill(CLEO)
    deployment.federation.start_supernode(CLEO, environment=faults(deployment.place(CLEO)))
    run = deployment.begin(name, 4, min_online=1.0)
    deployment.wait_for_round(name, 1)
    (deployment.place(CLEO) / "disk").write_text(str(errno.ENOSPC))
    deployment.wait_for_round(name, deployment.rounds_done(name) + 2, run)
    (deployment.place(CLEO) / "disk").unlink()
    assert deployment.finish(run) == "finished:completed"
    check(deployment, name, 4, {ADA: [1, 2, 3, 4], BEN: [1, 2, 3, 4]})
    lost = [facts_of(deployment, name, round_) for round_ in range(1, 5)]
    lost = [facts for facts in lost if "disk: ValueError" in facts["first_failure"]]
    assert lost
    assert (lost[0]["used"], lost[0]["zeros"]) == (2, {"client error": 1})


@slow
def test_two_runs_in_one_federation_at_once(deployment: Deployment) -> None:
    timeout = deployment.seconds(120)
    runs = [deployment.begin(name, 3, round_timeout=timeout) for name in ("one", "two")]
    assert [deployment.finish(run) for run in runs] == ["finished:completed"] * 2
    for name in ("one", "two"):
        check(deployment, name, 3)
    store = DiskStore(deployment.place(ADA) / "state", ADA, read_only=True)
    assert set(store.runs()) >= {"one", "two"}


@slow
def test_a_clock_that_goes_back(deployment: Deployment) -> None:
    """An hour back on the server while a client hangs: the round still ends after its timeout, and
    not an hour later."""
    deployment.federation.kill("superlink")
    place = deployment.place("server")
    place.mkdir()
    deployment.federation.start_superlink(faults(place))
    deployment.tell(BEN, "hang 1")
    timeout = deployment.seconds(30)
    run = deployment.begin("clock", 3, round_timeout=timeout, min_online=1.0)
    deployment.wait_for_visit("clock", BEN, 1)
    (place / "clock").write_text("3600")
    deployment.wait_for_round("clock", 1)  # for less than an hour
    deployment.release(BEN)
    assert deployment.finish(run) == "finished:completed"
    check(deployment, "clock", 3)
    deployment.federation.kill("superlink")


@slow
def test_a_theta_file_of_another_user_is_refused(deployment: Deployment) -> None:
    run = deployment.begin("copied", 1, min_online=1.0)
    deployment.finish(run)
    own, other = (max((deployment.place(u) / "state").rglob("*.theta")) for u in (ADA, BEN))
    mine = own.read_bytes()
    own.write_bytes(other.read_bytes())
    run = deployment.begin("copied", 2)
    assert deployment.finish(run) == "finished:completed"
    assert "theta-damaged" in facts_of(deployment, "copied", 2)["first_failure"]
    own.write_bytes(mine)
    run = deployment.begin("copied", 3)
    assert deployment.finish(run) == "finished:completed"
    check(deployment, "copied", 3, {ADA: [1, 3], BEN: [1, 2, 3]})


@slow
def test_processes_killed_at_random(deployment: Deployment) -> None:
    """Poisson cohorts, so that a lost round and the one in its place draw different users."""
    dice = random.Random(3)
    name = "random"
    rounds = 10
    run = deployment.begin(name, rounds, rate=0.6)
    for done in range(1, rounds):
        deployment.wait_for_round(name, done, run)
        time.sleep(dice.uniform(0, 5))
        victim = dice.choice([*USERS, "superlink", "superlink", "flwr-clientapp", "flwr-serverapp"])
        if victim in USERS:
            deployment.federation.kill(victim)
            deployment.federation.start_supernode(victim)
        elif victim == "superlink":
            deployment.federation.kill(victim)
            deployment.federation.start_superlink()
        else:
            _kill_one(victim, str(deployment.directory))
        if victim == "superlink" or deployment.has_ended(run):
            run = deployment.begin(name, rounds, rate=0.6)
    if deployment.finish(run) != "finished:completed":  # the last victim was the ServerApp
        run = deployment.begin(name, rounds, rate=0.6)
    assert deployment.finish(run) == "finished:completed"
    check(deployment, name, rounds)
    assert len(deployment.charges(name)) >= rounds


def _kill_one(program: str, home: str) -> None:
    """One process of this federation with that name, if there is one."""
    for entry in Path("/proc").iterdir():
        try:
            line, environment = ((entry / part).read_bytes() for part in ("cmdline", "environ"))
        except OSError:
            continue
        if program.encode() in line and f"FLWR_HOME={home}".encode() in environment:
            os.kill(int(entry.name), signal.SIGKILL)
            return


class Tap:
    """Passes bytes on between SuperNodes and a SuperLink, and remembers those that leave the
    SuperNodes."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.seen = bytearray()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                node, _ = self._socket.accept()
                threading.Thread(target=self._pass_on, args=(node,), daemon=True).start()

    def _pass_on(self, node: socket.socket) -> None:
        with suppress(OSError), node, socket.create_connection(("127.0.0.1", self._to)) as link:
            while True:
                ready, _, _ = select.select([node, link], [], [])
                for source, sink in ((node, link), (link, node)):
                    if source in ready:
                        data = source.recv(65536)
                        if not data:
                            return
                        sink.sendall(data)
                        self.seen += data if source is node else b""


@slow
def test_theta_is_in_no_packet_and_restarts_are_not_covered_without_authentication(
    tmp_path: Path,
) -> None:
    """Without TLS, so that the packets can be read. The gradient is found in them, θ is not, in
    any width."""
    made = Deployment(tmp_path, secure=False)
    with ExitStack() as stack, made.federation:
        made.federation.start_superlink()
        tap = stack.enter_context(Tap(made.federation.port))
        made.start(port=tap.port)
        run = made.begin("packets", 2, min_online=1.0)
        assert made.finish(run) == "finished:completed"
    check(made, "packets", 2)
    seen = bytes(tap.seen)
    for user in USERS:
        y = np.load(made.place(user) / "y.npy")
        sent = clip(-y, 1.0)
        assert all(value.tobytes() in seen for value in sent), (
            "the tap must see the gradient of round 1"
        )
        for save in all_kept_in(made.place(user) / "state", user, "packets"):
            for width in (np.float64, np.float32):
                assert not any(value.tobytes() in seen for value in save.theta.astype(width)), user
    statement = (made.server("packets") / "statement.txt").read_text()
    assert "To each of the 3 enrolled nodes" in statement
    assert "User-level privacy across restarts of a node is NOT claimed" in statement
    assert "--enable-supernode-auth" in statement
