"""The memory of a training: whatever happens to its files, it shows every charge or is refused."""

import errno
import os
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd import FixedSize, Ledger, Poisson, Release, database
from flwr_ppsgd.database import StoreError
from flwr_ppsgd.server.sealed import NO_RECORD, RECORD_NOT_WRITTEN, ChargeRecord, home
from flwr_ppsgd.server.store import NAME, Checkpoint, Store

DELTA = 1e-5
NOISY = Release(Poisson(100, 0.1), clip_norm=1.0, noise_multiplier=2.0)
QUIET = Release(Poisson(100, 1.0), clip_norm=1.0, noise_multiplier=9.0)
W = {"0": b"first array", "1": b""}


@pytest.fixture(autouse=True)
def _own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPSGD_STATE_HOME", str(tmp_path / "records"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "server"


def opened(place: Path) -> Store:
    store = Store(place)
    store.settle(delta=DELTA, release=NOISY)
    return store


def saved_round(store: Store) -> int:
    """The round of the newest w that is whole."""
    found = store.load()
    assert found is not None
    return found.round


def train(place: Path, rounds: int, first: int = 1) -> None:
    """Charges and w of some rounds."""
    store = opened(place)
    for round_ in range(first, first + rounds):
        store.reserve(100)
        store.charge(round_, NOISY)
        store.save(Checkpoint(round_, W, {"variance": np.full(2, float(round_))}))
    store.close()


def test_a_training_goes_on_from_what_was_written(place: Path) -> None:
    train(place, 3)
    store = opened(place)
    store.note("plan", {"charges": 9})
    store.charge(4, QUIET, insecure=True)
    store.close()
    again = Store.read(place)
    assert again.owner == store.owner
    assert again.charge_count == 4
    assert again.charges() == {(NOISY, False): 3, (QUIET, True): 1}
    ledger = Ledger(DELTA).record(NOISY, 3).record(QUIET, insecure=True)
    assert again.ledger(DELTA) == ledger
    assert again.notes("charge")[-1] == [4, 1, True, store.owner]
    assert again.notes("plan") == [{"charges": 9}]
    assert again.setting("delta") == DELTA
    found = again.load()
    assert isinstance(found, Checkpoint)
    assert (found.round, found.arrays) == (3, W)
    assert found.state["variance"].tolist() == [3.0, 3.0]


def test_without_a_directory_the_same_happens_in_memory(tmp_path: Path) -> None:
    store = Store(None)
    store.settle(delta=DELTA, release=NOISY)
    store.reserve(10)
    store.charge(1, NOISY)
    store.note("start", 1)
    store.record_fact({"round": 1})
    store.save(Checkpoint(1, W))
    assert store.charges() == {(NOISY, False): 1}
    assert store.notes("start") == [1]
    assert [fact for _, fact in store.facts()] == [{"round": 1}]
    assert store.load() is None
    assert store.keep("key", lambda: b"secret") == b"secret"
    assert not list(tmp_path.iterdir())


def test_a_store_in_memory_outlives_errors_and_close() -> None:
    store = Store(None)

    def fail() -> None:
        with store.transaction() as add:
            add("start", 2)
            raise KeyError

    store.charge(1, NOISY)
    with pytest.raises(KeyError):
        fail()
    store.close()
    store.open()
    assert store.notes("start") == []
    store.charge(2, NOISY)
    assert store.charge_count == 2


def test_threads_charge_one_after_the_other(place: Path) -> None:
    store = opened(place)
    threads = [threading.Thread(target=store.charge, args=(n, NOISY)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Store.read(place).charge_count == 20


# --- what is lost, and shows


def sql(place: Path, *statements: str) -> None:
    with sqlite3.connect(place / NAME) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


LAST = "(SELECT MAX(id) FROM entry)"
SWAPS = ((6, 99), (8, 6), (99, 8))
SWAPPED = [f"UPDATE entry SET id = {new} WHERE id = {old}" for old, new in SWAPS]
ROWS_LOST = r"has \d+ rows but the record outside shows \d+: rows were lost.* --add 1"
CHARGES_LOST = "shows 4 charges but the record outside shows 5: charges were lost.* --add 1"
CHANGED = "UPDATE entry SET value = '[1, 1, false, 1]' WHERE id = 6"
LOSSES: dict[str, tuple[list[str], str]] = {
    "no rows": (["DELETE FROM entry"], "knows of 5 charges"),
    "no tables": (["DROP TABLE entry"], "knows of 5 charges"),
    "last row": ([f"DELETE FROM entry WHERE id = {LAST}"], ROWS_LOST),
    "last two rows": ([f"DELETE FROM entry WHERE id > {LAST} - 2"], CHARGES_LOST),
    "a row in the middle": (["DELETE FROM entry WHERE id = 6"], "row 6"),
    "a changed row": ([CHANGED], "damaged at row 6"),
    "two rows exchanged": (SWAPPED, "damaged at row 6"),
    "another kind": (["INSERT INTO entry VALUES (99, 'x', '1', x'00')"], "damaged at row"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_was_lost_is_refused_in_one_line(place: Path, loss: str) -> None:
    train(place, 5)
    damage, reason = LOSSES[loss]
    sql(place, *damage)
    for _ in range(2):
        with pytest.raises((StoreError, OSError), match=reason) as refused:
            Store(place)
        assert "\n" not in str(refused.value)


def test_two_copies_that_both_went_on_are_noticed(place: Path) -> None:
    train(place, 2)
    copy = place.with_name("copy")
    shutil.copytree(place, copy)
    train(copy, 3, first=3)
    with pytest.raises(StoreError, match="charges were lost"):
        Store(place)
    shutil.rmtree(home())
    train(place, 1, first=3)
    with pytest.raises(StoreError, match=r"another copy went on.* --add 3"):
        Store(copy)


def test_a_later_w_shows_what_was_lost_even_without_a_record(place: Path) -> None:
    train(place, 2)
    before = (place / NAME).read_bytes()
    train(place, 2, first=3)
    (place / NAME).write_bytes(before)
    shutil.rmtree(home())
    with pytest.raises(StoreError, match=r"shows 2 charges but w-\S+ has had 4: .* --add 2"):
        Store(place)


def test_a_store_that_goes_back_while_it_is_open_is_noticed(place: Path) -> None:
    train(place, 2)
    store = Store(place)
    sql(place, "DELETE FROM entry WHERE id > 4")
    with pytest.raises(StoreError, match="damaged at row"):
        store.charge(3, NOISY)
    assert not store.is_open


def test_a_process_remembers_its_charges_while_the_store_is_closed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPSGD_STATE_HOME", "/proc/nowhere")
    store = opened(place)
    store.charge(1, NOISY)
    before = (place / NAME).read_bytes()
    store.charge(2, NOISY)
    store.close()
    (place / NAME).write_bytes(before)
    with pytest.raises(StoreError, match="but this process has made 2: charges were lost"):
        store.open()


def test_a_training_may_move_and_another_begin_in_its_place(place: Path) -> None:
    train(place, 2)
    moved = place.with_name("moved")
    place.rename(moved)
    with pytest.raises(StoreError, match="remove that record if the training was deleted"):
        Store(place)
    train(moved, 1, first=3)
    train(place, 1)
    assert Store.read(moved).charge_count == 3


@pytest.mark.parametrize("content", [None, b"", b"{}\n", b"\xff\xfe", "flipped"])
def test_a_record_that_cannot_be_read_is_a_caveat(place: Path, content: bytes | str | None) -> None:
    train(place, 2)
    (record,) = home().iterdir()
    whole = record.read_bytes()
    record.unlink()
    if content == "flipped":
        record.write_bytes(whole.replace(b'"charges": 2', b'"charges": 1'))
    elif isinstance(content, bytes):
        record.write_bytes(content)
    for _ in range(2):
        store = Store(place)
        assert store.caveats == {NO_RECORD: "user"}
        store.close()
    assert Store.read(place).notes("caveat") == [[NO_RECORD, "user"]]


def test_a_record_that_cannot_be_written_is_a_caveat(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PPSGD_STATE_HOME", "/proc/nowhere")
    store = opened(place)
    for round_ in (1, 2):
        store.charge(round_, NOISY)
    assert store.caveats == {RECORD_NOT_WRITTEN: "user"}
    assert caplog.text.count("The record of charges cannot be written") == 1


def test_a_training_without_charges_leaves_no_record(place: Path) -> None:
    opened(place).close()
    assert not home().exists()
    (place / NAME).unlink()
    opened(place).close()


def test_a_charge_added_by_hand_counts_as_the_most_expensive_release(place: Path) -> None:
    """Which of two that is cannot always be said: then as both."""
    store = opened(place)
    store.note("added", [2, "known from elsewhere"])
    assert store.charges() == {(NOISY, False): 2}
    store.charge(1, QUIET)
    assert store.charges() == {(NOISY, False): 2, (QUIET, False): 3}
    dear = Release(FixedSize(100, 50), clip_norm=1.0, noise_multiplier=0.5)
    store.charge(2, dear)
    assert store.charges()[NOISY, False] == 0
    assert store.charges()[dear, False] == 3


# --- w


def test_two_checkpoints_are_kept_and_a_damaged_one_falls_back(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(place, 4)
    before, newest = sorted(place.glob("w-*"))
    newest.write_bytes(newest.read_bytes()[:-1] + b"!")
    store = Store(place)
    assert saved_round(store) == 3
    assert store.charge_count == 4, "charges never fall back"
    assert f"{newest} is damaged" in caplog.text
    newest.unlink()
    assert saved_round(store) == 3
    before.unlink()
    with pytest.raises(StoreError, match="no checkpoint of w"):
        store.load()


def test_an_array_without_its_row_is_forgotten(place: Path) -> None:
    """As after a crash between the two."""
    train(place, 2)
    orphan = place / "w-00000003-00000002.arrays"
    orphan.write_bytes(b"anything")
    (place / "w-00000003-00000002.arrays.partial").write_bytes(b"any")
    assert len(list(place.glob("w-*"))) == 4
    store = Store(place)
    assert saved_round(store) == 2
    assert len(list(place.glob("w-*"))) == 2


def test_a_w_that_is_older_than_the_rows_is_kept(place: Path) -> None:
    """As in a backup of a training that went on meanwhile."""
    train(place, 2)
    kept = {path.name: path.read_bytes() for path in place.glob("w-*")}
    train(place, 3, first=3)
    for path in place.glob("w-*"):
        path.unlink()
    for name, content in kept.items():
        (place / name).write_bytes(content)
    assert saved_round(Store(place)) == 2


def test_a_file_that_is_kept_is_made_once_and_a_flipped_bit_shows(place: Path) -> None:
    store = opened(place)
    assert store.keep("key", lambda: b"first") == b"first"
    assert store.keep("key", lambda: b"second") == b"first"
    assert (place / "key").stat().st_mode & 0o777 == 0o600
    (place / "key").write_bytes(b"girst")
    with pytest.raises(StoreError, match="key is damaged"):
        store.keep("key", lambda: b"third")
    (place / "key").unlink()
    assert store.keep("key", lambda: b"fourth") == b"fourth"


def test_a_backup_can_be_read_restored_and_goes_on(place: Path) -> None:
    train(place, 3)
    running = Store(place)
    running.keep("training.key", lambda: b"k" * 32)
    target = place.with_name("backup") / NAME
    Store.read(place).backup(target)
    running.close()
    copy = Store(target.parent)
    assert copy.charge_count == 3
    assert saved_round(copy) == 3
    assert copy.keep("training.key", lambda: b"") == b"k" * 32
    for path in target.parent.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


# --- facts


def test_facts_are_never_a_reason_to_stop(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(place)
    store.record_fact({"round": 1, "used": 2})
    sql(place, "INSERT INTO fact (time, value) VALUES (1, 'no JSON')", "DROP TABLE IF EXISTS x")
    assert [fact for _, fact in store.facts()] == [{"round": 1, "used": 2}]
    sql(place, "DROP TABLE fact")
    for _ in range(2):
        store.record_fact({"problem": "x"})
    assert caplog.text.count("cannot be written") == 1
    store.charge(1, NOISY)
    store.close()
    store.record_fact({"problem": "closed"})


# --- the disk fails


class FailingDisk:
    """Makes the n-th file operation of this process fail, as on a full disk."""

    NAMES = ("open", "fsync", "posix_fallocate", "rename", "replace", "truncate", "ftruncate")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.count = 0
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self._counting(getattr(os, name), number))

    def _counting(self, whole: Callable[..., Any], number: int) -> Callable[..., Any]:
        def operation(*args: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return whole(*args, **named)

        return operation


def one_round(store: Store, round_: int, published: list[int]) -> None:
    """As the curator does it; what was published must be charged."""
    store.reserve(1000)
    store.charge(round_, NOISY)
    published.append(round_)
    store.save(Checkpoint(round_, W))


def test_wherever_the_disk_fails_nothing_is_published_that_is_not_charged(tmp_path: Path) -> None:
    """Each file operation fails once; afterwards the training goes on, and lacks nothing."""
    failures = 0
    for number in range(1, 200):
        place = tmp_path / str(number)
        published: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            disk = FailingDisk(patch, number)
            try:
                with closing(opened(place)) as store:
                    one_round(store, 1, published)
                    one_round(store, 2, published)
            except (OSError, StoreError) as error:
                failures += 1
                check_one_line(error)
        if disk.count < number:
            break
        again = opened(place)
        assert len(published) <= again.charge_count <= len(published) + 1
        one_round(again, 3, [])
        again.close()
    assert failures > 20


def check_one_line(error: Exception) -> None:
    assert "\n" not in str(error)
    assert str(error)


def test_a_w_that_could_not_be_saved_is_saved_before_another_round_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(place)
    store.reserve(1000)
    store.charge(1, NOISY)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: exec("raise OSError(28, 'No space left')"))
        with pytest.raises(OSError, match="w of round 1 could not be saved"):
            store.save(Checkpoint(1, W))
        with pytest.raises(OSError, match="w of round 1 could not be saved"):
            store.reserve(1000)
    store.reserve(1000)
    assert saved_round(store) == 1


# --- kills


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(stage: str, place: Path) -> None:
    """Run round 2 up to a stage."""
    store = opened(place)
    store.reserve(1000)
    if stage == "reserved":
        die()
    if stage == "committed":
        ChargeRecord.write = die  # type: ignore[assignment,method-assign]
    store.charge(2, NOISY)
    if stage == "charged":
        die()
    if stage == "array written":
        database.sync = die  # type: ignore[assignment]  # the last that is done with a file
    store.save(Checkpoint(2, W))
    die()


KILLS = [("reserved", 1, 1), ("committed", 2, 1), ("charged", 2, 1), ("array written", 2, 1)]


@pytest.mark.parametrize(("stage", "charged", "round_"), [*KILLS, ("saved", 2, 2)])
def test_killed_between_charge_publication_and_save_no_charge_is_lost(
    place: Path, stage: str, charged: int, round_: int
) -> None:
    train(place, 1)
    child = os.fork()  # a new process would import everything anew
    if not child:  # pragma: no cover - measured in the parent only
        die_at(stage, place)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    store = Store(place)
    assert store.charge_count == charged
    assert saved_round(store) == round_
    one_round(store, round_ + 1, [])
    assert store.charge_count == charged + 1
