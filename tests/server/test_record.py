"""The number of charges, outside the directory: a journal that went back in time shows."""

import logging
import os
import shutil
import stat
from pathlib import Path

import pytest

from flwr_ppsgd import disk
from flwr_ppsgd.server.journal import NAME, NO_RECORD, RECORD_NOT_WRITTEN, Journal
from flwr_ppsgd.server.ledgers import add_charges
from flwr_ppsgd.server.record import Record, home
from tests.server.test_journal import NOISY, run, training
from tests.support.toy import grid, w0


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"PPSGD_STATE_HOME": "/a", "XDG_STATE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"PPSGD_STATE_HOME": "", "XDG_STATE_HOME": "/b", "HOME": "/c"}, "/b/ppsgd"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/c"}, "/c/.local/state/ppsgd"),
        ({"HOME": "/c"}, "/c/.local/state/ppsgd"),
    ],
)
def test_where_records_are(
    monkeypatch: pytest.MonkeyPatch, names: dict[str, str], expected: str
) -> None:
    for name in ("PPSGD_STATE_HOME", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert home() == Path(expected)


def test_a_record_is_private_and_survives_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPSGD_STATE_HOME", str(tmp_path / "a" / "b"))
    record = Record(5, tmp_path)
    assert record.read() is None
    record.write(3)
    record.write(4)
    assert record.read() == 4
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["5.charges"]
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700
    assert mode(record.path) == 0o600
    record.path.write_bytes(record.path.read_bytes().replace(b"4", b"1"))
    assert record.read() is None


def test_new_directories_are_private_and_their_names_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    real = disk.sync_directory

    def sync(directory: Path) -> None:
        synced.append(directory)
        real(directory)

    monkeypatch.setattr(disk, "sync_directory", sync)
    old = os.umask(0)
    try:
        disk.make_private(tmp_path / "a" / "b" / "c")
        disk.make_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(old)
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    for inside in ("a", "a/b", "a/b/c"):
        assert mode(tmp_path / inside) == 0o700


def test_a_checkpoint_directory_is_private(tmp_path: Path) -> None:
    training(tmp_path / "x" / "y")
    assert mode(tmp_path / "x") == mode(tmp_path / "x" / "y") == 0o700


def test_a_restored_backup_is_refused_until_its_charges_are_added(tmp_path: Path) -> None:
    """The attack: a whole directory as it was five released rounds ago."""
    place = tmp_path / "run"
    run(place, 3)
    shutil.copytree(place, tmp_path / "backup")
    run(place, 8)
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "backup", place)
    before = (place / NAME).read_bytes()
    with pytest.raises(ValueError, match=rf"shows 3 rounds.*shows 8.*ppsgd ledger {place} --add 5"):
        training(place)
    assert (place / NAME).read_bytes() == before
    add_charges(place, 5, "a backup was restored")
    again, _ = run(place, 4)
    assert again.rounds_done == 4
    assert again.ledger.rounds == 9


def test_a_cut_tail_shows_even_between_checkpoints(tmp_path: Path) -> None:
    run(tmp_path, 5, checkpoint_every=100)
    for path in tmp_path.glob("*.checkpoint"):
        path.unlink()
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / NAME).write_bytes(b"".join(lines[:-1]))
    with pytest.raises(ValueError, match=r"shows 4 rounds but the record .* shows 5"):
        training(tmp_path, checkpoint_every=100)


def test_a_missing_record_is_a_caveat_that_stays(tmp_path: Path) -> None:
    run(tmp_path, 2)
    shutil.rmtree(home())
    first = training(tmp_path)
    assert first._curator.caveats == (NO_RECORD,)
    first.start(grid(), w0(), num_rounds=2)
    again = training(tmp_path)
    assert again._curator.caveats == (NO_RECORD,)
    assert (tmp_path / NAME).read_text().count('"caveat"') == 1


def test_a_new_training_has_no_caveat(tmp_path: Path) -> None:
    ppsgd, _ = run(tmp_path, 2)
    assert ppsgd._curator.caveats == ()
    assert training(tmp_path)._curator.caveats == ()


def test_a_record_that_cannot_be_written_is_one_warning_and_a_caveat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PPSGD_STATE_HOME", str(tmp_path / "file" / "state"))
    with caplog.at_level(logging.WARNING):
        ppsgd, _ = run(tmp_path / "run", 3)
    assert caplog.text.count("The record of charges cannot be written") == 1
    assert ppsgd._curator.caveats == (RECORD_NOT_WRITTEN,)
    assert ppsgd.ledger.rounds == 3
    assert RECORD_NOT_WRITTEN in training(tmp_path / "run")._curator.caveats


def test_a_journal_ahead_of_its_record_goes_on(tmp_path: Path) -> None:
    """Killed between the two: the journal is right."""
    run(tmp_path, 3)
    journal = Journal(tmp_path, NOISY, 1e-4)
    Record(journal.training, tmp_path).write(2)
    journal.close()
    assert training(tmp_path).ledger.rounds == 3


def test_the_reason_why_a_node_may_not_be_a_user_is_remembered(tmp_path: Path) -> None:
    first = training(tmp_path)
    for _ in range(3):
        first._curator.note_caveat("nodes have no names")
        first._curator.note_caveat("")
    first.close()
    again = training(tmp_path)
    (caveat,) = again._curator.promise().caveats
    assert caveat.endswith("is NOT claimed: nodes have no names.")
    assert again._curator.headline().unit == "node"
    assert again._curator.caveats == ()
    assert (tmp_path / NAME).read_text().count("nodes have no names") == 1


def test_more_rounds_than_were_planned_are_a_caveat(tmp_path: Path) -> None:
    run(tmp_path, 3)
    same, _ = run(tmp_path, 3)
    assert same._curator.caveats == ()
    more, _ = run(tmp_path, 5)
    (caveat,) = more._curator.caveats
    assert "raised from 3 to 5 after 3 charges" in caveat
    assert training(tmp_path)._curator.caveats == (caveat,)


def test_a_round_that_is_redone_is_no_longer_plan(tmp_path: Path) -> None:
    first = training(tmp_path)
    first._curator.plan(5)
    first._curator._charge(1)  # killed right after the charge
    first.close()
    again, _ = run(tmp_path, 5)
    assert again.ledger.rounds == 6
    assert again._curator.caveats == ()
