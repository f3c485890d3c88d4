"""``ppsgd status``: beside a running training, nothing locked, nothing changed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flwr_ppsgd import PPSGD, client_app
from flwr_ppsgd.cli import app
from flwr_ppsgd.promise import rounded_up
from flwr_ppsgd.server import journal
from flwr_ppsgd.server.budget import new_budget
from flwr_ppsgd.server.private_log import NAME, PrivateLog
from flwr_ppsgd.server.record import Record
from flwr_ppsgd.server.status import status_of
from flwr_ppsgd.simulation import InProcessGrid
from tests.support.toy import release, strategy, toy_learner, w0

POPULATION = 30


def made(directory: Path, **changes: Any) -> PPSGD:
    cohort = release(POPULATION, rate=0.5, z=1.0)
    return strategy(release=cohort, delta=1e-3, checkpoint_dir=directory, **changes)


def grid() -> InProcessGrid:
    return InProcessGrid(client_app(toy_learner), POPULATION)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_it_tells_of_a_training_at_work_and_leaves_it_alone(tmp_path: Path) -> None:
    ppsgd = made(tmp_path)
    seen = []

    def look(round_: int, _: object) -> None:
        before = contents(tmp_path)
        seen.append(status_of(tmp_path).as_data())
        assert contents(tmp_path) == before, round_

    ppsgd.start(grid(), w0(), num_rounds=3, on_round=look)
    assert [each["rounds"] for each in seen] == [{"done": n, "planned": 3} for n in range(4)]
    assert [each["charges"] for each in seen] == [{"made": n, "missing": 0} for n in range(4)]
    assert {each["running"] for each in seen} <= {True, None}
    assert {each["epsilon"]["planned"] for each in seen} == {ppsgd.ledger.epsilon()}
    spent = [each["epsilon"]["spent"] for each in seen]
    assert spent == sorted(set(spent))
    assert spent[0] == 0.0
    after = status_of(tmp_path).as_data()
    assert after["running"] in (False, None)
    assert after["replies"]["rounds"] == 3
    assert after["replies"]["used"] > 0
    assert after["last_round"]["round"] == 3
    assert after["last_error"] is None
    sizes = [len(data) for data in contents(tmp_path).values()]
    assert after["disk"]["used_bytes"] == sum(sizes)
    assert after["disk"]["free_bytes"] > 0


def test_replies_by_reason_the_last_error_and_the_last_problem(tmp_path: Path) -> None:
    def sometimes(*given: Any) -> Any:
        place = int(given[1].node_config["partition-id"])
        if place < 20:
            raise RuntimeError("no data here")
        return client_app(toy_learner)(*given)

    ppsgd = made(tmp_path)
    ppsgd.start(InProcessGrid(sometimes, POPULATION), w0(), num_rounds=2)  # type: ignore[arg-type]
    PrivateLog(tmp_path, secret=True).note_problem("two nodes under one name: ada")
    PrivateLog(tmp_path, secret=True).note_error(OSError("the disk is full"))
    found = status_of(tmp_path)
    data = found.as_data()
    assert list(data["replies"]["zeros"]) == ["client error"]
    assert data["last_error"]["text"] == "OSError: the disk is full"
    assert data["last_problem"]["text"] == "two nodes under one name: ada"
    words = found.in_words()
    assert f"replies in 2 rounds: replies={data['replies']['used']} zeros=" in words
    assert "no data here (20" in words
    assert "last error: OSError: the disk is full (20" in words


def test_the_command_prints_words_or_json(tmp_path: Path) -> None:
    ppsgd = made(tmp_path)
    ppsgd.start(grid(), w0(), num_rounds=2)
    run = CliRunner()
    words = run.invoke(app, ["status", str(tmp_path)])
    assert words.exit_code == 0
    spent = rounded_up(ppsgd.ledger.epsilon())
    assert "rounds: 2 of 2 done" in words.output
    assert f"epsilon: {spent} spent, {spent} planned, at delta = 0.001" in words.output
    shown = json.loads(run.invoke(app, ["status", str(tmp_path), "--json"]).output)
    expected = status_of(tmp_path).as_data()
    for data in (shown, expected):
        assert data["disk"].pop("free_bytes") > 0  # others use the disk meanwhile
    assert shown == expected


def test_without_a_training_it_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no journal in"):
        status_of(tmp_path)
    with pytest.raises(ValueError, match="no journal in"):
        status_of(tmp_path / "nowhere")


def test_charges_that_are_missing_in_the_journal_show(tmp_path: Path) -> None:
    made(tmp_path).start(grid(), w0(), num_rounds=3)
    before = (tmp_path / journal.NAME).read_bytes()
    made(tmp_path).start(grid(), w0(), num_rounds=5)
    (tmp_path / journal.NAME).write_bytes(before)
    found = status_of(tmp_path)
    assert found.missing == 2
    assert "2 charges are MISSING in the journal: see ppsgd ledger" in found.in_words()
    for path in tmp_path.glob("w-*"):
        path.unlink()
    assert status_of(tmp_path).missing == 2, "by the record outside"
    Record(found.training, tmp_path).path.unlink()
    assert status_of(tmp_path).missing == 0


def test_no_finite_epsilon_without_a_guarantee(tmp_path: Path) -> None:
    made(tmp_path, insecure_seed=1).start(grid(), w0(), num_rounds=2)
    found = status_of(tmp_path)
    assert math.isinf(found.spent.epsilon)
    assert found.as_data()["epsilon"]["spent"] == "infinite"
    assert found.as_data()["epsilon"]["planned"] == "infinite"
    assert "NO GUARANTEE: 2 of 2 rounds drew their coins from a known seed" in found.in_words()


def test_under_a_budget_it_says_whose_epsilon_is_the_guarantee(tmp_path: Path) -> None:
    new_budget(tmp_path / "budget", 20.0, 1e-3, "rdp")
    made(tmp_path / "one", budget_dir=tmp_path / "budget").start(grid(), w0(), num_rounds=1)
    found = status_of(tmp_path / "one")
    assert f"under the budget in {tmp_path / 'budget'}" in found.in_words()


def test_a_training_without_its_private_file_has_a_status(tmp_path: Path) -> None:
    made(tmp_path).start(grid(), w0(), num_rounds=2)
    (tmp_path / NAME).unlink()
    found = status_of(tmp_path)
    assert found.rounds_done == 2
    assert f"replies: none are noted in {NAME}" in found.in_words()
