"""The base of both stores: what is committed stays, what is not leaves no trace, damage shows."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from flwr_ppsgd.database import (
    Database,
    FileLock,
    StoreError,
    allocate,
    private_directory,
    read_verified,
    write_file,
)

SCHEMA = "CREATE TABLE IF NOT EXISTS number (value INTEGER)"
NUMBERS = "SELECT value FROM number ORDER BY value"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "numbers.sqlite"


def insert(store: Database, *values: int) -> None:
    with store.transaction() as connection:
        connection.executemany("INSERT INTO number VALUES (?)", [(value,) for value in values])


def numbers(path: Path) -> list[int]:
    return [value for (value,) in Database(path, read_only=True).rows(NUMBERS)]


def test_what_is_committed_is_in_the_main_file_and_what_failed_is_not(path: Path) -> None:
    store = Database(path, SCHEMA)
    insert(store, 1, 2)
    with pytest.raises(OverflowError):
        insert(store, 3, 2**70)
    insert(store, 4)
    copy = path.with_name("copy.sqlite")
    copy.write_bytes(path.read_bytes())
    assert numbers(path) == numbers(copy) == [1, 2, 4]


def test_files_are_for_their_owner_alone(path: Path) -> None:
    path = path.parent / "a" / "b" / path.name
    private_directory(path.parent)
    store = Database(path, SCHEMA)
    write_file(path.with_name("array"), [b"1"])
    store.backup(path.with_name("backup.sqlite"))
    allocate(path.with_name("reserve"), 10)
    for file in path.parent.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600, file
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700


def test_every_connection_waits_for_the_disk(path: Path) -> None:
    store = Database(path, SCHEMA)
    wanted = {"journal_mode": "truncate", "synchronous": 3, "fullfsync": 1}
    for _ in range(2):
        assert {name: store.rows(f"PRAGMA {name}")[0][0] for name in wanted} == wanted
        store.close()


DIES_IN_A_TRANSACTION = """
import os, sys
from pathlib import Path
from flwr_ppsgd.database import Database
store = Database(Path(sys.argv[1]))
with store.transaction() as connection:
    connection.execute("PRAGMA cache_size=1")
    connection.executemany("INSERT INTO number VALUES (?)", [(10**9 + n,) for n in range(100_000)])
    os.kill(os.getpid(), 9)
"""


def test_a_reader_undoes_what_a_dead_writer_left_and_writes_nothing(path: Path) -> None:
    store = Database(path, SCHEMA)
    insert(store, 1)
    store.close()
    dead = subprocess.run([sys.executable, "-c", DIES_IN_A_TRANSACTION, path], check=False)
    assert dead.returncode == -signal.SIGKILL
    journal = path.with_name(path.name + "-journal")
    left = path.read_bytes(), journal.read_bytes()
    assert left[1].strip(b"\0")
    assert numbers(path) == [1]
    assert (path.read_bytes(), journal.read_bytes()) == left
    assert Database(path, SCHEMA).rows(NUMBERS) == [(1,)]


def test_a_reader_sees_what_is_committed_while_another_writes(path: Path) -> None:
    store = Database(path, SCHEMA)
    insert(store, 1)
    with store.transaction() as connection:
        connection.execute("INSERT INTO number VALUES (2)")
        code = f"from tests.test_database import *; print(numbers(Path({str(path)!r})))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert done.stdout == b"[1]\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"a" * 5000, "file is not a database"), (None, "database disk image is malformed")],
)
def test_a_damaged_file_is_one_line(path: Path, content: bytes | None, reason: str) -> None:
    store = Database(path, SCHEMA)
    insert(store, *range(1000))
    store.close()
    path.write_bytes(content or path.read_bytes()[:5000])
    for read_only in (True, False):
        with pytest.raises(StoreError, match=f"numbers.sqlite.*{reason}.*restore") as raised:
            Database(path, SCHEMA, read_only=read_only)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_that_is_gone_is_not_written(path: Path, how: str) -> None:
    """The open descriptor would take rows that nobody finds again."""
    store = Database(path, SCHEMA)
    insert(store, 1)
    copy = path.read_bytes()
    path.unlink()
    if how == "replaced":
        path.write_bytes(copy)
    with pytest.raises(StoreError, match="readonly database"):
        insert(store, 2)


def test_a_failed_commit_keeps_nothing_and_the_next_one_works(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flwr_ppsgd.database.PATIENCE", 0.0)
    store = Database(path, SCHEMA)
    insert(store, 1)
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute(NUMBERS).fetchall()  # a lock that keeps others from committing
    with pytest.raises(StoreError, match=r"locked.*another process"):
        insert(store, 2)
    reader.close()
    insert(store, 3)
    assert numbers(path) == [1, 3]


def test_the_lock_falls_with_its_holder_and_not_with_a_forked_child(tmp_path: Path) -> None:
    first = FileLock(tmp_path / "lock", 0.0, "in use")
    read, write = os.pipe()
    child = os.fork()
    if not child:  # pragma: no cover - measured in the parent only
        os.close(write)
        os.read(read, 1)  # until the parent lets go
        os._exit(0)
    os.close(read)
    first.close()
    FileLock(tmp_path / "lock", 60.0, "in use").close()
    os.close(write)
    os.waitpid(child, 0)


def test_a_backup_is_whole_and_never_replaces_a_file(path: Path) -> None:
    store = Database(path, SCHEMA)
    insert(store, 1)
    copy = path.with_name("copy.sqlite")
    Database(path, read_only=True).backup(copy)
    insert(store, 2)
    assert numbers(copy) == [1]
    with pytest.raises(StoreError, match="exists"):
        store.backup(copy)


# --- files


def test_a_file_is_replaced_in_one_move_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "w"
    first = write_file(path, [b"ab", memoryview(b"c")])
    assert read_verified(path, first) == b"abc"
    second = write_file(path, [b"d"])
    with pytest.raises(StoreError, match="w is damaged: its SHA-256"):
        read_verified(path, first)
    assert read_verified(path, second) == b"d"
    path.unlink()
    with pytest.raises(StoreError, match="w cannot be read"):
        read_verified(path, second)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "w"
    sha256 = write_file(path, [b"old"])
    with pytest.raises(TypeError):
        write_file(path, [b"new", 3])  # type: ignore[list-item]
    assert read_verified(path, sha256) == b"old"
    assert os.listdir(tmp_path) == ["w"]


def test_a_partial_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "w.partial").symlink_to(victim)
    write_file(tmp_path / "w", [b"abc"])
    assert victim.read_bytes() == b"mine"
    (tmp_path / "reserve").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        allocate(tmp_path / "reserve", 100)
    with pytest.raises(OSError, match="symbolic links"):
        write_file(tmp_path / "w", [b"def"], room=tmp_path / "reserve")
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("size", [0, 5, 100_000])
def test_reserved_room_becomes_the_file(tmp_path: Path, size: int) -> None:
    room = tmp_path / "reserve"
    allocate(room, size)
    number = room.stat().st_ino
    assert room.stat().st_size == size
    assert room.stat().st_blocks * 512 >= size
    write_file(tmp_path / "w", [b"abc"], room)
    assert (tmp_path / "w").read_bytes() == b"abc"
    assert (tmp_path / "w").stat().st_ino == number
    assert not room.exists()


def test_room_that_is_not_there_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space|too large"):
        allocate(tmp_path / "reserve", 2**60)
    assert not list(tmp_path.iterdir())


def test_room_without_fallocate_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "posix_fallocate")
    allocate(tmp_path / "reserve", 2**20 + 5)
    assert (tmp_path / "reserve").read_bytes() == bytes(2**20 + 5)
