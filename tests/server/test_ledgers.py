"""``ppsgd ledger``: what is on the disk, whether it is all, and the honest way to mend it."""

import shutil
from pathlib import Path

import pytest

from flwr_ppsgd import Ledger
from flwr_ppsgd.promise import rounded_up
from flwr_ppsgd.server import record
from flwr_ppsgd.server.budget import Budget, new_budget, read_spending
from flwr_ppsgd.server.journal import NAME, Journal, read_story
from flwr_ppsgd.server.ledgers import add_charges, describe
from tests.server.test_budget import DELTA, SAMPLED, curator, one_round
from tests.server.test_journal import NOISY, run
from tests.support.toy import release


def epsilons(ledger: Ledger) -> str:
    return (
        f"epsilon = {rounded_up(ledger.epsilon())} (zero-out), "
        f"{rounded_up(ledger.epsilon('replace-one'))} (replace-one) at delta = {ledger.delta:g}"
    )


def test_a_journal_is_shown(tmp_path: Path) -> None:
    run(tmp_path, 3, evaluate_every=1)
    run(tmp_path, 4)
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:-3])
    journal = Journal(tmp_path, NOISY, 1e-4)
    journal.charge(5, False, release(z=7.0))
    journal.close()
    before = (tmp_path / NAME).read_bytes()
    text = describe([tmp_path])
    assert f"training {journal.training}\n" in text
    assert "charged: 5 releases" in text
    assert "4 x Release(" in text
    assert "1 x Release(" in text
    assert "planned: 4 charges in 4 rounds" in text
    assert "starts of the server: 2, before rounds 1, 4" in text
    assert "evaluation on client data: yes" in text
    assert "torn lines: 1" in text
    assert "insecure rounds: 0" in text
    assert "caveat: the number of rounds was raised from 3 to 4" in text
    assert "spent: " + epsilons(Ledger(1e-4).record(NOISY, 4).record(release(z=7.0))) in text
    assert "the checkpoint of w shows 4 charges, none is missing" in text
    assert "the record outside shows 5 charges, none is missing" in text
    assert (tmp_path / NAME).read_bytes() == before


def test_a_journal_is_shown_while_a_training_runs(tmp_path: Path) -> None:
    journal = Journal(tmp_path, NOISY, 1e-4)
    journal.charge(1, False)
    assert "charged: 1 releases" in describe([tmp_path])
    journal.close()


def test_no_finite_epsilon_is_shown_for_a_known_seed(tmp_path: Path) -> None:
    run(tmp_path, 2, insecure_seed=4)
    text = describe([tmp_path])
    assert "insecure rounds: 2" in text
    assert "spent: epsilon = inf (zero-out), inf (replace-one)" in text


def test_missing_charges_are_shown_and_can_be_added(tmp_path: Path) -> None:
    run(tmp_path, 4)
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / NAME).write_bytes(b"".join(lines[:-3]))
    text = describe([tmp_path])
    remedy = f"ppsgd ledger {tmp_path} --add 3"
    assert f"3 are MISSING here: put the newest file back, or add them with: {remedy}" in text
    assert text.count("MISSING") == 2, "w and the record"
    add_charges(tmp_path, 3, "the tail was cut")
    story = read_story(tmp_path)
    assert story.ledger.rounds == 4
    assert story.added == [(3, "the tail was cut")]
    assert "added by hand: 3 charges (the tail was cut)" in describe([tmp_path])
    assert "MISSING" not in describe([tmp_path])
    again, _ = run(tmp_path, 5)
    assert again.ledger.rounds == 5


def test_added_charges_raise_the_record(tmp_path: Path) -> None:
    run(tmp_path, 2)
    backup = (tmp_path / NAME).read_bytes()
    add_charges(tmp_path, 3, "released from another machine")
    (tmp_path / NAME).write_bytes(backup)
    with pytest.raises(ValueError, match=r"shows 2 rounds but the record .* shows 5"):
        run(tmp_path, 3)


def test_charges_are_added_after_a_torn_line(tmp_path: Path) -> None:
    run(tmp_path, 2)
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:-3])
    add_charges(tmp_path, 1, "to be sure")
    assert read_story(tmp_path).ledger.rounds == 3
    assert read_story(tmp_path).torn == 1


@pytest.mark.parametrize(
    ("count", "reason", "names"),
    [
        (0, "x", "count must be a whole number from 1"),
        (-2, "x", "count must be a whole number from 1"),
        (1.5, "x", "count must be a whole number from 1"),
        (1, " ", "reason must be a text"),
    ],
)
def test_what_cannot_be_added_is_refused(
    tmp_path: Path, count: int, reason: str, names: str
) -> None:
    run(tmp_path, 1)
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(ValueError, match=names):
        add_charges(tmp_path, count, reason)
    assert (tmp_path / NAME).read_bytes() == before


def test_a_directory_without_a_journal_is_refused(tmp_path: Path) -> None:
    for act in (lambda: describe([tmp_path]), lambda: add_charges(tmp_path, 1, "x")):
        with pytest.raises(ValueError, match=r"no journal in .*: name a checkpoint directory"):
            act()
    assert not list(tmp_path.iterdir())


def test_a_damaged_journal_is_not_added_to(tmp_path: Path) -> None:
    run(tmp_path, 2)
    content = (tmp_path / NAME).read_bytes().replace(b'"round": 1', b'"round": 7')
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(ValueError, match="damaged at line"):
        add_charges(tmp_path, 1, "x")
    assert (tmp_path / NAME).read_bytes() == content


def test_a_running_training_is_not_added_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flwr_ppsgd.server.journal.PATIENCE", 0.0)
    journal = Journal(tmp_path, NOISY, 1e-4)
    with pytest.raises(OSError, match="in use by another process"):
        add_charges(tmp_path, 1, "x")
    journal.close()


def test_several_trainings_are_composed_without_a_promise(tmp_path: Path) -> None:
    run(tmp_path / "a", 3)
    run(tmp_path / "b", 2, release=release(z=5.0), delta=1e-5)
    text = describe([tmp_path / "a", tmp_path / "b"])
    together = Ledger(1e-5).record(NOISY, 3).record(release(z=5.0), 2)
    assert f"together, spent so far: {epsilons(together)}" in text
    assert "not a guarantee if trainings were chosen after seeing earlier ones" in text


def test_trainings_under_one_budget_have_its_guarantee(tmp_path: Path) -> None:
    new_budget(tmp_path / "budget", 1.0, DELTA)
    for name in ("a", "b"):
        of = curator(tmp_path / name, tmp_path / "budget")
        one_round(of, 1)
        of.close()
    text = describe([tmp_path / name for name in ("a", "b", "budget")])
    assert "together: all are under the budget" in text
    assert "not a guarantee" not in text
    assert "epsilon = 1 (zero-out)" in text
    assert "filter: rdp at order" in text
    assert "trainings: 2" in text
    assert "charged: 2 releases" in text
    assert "the record outside shows 2 charges, none is missing" in text


def test_charges_added_to_a_training_are_in_its_budget_too(tmp_path: Path) -> None:
    new_budget(tmp_path / "budget", 1.0, DELTA)
    of = curator(tmp_path / "a", tmp_path / "budget")
    one_round(of, 1)
    of.close()
    add_charges(tmp_path / "a", 4, "x")
    assert read_spending(tmp_path / "budget").counts_of(of.training_id) == {SAMPLED: 5}
    again = curator(tmp_path / "a", tmp_path / "budget")
    assert again.ledger.rounds == 5
    assert read_spending(tmp_path / "budget").charged == 5


def test_charges_that_a_budget_has_lost_can_be_added(tmp_path: Path) -> None:
    new_budget(tmp_path, 1.0, DELTA)
    budget = Budget(tmp_path)
    for round_ in (1, 2, 3):
        budget.charge(9, round_, SAMPLED)
    budget.close()
    path = tmp_path / "budget.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]))
    with pytest.raises(ValueError, match=r"shows 1 rounds but the record .* --add 2"):
        Budget(tmp_path)
    assert "2 are MISSING" in describe([tmp_path])
    add_charges(tmp_path, 2, "cut")
    spending = read_spending(tmp_path)
    assert spending.charged == 3
    assert spending.spent() == pytest.approx(3 * spending.allowance.cost(SAMPLED))
    Budget(tmp_path).charge(9, 4, SAMPLED)


def test_a_missing_record_is_shown(tmp_path: Path) -> None:
    run(tmp_path, 1)
    shutil.rmtree(record.home())
    assert "check: the record outside is missing" in describe([tmp_path])
