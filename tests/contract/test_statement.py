"""What is promised, in words and as data: the ledger's numbers, and everything that voids them."""

import json
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo

from flwr_ppsgd import (
    PPSGD,
    AdditiveLinear,
    FixedSize,
    Ledger,
    Minibatches,
    Order,
    Poisson,
    Release,
    Steps,
    client_app,
)
from flwr_ppsgd.legacy import PPSGDStrategy
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.statement import rounded_up
from tests.contract.hostile_clients import (
    DELTA,
    USERS,
    Floats,
    Target,
    grid,
    legacy_round,
    legacy_strategy,
    ppsgd_command,
    release,
    strategy,
    target,
    trained,
    w0,
)

COHORTS = [Poisson(USERS, 1.0), Poisson(USERS, 0.5), FixedSize(USERS, 2)]
SMALL = ("--rounds", 2, "--set", "population=20", "--set", "features=5")


def after(rounds: int = 2, **changes: Any) -> PPSGD:
    """A strategy that has trained."""
    ppsgd = strategy(**changes)
    trained(ppsgd, grid(users=ppsgd.release.cohort.population), rounds)
    return ppsgd


def epsilon_in(text: str) -> float:
    """ε of the promise in words."""
    found = re.search(r"\(([0-9.e+-]+), [0-9.e-]+\)-joint differential privacy", text)
    assert found, text
    return float(found[1])


# --- numbers


@pytest.mark.parametrize("cohort", COHORTS)
def test_statement_and_data_have_the_ledgers_numbers(cohort: Poisson | FixedSize) -> None:
    """ε under both kinds of neighbours; in words it is rounded up, by less than a thousandth."""
    ppsgd = after(3, release=Release(cohort, 1.0, 3.0))
    data = ppsgd.privacy_data()
    ledger = Ledger(DELTA).record(ppsgd.release, 3)
    assert data["epsilon"] == ledger.epsilon() == ppsgd.ledger.epsilon()
    assert data["epsilon_replace_one"] == ledger.epsilon("replace-one")
    assert data["delta"] == DELTA
    assert data["guarantee"] == "user-level joint differential privacy"
    text = ppsgd.privacy_statement()
    assert ledger.epsilon() <= epsilon_in(text) <= 1.001 * ledger.epsilon()
    exchanged = re.search(r"epsilon is ([0-9.]+) if one user's data are exchanged", text)
    assert exchanged
    stated = float(exchanged[1])
    assert ledger.epsilon("replace-one") <= stated <= 1.001 * ledger.epsilon("replace-one")
    assert data["statement"] == text


def test_the_short_form_has_both_epsilons_and_every_condition_in_five_lines() -> None:
    ppsgd = after(3, evaluate_every=1)
    data = ppsgd.privacy_data()
    short = str(data["short"])
    assert len(short.splitlines()) <= 5
    for name in ("epsilon", "epsilon_replace_one"):
        assert rounded_up(data[name]) in short  # type: ignore[arg-type]
    named = ("caveats", "conditional_on", "outside_the_guarantee")
    for condition in (text for name in named for text in data[name]):  # type: ignore[attr-defined]
        assert condition.partition(":")[0] in short
    assert "Evaluation on the users' own data" in short


def test_an_absurd_epsilon_is_stated_as_it_is() -> None:
    """Finite precision takes nothing of δ at ε = 40; at replace-one, or 154, it takes all of it."""
    one_round = Ledger(DELTA).record(release(z=0.165))
    assert 39 < one_round.epsilon() < 41
    ppsgd = after(1, release=release(z=0.165))
    data = ppsgd.privacy_data()
    assert data["epsilon"] == one_round.epsilon()
    assert data["epsilon_replace_one"] == "infinite"
    assert data["statement"] == ppsgd.privacy_statement()
    assert after(1, release=release(z=0.07)).privacy_data()["epsilon"] == "infinite"


def test_all_releases_are_listed_with_noise_and_bound() -> None:
    rows = np.random.default_rng(0).normal(size=(12, 4))

    def learner(_: Context) -> AdditiveLinear:
        return AdditiveLinear(Minibatches(rows[:, :3], rows[:, 3], 4, seed=0, user=0), 3)

    ppsgd = PPSGD.auto(population=40, epsilon=8.0, delta=1e-3, task="regression")
    ppsgd.start(grid(client_app(learner), 40), ArrayRecord([np.zeros((3, 1))]))
    data = ppsgd.privacy_data()
    listed = [(each["what"], each["times"]) for each in data["releases"]]  # type: ignore[attr-defined]
    assert listed == [("unit", 1), ("w", 2)]
    text = ppsgd.privacy_statement()
    for each in data["releases"]:  # type: ignore[attr-defined]
        assert f"z = {each['noise_multiplier']:.4g}, bound {each['bound']:.4g}" in text
    for words in ("follows from what was published, by a public rule", "own fitted model, clipped"):
        assert words in text


@pytest.mark.parametrize("cohort", COHORTS)
def test_the_statement_holds_what_a_privacy_officer_needs(cohort: Poisson | FixedSize) -> None:
    text = after(release=Release(cohort, 1.0, 3.0)).privacy_statement()
    facts = ["zero-out", "replace-one", "delta = 0.0001", "z = 3", "C = 1", "Sampling", "trusted"]
    for fact in facts:
        assert fact in text


def test_a_run_that_was_stopped_by_looking_states_the_planned_rounds() -> None:
    ppsgd = strategy(release=release(z=20.0))

    def stop(round_: int, _: object) -> None:
        if round_ == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ppsgd.start(grid(), w0(), num_rounds=50, on_round=stop)
    planned = Ledger(DELTA).record(ppsgd.release, 50)
    assert ppsgd.ledger.rounds == 3
    assert ppsgd.privacy_data()["epsilon"] == planned.epsilon()
    assert "planned; stopped earlier" in ppsgd.privacy_statement()


Promised = list[tuple[float, str]]


def listening(promised: Promised) -> ClientApp:
    """Clients that note the ε and the words of every Order."""

    class Listener(Target):
        def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:
            promised.append((order.epsilon, order.promise))
            return super().gradients(w, theta, order)

    return client_app(lambda _: Listener(target(0)))


def test_a_plan_that_is_raised_is_a_caveat_and_what_users_are_promised_from_then_on() -> None:
    """Also if the server goes on in the same process."""
    promised: Promised = []
    ppsgd = strategy(release=release(z=20.0))
    nodes = grid(listening(promised))
    for rounds in (2, 6):
        promised.clear()
        trained(ppsgd, nodes, rounds)
        planned = Ledger(DELTA).record(ppsgd.release, rounds).epsilon()
        assert ppsgd.privacy_data()["epsilon"] == planned
        assert {epsilon for epsilon, _ in promised} == {planned}
        assert all(f"over {rounds} planned rounds" in text for _, text in promised)
        assert ("the plan was raised" in ppsgd.privacy_statement().lower()) == (rounds == 6)


def test_users_hear_at_once_that_a_node_may_not_be_one_user() -> None:
    """From the round on in which nodes are machines that can restart."""
    promised: Promised = []

    class Restarting(InProcessGrid):
        public_key = b"of a simulation"

        def get_nodes(self) -> Iterable[NodeInfo]:
            return [NodeInfo(node_id=i, public_key=self.public_key) for i in self.get_node_ids()]

    nodes = Restarting(listening(promised), USERS)

    def start_machines(round_: int, _: object) -> None:
        if round_ == 1:
            nodes.public_key = b"-----BEGIN PUBLIC KEY-----"

    strategy().start(nodes, w0(), num_rounds=2, on_round=start_machines)
    words = [text for _, text in promised]
    assert all(f"each of {USERS} users, user-level" in text for text in words[:USERS])
    assert all(f"each of {USERS} nodes, node-level" in text for text in words[USERS:])
    assert len(words) == 2 * USERS


def test_both_apis_state_the_same() -> None:
    message_api = after(1).privacy_data()
    server = legacy_strategy()
    server.server_config(1)
    legacy_round(server)
    server.aggregate_fit(1, [], [])
    legacy = server.privacy_data()
    for key in ("epsilon", "guarantee", "delta", "epsilon_replace_one", "statement"):
        assert legacy[key] == message_api[key]


def test_epsilon_is_infinite_in_words_that_json_has() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    data = after(release=release(z=0.0)).privacy_data()
    assert json.loads(json.dumps(data), parse_constant=refuse)["epsilon"] == "infinite"


def test_nothing_is_charged_if_nothing_is_published() -> None:
    """α = 0: everyone learns alone."""
    ppsgd = after(steps=Steps(shared=0.0, personal=0.5))
    assert ppsgd.privacy_data()["epsilon"] == 0
    assert ppsgd.ledger.rounds == 0
    assert "Nothing was published about anybody" in ppsgd.privacy_statement()


# --- what voids it

VOID: dict[str, tuple[dict[str, Any], str]] = {
    "a known seed": ({"insecure_seed": 1}, "insecure_seed"),
    "no noise": ({"release": release(z=0.0)}, "noise multiplier 0"),
    "a delta of one user": ({"release": release(population=20), "delta": 0.05}, "1/population"),
}


@pytest.mark.parametrize("why", VOID)
def test_without_a_guarantee_no_finite_epsilon_is_called_one(why: str) -> None:
    settings, reason = VOID[why]
    ppsgd = strategy(**settings)
    on = grid(users=ppsgd.release.cohort.population)
    result = ppsgd.start(on, w0(), num_rounds=2)
    spent = [metrics["epsilon"] for metrics in result.train_metrics_clientapp.values()]
    assert spent == [math.inf, math.inf]
    data = ppsgd.privacy_data()
    assert data["guarantee"] == "none"
    named = {name: value for name, value in data.items() if name.startswith("epsilon")}
    numbers = [value for value in named.values() if isinstance(value, float)]
    assert named["epsilon"] == "infinite"
    assert not numbers
    text = ppsgd.privacy_statement()
    assert text.startswith("NO GUARANTEE")
    assert reason in text
    assert "joint differential privacy allows" not in text


def test_a_seed_marks_a_training_for_ever(tmp_path: Path) -> None:
    """One seeded round voids the promise, and it stays so without the seed."""
    after(1, insecure_seed=1, checkpoint_dir=tmp_path)
    again = after(2, checkpoint_dir=tmp_path)
    assert again.privacy_data()["guarantee"] == "none"
    assert "1 of 2 rounds" in again.privacy_statement()
    assert "insecure" in ppsgd_command("ledger", tmp_path)


def test_a_delta_of_a_tenth_is_refused() -> None:
    with pytest.raises(ValueError, match="delta"):
        strategy(delta=0.1)


def test_a_large_epsilon_is_called_weak() -> None:
    assert "weak promise" in after(release=release(z=0.3)).privacy_statement()
    assert "weak promise" not in after(release=release(z=5.0)).privacy_statement()


def test_fixed_size_cohorts_claim_no_amplification() -> None:
    """Their ε is that of everyone in every round; the paper's number is no guarantee."""
    fixed = after(release=Release(FixedSize(USERS, 2), 1.0, 3.0))
    everyone = after(release=release(z=3.0))
    data = fixed.privacy_data()
    assert data["epsilon"] == everyone.privacy_data()["epsilon"]
    assert fixed.ledger.paper_epsilon() < data["epsilon"]  # type: ignore[operator]
    text = fixed.privacy_statement()
    assert "no amplification" in text
    assert "not a guarantee" in text
    assert "not a guarantee" not in everyone.privacy_statement()


def test_evaluation_on_client_data_is_off_unless_asked_for_and_then_said() -> None:
    words = "Evaluation on the users' own data"
    assert words not in after().privacy_statement()
    ppsgd = after(evaluate_every=1)
    assert words in ppsgd.privacy_statement()
    assert ppsgd.privacy_data()["guarantee"] != "none"


def test_evaluation_stays_in_the_statement_of_later_starts(tmp_path: Path) -> None:
    after(1, evaluate_every=1, checkpoint_dir=tmp_path)
    again = after(2, checkpoint_dir=tmp_path)
    assert "Evaluation on the users' own data" in again.privacy_statement()


NOT_PROTECTED = [
    "who is enrolled, and how many are",
    "the server itself, which is trusted",
    "metrics, logs and timings",
    "the choice of settings",
    "the initial parameters",
    "more than one node",
    "other trainings on the same users",
    "whoever may submit a run",
    "nobody's reply could be used",
]


def test_what_is_not_protected_is_said_in_words_and_data() -> None:
    ppsgd = after()
    text = ppsgd.privacy_statement()
    listed = ppsgd.privacy_data()["outside_the_guarantee"]
    assert isinstance(listed, list)
    assert all(line in text for line in listed)
    for words in NOT_PROTECTED:
        assert any(words in line for line in listed), words


# --- privacy.json


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """What a run of the command writes into privacy.json."""

    def run(*options: object) -> dict[str, Any]:
        out = tmp_path / "out"
        ppsgd_command("run", *SMALL, *options, "--out", out)
        found: dict[str, Any] = json.loads((out / "privacy.json").read_text())
        return found

    return run


def test_privacy_json_is_the_promise_of_the_run(written: Any) -> None:
    found = written("--set", "evaluate-every=0", "--set", "delta=1e-4")
    assert found["guarantee"] == "user-level joint differential privacy"
    ledger = Ledger.from_json(json.dumps(found["ledger"]))
    assert ledger.rounds == 2
    assert found["epsilon"] == ledger.epsilon()
    assert found["epsilon"] <= epsilon_in(found["statement"]) <= 1.001 * found["epsilon"]


def test_privacy_json_says_what_voids_the_promise(written: Any) -> None:
    """A simulation has its own reason; those of every training are ``VOID``."""
    found = written("--engine", "cohort")
    assert found["guarantee"] == "none"
    assert found["epsilon"] == "infinite"
    assert found["statement"].startswith("NO GUARANTEE")
    assert "simulation" in found["statement"]


# --- what a client loads

PROGRAM = """
import pickle, sys
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr_ppsgd import client_app
from flwr_ppsgd.simulation import InProcessGrid
import numpy as np


class Target:
    num_examples = 1
    def initial_theta(self): return np.zeros(6)
    def gradients(self, w, theta, order): return w - 1, theta
    def evaluate(self, w, theta): return {}


kinds = {"arrays": ArrayRecord, "config": ConfigRecord}
records = pickle.loads(sys.stdin.buffer.read())
content = RecordDict()
for name, (kind, values) in records.items():
    if kind == "arrays":
        values = {key: Array(value) for key, value in values.items()}
    content[name] = kinds[kind](values)
nodes = InProcessGrid(client_app(lambda context: Target()), 1)
(reply,) = nodes.send_and_receive([Message(content, nodes.get_node_ids()[0], "train")])
assert not reply.has_error(), reply.error
print("LOADED", *sys.modules)
"""


def test_a_client_that_has_answered_has_loaded_neither_server_nor_accounting() -> None:
    """In a fresh process, with what a real strategy sends."""
    message = strategy().configure_train(1, w0(), ConfigRecord(), grid())[0]
    records: dict[str, Any] = {}
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            records[name] = ("arrays", {key: array.numpy() for key, array in record.items()})
        else:
            records[name] = ("config", dict(record))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        input=pickle.dumps(records),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    _, _, modules = done.stdout.decode().rpartition("LOADED")
    loaded = set(modules.split())
    server = {each.__module__ for each in (PPSGD, PPSGDStrategy, Ledger)}
    assert "flwr_ppsgd" in loaded
    assert not loaded & {*server, "dp_accounting", "scipy", "torch", "ray", "flwr.superlink"}
