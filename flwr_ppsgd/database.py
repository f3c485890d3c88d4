"""A private SQLite file, and arrays as files beside it: complete or not there, and damage shows.

The server's store and the device's store are built on this. SQLite keeps a rollback journal, so the
main file alone holds everything that was committed, and a crash undoes what was not. It has no
checksums of its own: rows that matter carry a ``seal`` over all rows before them, and files carry a
SHA-256 that is kept in such a row.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

log = logging.getLogger("flwr.ppsgd")

PATIENCE = 60.0  # seconds to wait for another process
PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700
WRITABLE_BY_OTHERS = 0o022
LONGEST_POLL = 0.25  # seconds
PRAGMAS = {  # what is set, and what SQLite then shows
    "journal_mode": ("TRUNCATE", "truncate"),
    "synchronous": ("EXTRA", 3),
    "fullfsync": ("ON", 1),  # macOS needs it to reach the disk; elsewhere it does nothing
}
UNWRITTEN = "nothing of this step was kept; free some space or repair the disk, then start again"
DAMAGED = "restore the newest backup, or use another directory"
REMEDIES = {
    sqlite3.SQLITE_BUSY: "another process is using it; wait for it to end",
    sqlite3.SQLITE_FULL: UNWRITTEN,
    sqlite3.SQLITE_IOERR: UNWRITTEN,
    sqlite3.SQLITE_READONLY: UNWRITTEN,
    sqlite3.SQLITE_CANTOPEN: UNWRITTEN,
}


class StoreError(ValueError):
    """A store is damaged, in use or cannot be written; the message says what to do."""


def seal(before: bytes, owner: int | str, row: Sequence[Any]) -> bytes:
    """SHA-256 over the seal of the row before, whose store it is, and the row.

    Args:
        before: the seal of the row before; empty for the first.
        owner: the id of the training, or of whatever else the store is about.
        row: texts and numbers.
    """
    return hashlib.sha256(before + json.dumps([owner, *row]).encode()).digest()


class Database:
    """A SQLite file for its owner alone, with mode 0600 in a directory of mode 0700.

    What is committed has reached the disk. After an error nothing of the transaction is kept, or it
    is not known; then the connection is closed, and the next use reads what the disk has.

    Args:
        path: the file, which is made if it is missing; None is in memory.
        schema: SQL that makes the tables of a new file.
        read_only: write nothing, not even to undo what a crash has left. Needs no lock of its own
            and may be used while another process writes.
    """

    def __init__(self, path: Path | None, schema: str = "", *, read_only: bool = False) -> None:
        self.path = path
        self._schema = schema
        self._read_only = read_only
        self._process = os.getpid()
        self._connection: sqlite3.Connection | None = None
        with _IN_PROCESS, self._one_line():
            self._own_connection()

    def close(self) -> None:
        """Closing twice does nothing; the next use opens it again."""
        connection = self._connection
        self._connection = None
        if connection is not None and self._process == os.getpid():
            connection.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of the block or nothing; it is on the disk when the block has ended.

        One at a time in a process, and none while the process forks.
        """
        with _IN_PROCESS, self._one_line():
            connection = self._own_connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                if connection.in_transaction:  # not if the disk was full: then it is undone
                    connection.execute("ROLLBACK")
                raise
            try:
                connection.execute("COMMIT")
            except BaseException:
                self.close()
                raise

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """All rows of a query, as tuples."""
        with _IN_PROCESS, self._one_line():
            return self._own_connection().execute(query, values).fetchall()

    def backup(self, target: Path) -> None:
        """Copy everything that is committed to a new file, while others may go on writing."""
        _make_private_file(target, new=True)
        with _IN_PROCESS, self._one_line():
            copy = sqlite3.connect(target)
            try:
                self._own_connection().backup(copy)
            finally:
                copy.close()
        sync(target)
        sync(target.parent)

    def _own_connection(self) -> sqlite3.Connection:
        """The connection, for the process that opened it."""
        if self._process != os.getpid():
            raise StoreError(f"{self.path} was opened before a fork: the child must open its own")
        if self._connection is None:
            self._connection = self._reader() if self._read_only else self._writer()
        return self._connection

    def _writer(self) -> sqlite3.Connection:
        if self.path is None:
            connection = self._connect(":memory:")
        else:
            _make_private_file(self.path)
            connection = self._connect(f"{self.path.absolute().as_uri()}?mode=rw")
            for name, (value, expected) in PRAGMAS.items():
                connection.execute(f"PRAGMA {name}={value}")
                (found,) = connection.execute(f"PRAGMA {name}").fetchone()
                if found != expected:
                    raise StoreError(f"{self.path}: SQLite has {name}={found}, expected {expected}")
            self._check_pages(connection)
        connection.executescript(self._schema)
        return connection

    def _reader(self) -> sqlite3.Connection:
        assert self.path is not None
        connection = self._connect(f"{self.path.absolute().as_uri()}?mode=ro")
        try:
            self._check_pages(connection)
        except sqlite3.OperationalError:  # a writer has died in a transaction: undo it in a copy
            with tempfile.TemporaryDirectory() as directory:
                copy = Path(directory) / self.path.name
                shutil.copyfile(self.path, copy)
                with suppress(FileNotFoundError):
                    shutil.copyfile(f"{self.path}-journal", f"{copy}-journal")
                connection = self._connect(copy.as_uri())
                self._check_pages(connection)
        return connection

    def _connect(self, uri: str) -> sqlite3.Connection:
        return sqlite3.connect(
            uri,
            uri=True,
            timeout=PATIENCE,
            isolation_level=None,  # transactions are begun by hand
            check_same_thread=False,  # _IN_PROCESS lets in one thread at a time
        )

    def _check_pages(self, connection: sqlite3.Connection) -> None:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise StoreError(f"{self.path} is damaged ({' '.join(found.split())}): {DAMAGED}")

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        """SQLite's errors as StoreErrors."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter in damaged text
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without its details
            reason = " ".join(str(error).split())  # it may quote SQL of several lines
            remedy = REMEDIES.get(code, DAMAGED)
            raise StoreError(f"{self.path} cannot be used ({reason}): {remedy}") from error


class FileLock:
    """A lock on a file of its own that nothing else opens, held until ``close``.

    The operating system gives it back when the process ends, however it ends. A forked child gives
    up its copy.

    Args:
        path: the lock file; it is made if it is missing, and stays.
        patience: seconds to wait while another process has it.
        busy: the error if that was too short.
    """

    def __init__(self, path: Path, patience: float, busy: str) -> None:
        self._path = path
        self._file = _open_lock(path)
        try:
            deadline = time.monotonic() + patience
            pause = LONGEST_POLL / 16
            while not self._take(self._file):
                if time.monotonic() >= deadline:
                    raise StoreError(busy)
                if pause == LONGEST_POLL:
                    log.info("Waiting up to %g s for another process to leave %s", patience, path)
                time.sleep(pause)
                pause = min(2 * pause, 2 * LONGEST_POLL)
            with closing(os.fdopen(_open_lock(path))) as second:
                if self._take(second.fileno()):  # some network disks grant every lock
                    raise self._unlockable("a second lock was granted")
        except BaseException:
            self.close()
            raise
        _HELD.add(self)

    def close(self) -> None:
        """Give it up; closing twice does nothing."""
        file = self._file
        self._file = -1
        if file >= 0:
            os.close(file)

    def _take(self, file: int) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._unlockable(error.strerror) from None
        return True

    def _unlockable(self, reason: str | None) -> StoreError:
        return StoreError(
            f"{self._path.parent} is on a disk where file locks do not hold ({reason}), so two "
            "processes could write there at once: use a directory on a local disk"
        )


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE_FILE)


def private_directory(directory: Path) -> None:
    """Make a directory, and all that are missing above it, with mode 0700; their names are synced.

    One that exists stays as it is, with a warning if others may write there.
    """
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    for each in reversed(missing):
        with suppress(FileExistsError):  # another process was quicker
            each.mkdir(mode=PRIVATE_DIRECTORY)
        sync(each.parent)
    mode = directory.stat().st_mode & 0o777
    if mode & WRITABLE_BY_OTHERS:
        log.warning("Others can write in %s (mode %o): run chmod 700 on it", directory, mode)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def allocate(path: Path, size: int) -> None:
    """Take room on the disk: a file of ``size`` bytes, for ``write_file``."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    descriptor = os.open(path, flags, PRIVATE_FILE)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, max(1, size))
        else:
            block = bytes(2**20)
            for start in range(0, size, len(block)):
                os.pwrite(descriptor, block[: size - start], start)
        os.ftruncate(descriptor, size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def write_file(path: Path, parts: Iterable[bytes | memoryview], room: Path | None = None) -> str:
    """Replace a file in one move, and return its SHA-256. After an error the old one is as it was.

    Args:
        path: the file.
        parts: its content.
        room: a file that ``allocate`` made, whose room is used up, if it is there.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_NOFOLLOW
    if room is not None and room.exists():
        room.rename(partial)
    else:
        flags |= os.O_CREAT | os.O_EXCL
    digest = hashlib.sha256()
    try:
        with os.fdopen(os.open(partial, flags, PRIVATE_FILE), "wb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)
    return digest.hexdigest()


def read_verified(path: Path, sha256: str) -> bytes:
    """The content of a file; StoreError unless it is what ``write_file`` wrote."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror})") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise StoreError(f"{path} is damaged: its SHA-256 is not the one that was written down")
    return content


def _make_private_file(path: Path, *, new: bool = False) -> None:
    """Make an empty file with our mode, which SQLite would not give it; a link is refused."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        os.close(os.open(path, flags, PRIVATE_FILE))
    except FileExistsError:
        if new:
            raise StoreError(f"{path} exists: name a file that does not") from None
        if path.is_symlink():
            raise StoreError(f"{path} is a link: put the file itself there") from None
        return
    sync(path.parent)


_IN_PROCESS = threading.RLock()  # held by the user of a connection, and by a process that forks
_HELD: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for lock in list(_HELD):  # the parent's copy keeps the lock
        lock.close()
    _IN_PROCESS.release()


os.register_at_fork(
    before=_IN_PROCESS.acquire,
    after_in_parent=_IN_PROCESS.release,
    after_in_child=_after_fork_in_child,
)
