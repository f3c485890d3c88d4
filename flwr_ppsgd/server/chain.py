"""Append-only lines on disk: locked, synced, and each sealed by a checksum over all lines so far.

A line is a JSON object, a tab and eight digits: the CRC of this text and of all texts before. A
line that is changed, moved or lost inside the file shows. A last line without its newline is torn:
a crash, or a full disk, has cut it. It stays, and the entry ``torn`` after it says so.
"""

import errno
import json
import logging
import os
import re
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flwr_ppsgd import disk

log = logging.getLogger("flwr.ppsgd")

SHORTEST_POLL = 2.0**-6  # seconds; it doubles until it has passed the longest
LONGEST_POLL = 0.25
RESERVE = "reserve"
RESERVE_BYTES = 64 * 1024
FULL = (errno.ENOSPC, errno.EDQUOT)
BLOCK = 2**18  # bytes that are read at once
SEAL = 9  # a tab and eight digits
CHARGE = b'{"round": '
TORN = b'{"torn"'
MENDED = b"~"  # ends a torn line: without it, its newline alone would look like other damage
# a line: its text, of which a charge's beginning is left out the second time, and its checksum
LINE = re.compile(rb'((?:\{"round": \d+)?([^\t\n]*))\t([0-9a-f]{8})\n')


@dataclass
class Told:
    """What the lines of a file tell.

    Args:
        entries: all but the charges, in order.
        charges: how often each kind of charge was made: a charge is ``{"round": r, …}``, and equal
            ones are counted by the text that follows the round.
        torn: the number of torn lines.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    charges: Counter[bytes] = field(default_factory=Counter)
    torn: int = 0

    def take(self, rests: Sequence[bytes]) -> None:
        """Add texts, those of charges without their beginning."""
        counts = Counter(rests)
        others = {rest for rest in counts if rest.startswith(b"{")}
        for rest in rests if others else ():
            if rest in others:
                self.entries.append(json.loads(rest))
        for rest in others:
            del counts[rest]
        self.charges.update(counts)


class End(NamedTuple):
    """Where the file ends: its length, and the checksum of the last whole line."""

    length: int
    check: int


class DamagedError(ValueError):
    """A line is not as it was written."""

    def __init__(self, path: Path, line: int) -> None:
        super().__init__(
            f"{path} is damaged at line {line}: what was released can no longer be told, so it is "
            "not continued; restore the newest copy from a backup and add the charges that it "
            f"lacks (ppsgd ledger {path.parent} --add N), or start anew in another directory"
        )


class Reader:
    """Reads lines, and knows what a torn end needs to be whole again.

    Args:
        path: the file, for error messages.
    """

    def __init__(self, path: Path) -> None:
        self.told = Told()
        self.end = End(0, 0)
        self.missing = b""  # what has to be written after a torn end
        self._path = path
        self._lines = 0
        self._torn_line: bytes | None = None  # waits for the entry that says it is torn

    def read(self, content: bytes) -> None:
        """Go on with what stands after ``end``. DamagedError if it is not as it was written."""
        length = self.end.length + len(content)
        start = 0
        while start < len(content):
            end = content.rfind(b"\n", start, start + BLOCK) + 1
            end = end or content.find(b"\n", start) + 1
            if not end:
                break
            block = content[start:end]
            if not self._read_fast(block):
                self._read_lines(block)
            start = end
        self._read_tail(content[start:])
        self.end = End(length, self.end.check)

    def _read_fast(self, block: bytes) -> bool:
        """Take whole lines by the quickest way that fits; False if none does."""
        if self._torn_line is not None:
            return False
        return self._read_charges(block) or self._read_block(block)

    def _read_charges(self, block: bytes) -> bool:
        """Take whole lines if they are charges of one kind, a million of them in a second.

        False, and nothing is taken, unless all are right.
        """
        first = block[: block.find(b"\t")]
        rest = first[first.find(b",") :]
        lines = block.count(b"\n")
        alike = block.count(rest + b"\t") == lines
        charges = block.startswith(CHARGE) and block.count(b"\n" + CHARGE) == lines - 1
        if not (alike and charges):
            return False
        pieces = block.split(rest + b"\t")  # each: the seal of a line, then how the next begins
        heads = [pieces[0], *(piece[SEAL:] for piece in pieces[1:-1])]
        seals = [piece[: SEAL - 1] for piece in pieces[1:]]
        check = self.end.check
        checks = []
        for head in heads:
            check = zlib.crc32(rest, zlib.crc32(head, check))
            checks.append(check)
        if len(pieces[-1]) != SEAL or _seals(checks) != b"".join(seals):
            return False
        self.told.charges[rest] += lines
        self._lines += lines
        self.end = End(self.end.length, check)
        return True

    def _read_block(self, block: bytes) -> bool:
        """Take whole lines, all at once; False, and nothing is taken, unless all are right."""
        found = LINE.findall(block)
        if not found:
            return False
        texts, rests, seals = zip(*found, strict=True)
        size = sum(map(len, texts)) + (SEAL + 1) * len(texts)
        if size != len(block):
            return False
        check = self.end.check
        checks = []
        for text in texts:
            check = zlib.crc32(text, check)
            checks.append(check)
        torn = any(rest.startswith(TORN) for rest in set(rests))  # and nothing before it is
        if torn or _seals(checks) != b"".join(seals):
            return False
        self.told.take(rests)
        self._lines += len(texts)
        self.end = End(self.end.length, check)
        return True

    def _read_lines(self, block: bytes) -> None:
        """Take whole lines one by one; one that is bad must be followed by its ``torn``."""
        for line in block.removesuffix(b"\n").split(b"\n"):
            if self._torn_line is not None:
                self._read_torn(line)
            elif not self._read_line(line):
                self._torn_line = line
            self._lines += 1

    def _read_line(self, line: bytes) -> bool:
        """Take one line, without its newline, if its checksum is right."""
        found = LINE.fullmatch(line + b"\n")
        if found is None:
            return False
        text, rest, seal = found.groups()
        check = zlib.crc32(text, self.end.check)
        if seal != b"%08x" % check or rest.startswith(TORN):
            return False
        self.told.take([rest])
        self.end = End(self.end.length, check)
        return True

    def _read_torn(self, line: bytes) -> None:
        """Take the entry that says that the line before is torn."""
        assert self._torn_line is not None
        expected, check = sealed(_torn(self._torn_line), self.end.check)
        if line + b"\n" != expected:
            raise DamagedError(self._path, self._lines)
        self.told.torn += 1
        self.end = End(self.end.length, check)
        self._torn_line = None

    def _read_tail(self, tail: bytes) -> None:
        """Take what follows the last newline, and tell what it lacks."""
        self.missing = b""
        if self._torn_line is not None:
            self._finish_mending(tail)
        elif tail and self._read_line(tail):
            self._lines += 1
            self.missing = b"\n"
        elif tail:
            expected, check = sealed(_torn(tail + MENDED), self.end.check)
            self.missing = MENDED + b"\n" + expected
            self._count_torn(check)

    def _finish_mending(self, tail: bytes) -> None:
        """A crash came while a torn line was mended: go on with that, if it was nothing else."""
        assert self._torn_line is not None
        expected, check = sealed(_torn(self._torn_line), self.end.check)
        if not (self._torn_line.endswith(MENDED) and expected.startswith(tail)):
            raise DamagedError(self._path, self._lines)
        self.missing = expected[len(tail) :]
        self._torn_line = None
        self._count_torn(check)

    def _count_torn(self, check: int) -> None:
        self.told.torn += 1
        self._lines += 1
        self.end = End(self.end.length, check)


class Chain:
    """An open file of lines.

    Args:
        path: the file; it is made, with mode 0600, if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = Reader(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._file = os.open(path, flags, disk.PRIVATE_FILE)
        _OPEN.add(self)

    @property
    def told(self) -> Told:
        """What was read and written so far."""
        return self.reader.told

    @property
    def is_open(self) -> bool:
        return self._file >= 0

    def lock(self, patience: float) -> bool:
        """Take the lock, waiting for up to ``patience`` seconds; False if that was too short."""
        deadline = time.monotonic() + patience
        pause = SHORTEST_POLL
        while not disk.try_lock(self._file):
            if time.monotonic() >= deadline:
                return False
            if pause == LONGEST_POLL:
                log.info("Waiting up to %g s for another process to leave %s", patience, self.path)
            time.sleep(pause)
            pause *= 2 if pause <= LONGEST_POLL else 1
        return True

    @contextmanager
    def locked(self, patience: float) -> Iterator[None]:
        """Hold the lock for the length of the block. OSError if another process keeps it."""
        if not self.lock(patience):
            raise OSError(errno.EAGAIN, f"{self.path} is in use by another process: try again")
        try:
            yield
        finally:
            if self.is_open:
                disk.unlock(self._file)

    def refresh(self) -> None:
        """Read what was added since the last time. Needs the lock."""
        if self.reader.missing:  # another process may have mended it since
            self.reader = Reader(self.path)
        size = os.fstat(self._file).st_size
        start = self.reader.end.length
        if size < start:
            raise ValueError(
                f"{self.path} is shorter than it was: somebody has cut it, so it is not continued"
            )
        self.reader.read(_read_all(self._file, start, size))

    def append(self, entry: dict[str, Any]) -> None:
        """Add a line. When this returns, it is on the disk; after an error nothing was added."""
        self.mend()
        text = json.dumps(entry, allow_nan=False).encode()
        line, check = sealed(text, self.reader.end.check)
        self._write(line, check)
        found = LINE.fullmatch(line)
        assert found is not None
        self.told.take([found.group(2)])

    def mend(self) -> None:
        """Write what a torn end lacks to be whole."""
        if self.reader.missing:
            self._write(self.reader.missing, self.reader.end.check)
            self.reader.missing = b""

    def clear(self) -> None:
        """Forget a file that holds nothing but a torn first line."""
        os.ftruncate(self._file, 0)
        os.fsync(self._file)
        self.reader = Reader(self.path)

    def close(self) -> None:
        """Give up the lock and the file; harmless if that was done before."""
        file = self._file
        self._file = -1
        if file >= 0:
            os.close(file)

    def reserve(self) -> None:
        """Make sure that there is room for a round's lines: a file that can be given up."""
        path = self.path.with_name(RESERVE)
        if path.exists() and path.stat().st_size == RESERVE_BYTES:
            return
        try:
            disk.write(path, [os.urandom(RESERVE_BYTES)], mode=disk.PRIVATE_FILE)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{path.parent} has no room for the {RESERVE_BYTES // 1024} KiB that a round may "
                f"need ({error.strerror}): nothing was sent; free some space and start again",
            ) from None

    def _write(self, data: bytes, check: int) -> None:
        """Write and sync; on a full disk once more, in the room of the reserve."""
        if not self.is_open:
            raise OSError(errno.EBADF, f"{self.path} is closed: nothing was released")
        try:
            self._put(data, check)
        except OSError as error:
            if error.errno not in FULL or not self._give_up_reserve():
                raise self._failed(error) from error
            try:
                self._put(data, check)
            except OSError as again:
                raise self._failed(again) from again

    def _put(self, data: bytes, check: int) -> None:
        """Write and sync, or leave the file as it was."""
        length = self.reader.end.length + len(data)
        try:
            disk.write_all(self._file, data)
            if os.fstat(self._file).st_size != length:
                raise OSError(errno.EIO, "the disk took only part of a line")
            os.fsync(self._file)
            self.reader.end = End(length, check)
        except BaseException:
            self._cut_back()
            raise

    def _cut_back(self) -> None:
        """Remove what a failed write has left. If that fails too, nothing more may be written."""
        try:
            os.ftruncate(self._file, self.reader.end.length)
            os.fsync(self._file)
        except OSError as error:
            log.error("%s cannot be cut back after a failed write (%s)", self.path, error)
            self.close()

    def _give_up_reserve(self) -> bool:
        path = self.path.with_name(RESERVE)
        if not self.is_open or not path.exists():
            return False
        path.unlink()
        return True

    def _failed(self, error: OSError) -> OSError:
        return OSError(
            error.errno,
            f"{self.path} could not be written ({error.strerror}): nothing was released; mend the "
            "disk, then start again, and the training goes on from there",
        )


def read_only(path: Path) -> Reader:
    """What a file tells, without a lock and without mending anything."""
    reader = Reader(path)
    reader.read(path.read_bytes())
    return reader


def load_charge(rest: bytes) -> dict[str, Any]:
    """What is known of a charge from the text that follows its round, as in ``Told.charges``."""
    charge: dict[str, Any] = json.loads(b'{"round": 0' + rest)
    return charge


def sealed(text: bytes, check: int) -> tuple[bytes, int]:
    """A line with its checksum, and that checksum.

    Args:
        text: the JSON.
        check: the checksum of the line before.
    """
    now = zlib.crc32(text, check)
    return b"%s\t%08x\n" % (text, now), now


def _seals(checks: list[int]) -> bytes:
    """Checksums as they are written, one after the other."""
    return np.array(checks, dtype=">u4").tobytes().hex().encode()


def _torn(line: bytes) -> bytes:
    return b'{"torn": %d}' % zlib.crc32(line)


def _read_all(file: int, start: int, end: int) -> bytes:
    parts = []
    while start < end:
        part = os.pread(file, end - start, start)
        if not part:
            break
        parts.append(part)
        start += len(part)
    return b"".join(parts)


_OPEN: "weakref.WeakSet[Chain]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child gives its copies up, without unlocking what its parent holds."""
    for chain in list(_OPEN):
        chain.close()


os.register_at_fork(after_in_child=_close_in_child)
