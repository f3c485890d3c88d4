"""Lines on disk: torn ones lose nothing, failed writes leave nothing, a child holds nothing."""

import errno
import itertools
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flwr_ppsgd import disk
from flwr_ppsgd.privacy import release_to_dict
from flwr_ppsgd.server import record
from flwr_ppsgd.server.chain import RESERVE, RESERVE_BYTES, Chain, sealed
from flwr_ppsgd.server.checkpoint import Checkpoint, save
from flwr_ppsgd.server.journal import NAME, Journal
from tests.server.test_journal import NOISY, run, training
from tests.support.toy import grid, release, w0


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


def test_a_line_names_its_release(tmp_path: Path) -> None:
    other = release(z=5.0)
    journal = Journal(tmp_path, NOISY, 1e-4)
    journal.charge(1, False)
    for round_ in (2, 3):
        journal.charge(round_, False, other)
    journal.charge(4, True, NOISY)
    journal.close()
    lines = (tmp_path / NAME).read_text().splitlines()
    texts = [line.split("\t")[0] for line in lines]
    assert texts[1] == '{"round": 1, "kind": 0, "insecure": false}'
    assert texts[2].startswith('{"kind": 1, "release": {')
    assert texts[3:] == [
        '{"round": 2, "kind": 1, "insecure": false}',
        '{"round": 3, "kind": 1, "insecure": false}',
        '{"round": 4, "kind": 0, "insecure": true}',
    ]
    again = reopened(tmp_path).ledger
    assert dict(again.releases) == {NOISY: 2, other: 2}
    assert again == journal.ledger
    assert again.insecure_rounds == 1


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


def test_no_flipped_byte_of_a_journal_hides_a_charge(tmp_path: Path) -> None:
    content = charged(tmp_path, 3)
    home = record.home()
    dice = random.Random(0)
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << dice.randrange(8)
        (tmp_path / NAME).write_bytes(changed)
        shutil.rmtree(home, ignore_errors=True)  # nothing outside helps
        try:
            found = reopened(tmp_path).ledger.rounds
        except ValueError:
            assert (tmp_path / NAME).read_bytes() == bytes(changed)
        else:
            assert found >= 3, place


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


Fault = Callable[..., Any]


def failing_once(real: Fault, journal: Journal, error: int, part: int = 0) -> Fault:
    """``real``, which fails once on the journal's file after ``part`` bytes."""
    left = [1]

    def call(descriptor: int, *data: Any) -> Any:
        if descriptor != journal._chain._file or not left:
            return real(descriptor, *data)
        left.pop()
        if data and part:
            real(descriptor, bytes(data[0])[:part])
        raise OSError(error, os.strerror(error))

    return call


@pytest.mark.parametrize(
    ("name", "part"), [("write", 0), ("write", 11), ("fsync", 0)], ids=["at once", "half", "sync"]
)
def test_a_failed_write_of_a_living_process_is_cut_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, part: int
) -> None:
    before = charged(tmp_path, 2)
    journal = Journal(tmp_path, NOISY, 1e-4)
    monkeypatch.setattr(os, name, failing_once(getattr(os, name), journal, errno.EIO, part))
    with pytest.raises(OSError, match=r"Input/output error\): nothing was released"):
        journal.charge(3, False)
    assert (tmp_path / NAME).read_bytes() == before
    assert journal.ledger.rounds == 2
    journal.charge(3, False)
    journal.close()
    assert reopened(tmp_path).ledger.rounds == 3
    assert reopened(tmp_path).story.torn == 0


def test_an_interrupt_in_the_middle_of_a_write_is_cut_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = charged(tmp_path, 2)
    journal = Journal(tmp_path, NOISY, 1e-4)

    def interrupted(_: int) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        journal.charge(3, False)
    assert (tmp_path / NAME).read_bytes() == before
    journal.charge(3, False)
    assert journal.ledger.rounds == 3
    journal.close()


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


def test_on_a_full_disk_the_reserve_makes_room_for_the_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, NOISY, 1e-4)
    journal.reserve()
    assert (tmp_path / RESERVE).stat().st_size == RESERVE_BYTES
    monkeypatch.setattr(os, "write", failing_once(os.write, journal, errno.ENOSPC, 7))
    journal.charge(1, False)
    assert not (tmp_path / RESERVE).exists()
    journal.close()
    monkeypatch.undo()
    assert reopened(tmp_path).ledger.rounds == 1
    assert reopened(tmp_path).story.torn == 0


def test_without_a_reserve_a_full_disk_is_an_error_and_the_file_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = charged(tmp_path, 1)
    journal = Journal(tmp_path, NOISY, 1e-4)
    monkeypatch.setattr(os, "write", failing_once(os.write, journal, errno.ENOSPC, 7))
    with pytest.raises(OSError, match=r"No space left on device.*nothing was released"):
        journal.charge(2, False)
    journal.close()
    assert (tmp_path / NAME).read_bytes() == before


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


def test_before_a_round_there_must_be_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ppsgd = training(tmp_path)
    real = disk.write

    def full(path: Path, *rest: Any, **more: Any) -> None:
        if path.name == RESERVE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, *rest, **more)

    monkeypatch.setattr(disk, "write", full)
    with pytest.raises(OSError, match=r"no room for the 64 KiB .* nothing was sent") as caught:
        ppsgd.start(grid(), w0(), num_rounds=2)
    assert "\n" not in str(caught.value)
    assert ppsgd.ledger.rounds == 0


def test_a_forked_child_closes_the_journal_and_does_not_unlock_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path, NOISY, 1e-4)
    descriptor = journal._chain._file
    child = os.fork()
    if child == 0:
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(0 if not journal.is_open else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    with pytest.raises(ValueError, match="in use by another training"):
        Journal(tmp_path, NOISY, 1e-4)
    journal.charge(1, False)
    journal.close()


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


def test_a_million_rounds_are_read_in_two_seconds(tmp_path: Path) -> None:
    first_line(tmp_path)
    journal = Journal(tmp_path, NOISY, 1e-4)
    check = journal._chain.reader.end.check
    journal.close()
    lines = []
    for round_ in range(10**6):
        line, check = sealed(b'{"round": %d, "kind": 0, "insecure": false}' % round_, check)
        lines.append(line)
    with (tmp_path / NAME).open("ab") as file:
        file.writelines(lines)
    start = time.process_time()
    found = reopened(tmp_path)
    assert time.process_time() - start < 2
    assert found.ledger.rounds == 10**6
    lines[777_777] = lines[777_777].replace(b"777777", b"777776")
    with (tmp_path / NAME).open("r+b") as file:
        file.seek(0)
        file.readline()
        file.writelines(lines)
        file.truncate()
    with pytest.raises(ValueError, match="damaged at line 777779"):
        reopened(tmp_path)
