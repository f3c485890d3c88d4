"""The number of charges, outside the directory: a journal that went back in time shows."""

import stat
from pathlib import Path

import pytest

from flwr_ppsgd.server.journal import NAME, Journal
from flwr_ppsgd.server.record import Record, home
from tests.server.test_journal import NOISY, run, training


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


def test_a_checkpoint_directory_is_private(tmp_path: Path) -> None:
    training(tmp_path / "x" / "y")
    assert mode(tmp_path / "x") == mode(tmp_path / "x" / "y") == 0o700


def test_a_cut_tail_shows_even_between_checkpoints(tmp_path: Path) -> None:
    run(tmp_path, 5, checkpoint_every=100)
    for path in tmp_path.glob("*.checkpoint"):
        path.unlink()
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / NAME).write_bytes(b"".join(lines[:-1]))
    with pytest.raises(ValueError, match=r"shows 4 rounds but the record .* shows 5"):
        training(tmp_path, checkpoint_every=100)


def test_a_journal_ahead_of_its_record_goes_on(tmp_path: Path) -> None:
    """Killed between the two: the journal is right."""
    run(tmp_path, 3)
    journal = Journal(tmp_path, NOISY, 1e-4)
    Record(journal.training, tmp_path).write(2)
    journal.close()
    assert training(tmp_path).ledger.rounds == 3
