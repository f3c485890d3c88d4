"""Lines on disk: torn ones lose nothing, failed writes leave nothing, a child holds nothing."""

import errno
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flwr_ppsgd.privacy import release_to_dict
from flwr_ppsgd.server import record
from flwr_ppsgd.server.chain import RESERVE, RESERVE_BYTES, Chain, sealed
from flwr_ppsgd.server.checkpoint import Checkpoint, save
from flwr_ppsgd.server.journal import NAME, Journal
from tests.server.test_journal import NOISY, run, training
from tests.support.toy import grid, w0


def charged(directory: Path, rounds: int, insecure: bool = False) -> bytes:
    """A journal with so many charges, closed; its bytes."""
    journal = Journal(directory, NOISY, 1e-4)
    for round_ in range(1, rounds + 1):
        journal.charge(round_, insecure)
    journal.close()
    return (directory / NAME).read_bytes()


def reopened(directory: Path) -> Journal:
    journal = Journal(directory, NOISY, 1e-4)
    journal.close()
    return journal


@pytest.mark.parametrize("number", [2, 9])
def test_a_journal_of_another_format_is_refused(tmp_path: Path, number: int) -> None:
    line, _ = sealed(b'{"format": "flwr_ppsgd journal %d"}' % number, 0)
    (tmp_path / NAME).write_bytes(line)
    words = rf"journal {number}.*with the version of flwr-ppsgd that wrote it"
    with pytest.raises(ValueError, match=words):
        Journal(tmp_path, NOISY, 1e-4)


def test_a_line_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    chain = Chain(tmp_path / NAME)
    first = {"format": "flwr_ppsgd journal 3", "training": 1, "delta": 1e-4}
    chain.append({**first, "release": release_to_dict(NOISY)})
    chain.append({"refund": 3})
    chain.close()
    with pytest.raises(ValueError, match="a line with refund is unknown to this version"):
        Journal(tmp_path, NOISY, 1e-4)


@pytest.mark.parametrize("insecure", [True, False])
def test_a_torn_last_line_counts_as_one_charge_wherever_it_is_cut(
    tmp_path: Path, insecure: bool
) -> None:
    """Killed in the middle of the fourth charge: the ledger shows four, and goes on."""
    content = charged(tmp_path, 4, insecure)
    start = content.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(start + 1, len(content)):
        (tmp_path / NAME).write_bytes(content[:end])
        journal = Journal(tmp_path, NOISY, 1e-4)
        assert journal.ledger.rounds == 4, end
        journal.charge(5, insecure)
        journal.close()
        record.Record(journal.training, tmp_path).write(4)
        assert (tmp_path / NAME).read_bytes().startswith(content[:end]), "what is torn stays"
        again = reopened(tmp_path)
        assert again.ledger.rounds == 5, end
        whole = end == len(content) - 1  # only the newline was missing
        assert again.story.torn == (0 if whole else 1)


def test_a_torn_line_is_mended_after_a_crash_at_any_byte_of_mending(tmp_path: Path) -> None:
    content = charged(tmp_path, 4)[:-9]
    (tmp_path / NAME).write_bytes(content)
    reopened(tmp_path)
    mended = (tmp_path / NAME).read_bytes()
    for end in range(len(content), len(mended) + 1):
        (tmp_path / NAME).write_bytes(mended[:end])
        assert reopened(tmp_path).ledger.rounds == 4, end
        assert reopened(tmp_path).story.torn == 1, end


def test_a_bad_line_is_accepted_only_before_the_entry_that_says_so(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(charged(tmp_path, 4)[:-9])
    journal = Journal(tmp_path, NOISY, 1e-4)
    journal.charge(5, False)
    journal.close()
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    torn, said, after = lines[-3:]
    assert said.startswith(b'{"torn": ')
    for tail in (
        [torn, after],
        [said, after],
        [torn[:-2] + b"\n", said, after],
        [torn, torn, said],
    ):
        (tmp_path / NAME).write_bytes(b"".join([*lines[:-3], *tail]))
        with pytest.raises(ValueError, match="damaged at line"):
            reopened(tmp_path)


def test_a_torn_line_is_refused_if_w_has_had_more_charges(tmp_path: Path) -> None:
    content = charged(tmp_path, 4)
    lines = content.splitlines(keepends=True)
    shutil.rmtree(record.home())
    save(tmp_path, Checkpoint(4, {}, 4))
    torn = b"".join(lines[:-2]) + lines[-2][:9]
    (tmp_path / NAME).write_bytes(torn)
    with pytest.raises(ValueError, match=r"shows 3 rounds but w has had 4: .* --add 1"):
        Journal(tmp_path, NOISY, 1e-4)
    assert (tmp_path / NAME).read_bytes() == torn


def test_a_torn_line_is_refused_if_the_record_shows_more_charges(tmp_path: Path) -> None:
    lines = charged(tmp_path, 4).splitlines(keepends=True)
    torn = b"".join(lines[:-2]) + lines[-2][:9]
    (tmp_path / NAME).write_bytes(torn)
    with pytest.raises(ValueError, match=r"shows 3 rounds but the record .* shows 4: .* --add 1"):
        Journal(tmp_path, NOISY, 1e-4)
    assert (tmp_path / NAME).read_bytes() == torn


def first_line(directory: Path) -> bytes:
    return charged(directory, 0)


def test_a_torn_first_line_is_a_new_journal(tmp_path: Path) -> None:
    content = first_line(tmp_path)
    for end in range(len(content) - 1):
        (tmp_path / NAME).write_bytes(content[:end])
        journal = Journal(tmp_path, NOISY, 1e-4)
        journal.charge(1, False)
        journal.close()
        assert reopened(tmp_path).ledger.rounds == 1
        record.Record(journal.training, tmp_path).path.unlink()


@pytest.mark.parametrize("end", [5, 60, -2])
@pytest.mark.parametrize("what", ["checkpoint", "record"])
def test_a_torn_first_line_is_refused_if_there_was_a_training(
    tmp_path: Path, what: str, end: int
) -> None:
    charged(tmp_path, 2)
    content = (tmp_path / NAME).read_bytes().splitlines(keepends=True)[0][:end]
    (tmp_path / NAME).write_bytes(content)
    if what == "checkpoint":
        shutil.rmtree(record.home())
        save(tmp_path, Checkpoint(1, {}, 1))
    with pytest.raises(ValueError, match="damaged at line 1"):
        Journal(tmp_path, NOISY, 1e-4)
    assert (tmp_path / NAME).read_bytes() == content


def test_a_journal_that_cannot_be_cut_back_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, NOISY, 1e-4)

    def broken(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        patch.setattr(os, "ftruncate", broken)
        with pytest.raises(OSError, match="nothing was released"):
            journal.charge(1, False)
    assert not journal.is_open
    with pytest.raises(OSError, match="is closed: nothing was released"):
        journal.charge(1, False)
    journal.close()
    assert reopened(tmp_path).ledger.rounds >= 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 KiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(mounted)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a file system can be mounted by root only")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


def fill(directory: Path) -> None:
    with (directory / "filler").open("ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def test_a_real_full_disk_ends_a_training_and_loses_nothing(
    small_disk: Path,
) -> None:
    place = small_disk / "run"
    ppsgd = training(place)
    asked: list[int] = []

    def on_round(round_: int, _: object) -> None:
        asked.append(round_)
        if round_ == 2:
            fill(small_disk)

    with pytest.raises(OSError, match=r"w of round 3 could not be saved .*No space left on device"):
        ppsgd.start(grid(), w0(), num_rounds=9, on_round=on_round)
    assert asked == [0, 1, 2]
    assert ppsgd.ledger.rounds == 3, "the charge of round 3 had room, and w of it had none"
    (place / RESERVE).unlink()
    fill(small_disk)
    with pytest.raises(OSError, match=r"has no room for .* nothing was sent"):
        training(place).start(grid(), w0(), num_rounds=9)
    (small_disk / "filler").unlink()
    again, _ = run(place, 4)
    assert (again.rounds_done, again.ledger.rounds) == (4, 5), "round 3 is charged twice"


def charge_for_ever(journal: Journal) -> None:
    for round_ in itertools.count(1):
        journal.charge(round_, False)


def test_a_journal_on_a_real_full_disk_is_whole_at_every_moment(small_disk: Path) -> None:
    journal = Journal(small_disk, NOISY, 1e-4)
    journal.reserve()
    fill(small_disk)
    with pytest.raises(OSError, match="No space left on device"):
        charge_for_ever(journal)
    rounds = journal.ledger.rounds
    journal.close()
    assert rounds > RESERVE_BYTES / 60 / 2, "the reserve holds more than any round needs"
    assert reopened(small_disk).ledger.rounds == rounds
    assert reopened(small_disk).story.torn == 0


def test_a_child_that_lives_on_does_not_keep_the_lock(tmp_path: Path) -> None:
    journal = Journal(tmp_path, NOISY, 1e-4)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent is done
        os._exit(0)
    os.close(read)
    time.sleep(0.05)
    journal.close()
    reopened(tmp_path)
    os.close(write)
    os.waitpid(child, 0)


def test_close_may_be_called_twice(tmp_path: Path) -> None:
    journal = Journal(tmp_path, NOISY, 1e-4)
    journal.close()
    stranger = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    journal.close()
    os.fstat(stranger)  # it may have the same number
    os.close(stranger)
