"""``ppsgd ledger`` and ``ppsgd status``: beside a running training, nothing locked or changed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flwr_ppsgd import PPSGD, Ledger, Release, client_app
from flwr_ppsgd.cli import app
from flwr_ppsgd.database import StoreError
from flwr_ppsgd.server.budget import NAME as BUDGET
from flwr_ppsgd.server.budget import Budget, new_budget
from flwr_ppsgd.server.reports import add_charges, back_up, describe, status_of, status_text
from flwr_ppsgd.server.sealed import home
from flwr_ppsgd.server.store import NAME, Store
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.statement import rounded_up
from tests.support.toy import release, strategy, toy_learner, w0

POPULATION = 30
DELTA = 1e-3
NOISY = release(POPULATION, rate=0.5, z=1.0)
QUIET = release(POPULATION, rate=0.5, z=7.0)


@pytest.fixture(autouse=True)
def _own_records(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPSGD_STATE_HOME", str(tmp_path_factory.mktemp("records")))


def grid() -> InProcessGrid:
    return InProcessGrid(client_app(toy_learner), POPULATION)


def train(directory: Path, rounds: int, of: Release = NOISY, **changes: Any) -> PPSGD:
    ppsgd = strategy(release=of, **{"delta": DELTA, "checkpoint_dir": directory, **changes})
    ppsgd.start(grid(), w0(), num_rounds=rounds)
    return ppsgd


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def epsilons(ledger: Ledger) -> str:
    return (
        f"epsilon = {rounded_up(ledger.epsilon())} (zero-out), "
        f"{rounded_up(ledger.epsilon('replace-one'))} (replace-one) at delta = {ledger.delta:g}"
    )


# --- ppsgd ledger


def test_a_training_is_shown_with_a_line_for_each_charge(tmp_path: Path) -> None:
    train(tmp_path, 3, evaluate_every=1)
    train(tmp_path, 4)
    store = Store(tmp_path)
    store.charge(5, QUIET, insecure=False)
    store.close()
    before = contents(tmp_path)
    text = describe([tmp_path])
    lines = [line.strip() for line in text.splitlines()]
    assert f"training {store.owner}" in lines
    charges = [line for line in lines if line.startswith("charge ")]
    releases = enumerate([1, 1, 1, 1, 2], start=1)
    assert charges == [f"charge {n}: round {n}, release {release}" for n, release in releases]
    for expected in [
        "charged: 5 releases",
        "planned: 4 charges in 4 rounds",
        "starts of the server: 2, before rounds 1, 4",
        "evaluation on client data: yes",
        "insecure rounds: 0",
        "spent: " + epsilons(Ledger(DELTA).record(NOISY, 4).record(QUIET)),
        "check: w of round 4 is whole",
        "check: the record outside shows 5 charges, none is missing",
    ]:
        assert expected in lines
    assert "release 1: 4 x Release(" in text
    assert "release 2: 1 x Release(" in text
    assert "clients may pin ppsgd-server-key = ed25519:" in text
    assert "caveat: the plan was raised after 3 charges, from epsilon = " in text
    assert contents(tmp_path) == before


def test_no_finite_epsilon_is_shown_for_a_known_seed(tmp_path: Path) -> None:
    train(tmp_path, 2, insecure_seed=4)
    text = describe([tmp_path])
    assert "insecure rounds: 2" in text
    assert "charge 2: round 2, release 1, insecure" in text
    assert "spent: epsilon = inf (zero-out), inf (replace-one)" in text
    found = status_of(tmp_path)
    assert found["epsilon"]["spent"] == found["epsilon"]["planned"] == "infinite"
    shown = status_text(found)
    assert "NO GUARANTEE: 2 of 2 rounds drew their random bits from a known seed" in shown


def test_missing_charges_are_shown_and_can_be_added(tmp_path: Path) -> None:
    place = tmp_path / "server"
    train(place, 1)
    back_up(place, tmp_path / "backup" / NAME)
    train(place, 4)
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "backup", place)
    assert f"check: MISSING: {place / NAME} shows 1 charges" in describe([place])
    found = status_of(place)
    assert found["charges"] == {"made": 1, "missing": 3}
    assert "--add 3\n" in status_text(found)
    add_charges(place, 3, "restored")
    text = describe([place])
    assert "added by hand: 3 charges (restored)" in text
    assert "MISSING" not in text
    assert train(place, 5).ledger.rounds == 1 + 3 + 4


def test_added_charges_are_in_the_record(tmp_path: Path) -> None:
    train(tmp_path, 2)
    before = (tmp_path / NAME).read_bytes()
    add_charges(tmp_path, 3, "released from another machine")
    (tmp_path / NAME).write_bytes(before)
    with pytest.raises(StoreError, match=r"shows 2 charges but the record outside shows 5"):
        train(tmp_path, 3)


COUNT = "count must be a whole number from 1"


@pytest.mark.parametrize(
    ("count", "reason", "names"),
    [(0, "x", COUNT), (1.5, "x", COUNT), (1, " ", "reason must be a text")],
)
def test_what_cannot_be_added_is_refused(
    tmp_path: Path, count: int, reason: str, names: str
) -> None:
    train(tmp_path, 1)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=names):
        add_charges(tmp_path, count, reason)
    assert contents(tmp_path) == before


def test_a_running_or_damaged_training_is_not_added_to(tmp_path: Path) -> None:
    train(tmp_path, 2)
    store = Store(tmp_path)
    with pytest.raises(StoreError, match="in use by another"):
        add_charges(tmp_path, 1, "x")
    store.close()
    content = (tmp_path / NAME).read_bytes().replace(b"[1, 0, false", b"[7, 0, false")
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(StoreError, match="damaged at row"):
        add_charges(tmp_path, 1, "x")
    assert (tmp_path / NAME).read_bytes() == content


def test_a_training_that_has_not_begun_is_refused_in_one_line(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with pytest.raises(StoreError, match="no training has begun there"):
        describe([tmp_path])


def test_several_trainings_are_composed_without_a_promise(tmp_path: Path) -> None:
    train(tmp_path / "a", 3)
    train(tmp_path / "b", 2, of=QUIET, delta=1e-4)
    text = describe([tmp_path / "a", tmp_path / "b"])
    together = Ledger(1e-4).record(NOISY, 3).record(QUIET, 2)
    assert f"together, spent so far: {epsilons(together)}" in text
    assert "not a guarantee if trainings were chosen after seeing earlier ones" in text


def test_trainings_under_one_budget_have_its_guarantee(tmp_path: Path) -> None:
    new_budget(tmp_path / "budget", 20.0, DELTA)
    for name in ("a", "b"):
        train(tmp_path / name, 1, budget_dir=tmp_path / "budget")
    text = describe([tmp_path / name for name in ("a", "b", "budget")])
    assert "together: all are under the budget" in text
    assert "not a guarantee" not in text
    assert "epsilon = 20 (zero-out)" in text
    assert "filter: rdp at order" in text
    assert "trainings: 2" in text
    assert "charge 2: round 1, release 1, training " in text
    assert "charged: 2 releases" in text
    assert "the record outside shows 2 charges, none is missing" in text
    assert f"under the budget in {tmp_path / 'budget'}" in status_text(status_of(tmp_path / "a"))


def test_charges_that_a_budget_has_lost_can_be_added(tmp_path: Path) -> None:
    new_budget(tmp_path / "a", 20.0, DELTA)
    Budget(tmp_path / "a").charge(9, 1, NOISY)
    back_up(tmp_path / "a", tmp_path / "backup.sqlite")
    Budget(tmp_path / "a").charge(9, 2, NOISY)
    shutil.copy(tmp_path / "backup.sqlite", tmp_path / "a" / BUDGET)
    with pytest.raises(StoreError, match=r"shows 1 charges but the record .* --add 1"):
        Budget(tmp_path / "a")
    assert "MISSING" in describe([tmp_path / "a"])
    add_charges(tmp_path / "a", 1, "restored")
    budget = Budget(tmp_path / "a")
    assert budget.charge_count == 2
    assert budget.cost_of_charges() == pytest.approx(2 * budget.allowance.cost(NOISY))


def test_a_missing_record_and_a_damaged_w_are_shown(tmp_path: Path) -> None:
    train(tmp_path, 1)
    shutil.rmtree(home())
    (w,) = tmp_path.glob("w-*")
    w.write_bytes(b"")
    text = describe([tmp_path])
    assert "check: the record outside is missing" in text
    assert "check: no checkpoint of w" in text


# --- ppsgd status


def test_it_tells_of_a_training_at_work_and_leaves_it_alone(tmp_path: Path) -> None:
    ppsgd = strategy(release=NOISY, delta=DELTA, checkpoint_dir=tmp_path)
    seen = []

    def look(round_: int, _: object) -> None:
        before = contents(tmp_path)
        seen.append(status_of(tmp_path))
        assert contents(tmp_path) == before, round_

    ppsgd.start(grid(), w0(), num_rounds=3, on_round=look)
    assert [each["rounds"] for each in seen] == [{"done": n, "planned": 3} for n in range(4)]
    assert [each["charges"] for each in seen] == [{"made": n, "missing": 0} for n in range(4)]
    assert {each["lost"] for each in seen} == {""}
    assert {each["running"] for each in seen} <= {True, None}
    assert {each["epsilon"]["planned"] for each in seen} == {ppsgd.ledger.epsilon()}
    spent = [each["epsilon"]["spent"] for each in seen]
    assert spent == sorted(set(spent))
    after = status_of(tmp_path)
    assert after["running"] in (False, None)
    assert after["replies"]["rounds"] == after["last_round"]["round"] == 3
    assert after["replies"]["used"] > 0
    assert after["last_error"] is None
    assert after["disk"]["used_bytes"] == sum(map(len, contents(tmp_path).values()))
    assert after["disk"]["free_bytes"] > 0


def test_replies_by_reason_the_last_error_and_the_last_problem(tmp_path: Path) -> None:
    def sometimes(*given: Any) -> Any:
        if int(given[1].node_config["partition-id"]) < 20:
            raise RuntimeError("no data here")
        return client_app(toy_learner)(*given)

    ppsgd = strategy(release=NOISY, delta=DELTA, checkpoint_dir=tmp_path)
    ppsgd.start(InProcessGrid(sometimes, POPULATION), w0(), num_rounds=2)  # type: ignore[arg-type]
    store = Store(tmp_path)
    store.record_fact({"problem": "two nodes under one name: ada"})
    store.record_fact({"error": "OSError: the disk is full"})
    store.close()
    found = status_of(tmp_path)
    assert list(found["replies"]["zeros"]) == ["client error"]
    assert found["last_error"]["text"] == "OSError: the disk is full"
    words = status_text(found)
    assert f"replies in 2 rounds: replies={found['replies']['used']} zeros=" in words
    assert "no data here (20" in words
    assert "last error: OSError: the disk is full (20" in words
    assert "last problem: two nodes under one name: ada (20" in words


def test_a_backup_is_of_one_directory() -> None:
    both = CliRunner().invoke(app, ["ledger", "a", "b", "--backup", "x"])
    assert "need one directory, got 2" in str(both.exception)
