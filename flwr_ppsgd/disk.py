"""Files that survive a crash: complete or not there, and damage shows.

One way to write, to sync, to lock and to read back, for θ, sweeps and caches.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

Part: TypeAlias = bytes | memoryview
PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, sync: bool = True) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of ``path`` in one move when the block ends.

    After a failure the old file is as it was.

    Args:
        path: the file to replace, or a new one.
        mode: permissions of the new file, less the umask.
        sync: wait for the disk. False is for what can be had again: it may be lost with the power.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def write(path: Path, parts: Iterable[Part], *, mode: int = 0o666, sync: bool = True) -> None:
    """Replace ``path`` by these bytes, in one move."""
    with replacing(path, mode=mode, sync=sync) as file:
        file.writelines(parts)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by a text, in one move."""
    write(path, [text.encode()])


def sync_directory(directory: Path) -> None:
    """Make the name of a new or renamed file durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private(directory: Path) -> None:
    """Make a directory, and all that are missing above it, for their owner alone (mode 0700).

    The name of each is durable when this returns. Directories that exist stay as they are.
    """
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for each in reversed(missing):
        with suppress(FileExistsError):  # another process was quicker
            each.mkdir(mode=PRIVATE_FOLDER)
        sync_directory(each.parent)


def append(path: Path, data: bytes, *, mode: int = 0o666, sync: bool = True) -> None:
    """Add to the end of a file. When this returns, it is on the disk.

    Args:
        path: the file; it is made if it is missing.
        data: what to add.
        mode: permissions of a new file, less the umask.
        sync: wait for the disk.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        write_all(file.fileno(), data)
        if sync:
            os.fsync(file.fileno())


def write_all(descriptor: int, data: bytes) -> None:
    """``os.write`` until every byte is written."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def whole_lines(content: bytes) -> list[bytes]:
    """The lines that end in a newline; a torn last one is left out."""
    whole, _, _ = content.rpartition(b"\n")
    return whole.splitlines()


def cut_torn_line(path: Path) -> None:
    """Remove what a crash has left of an unfinished last line."""
    with path.open("r+b") as file:
        whole, newline, _ = file.read().rpartition(b"\n")
        file.truncate(len(whole) + len(newline))
        os.fsync(file.fileno())


@contextmanager
def locked(path: Path, *, mode: int = 0o666, wait: bool = True) -> Iterator[None]:
    """Hold the lock file ``path`` for the length of the block.

    Args:
        path: the lock file; it is made if it is missing, and stays.
        mode: its permissions, less the umask.
        wait: False raises BlockingIOError if another process holds the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, mode)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def seal(head: Mapping[str, Any], parts: Iterable[Part]) -> list[Part]:
    """What makes up a sealed file: a checksum of the rest, a line of JSON, then ``parts`` as they
    are."""
    body: list[Part] = [json.dumps(head).encode() + b"\n", *parts]
    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    return [digest.hexdigest().encode() + b"\n", *body]


def unseal(content: bytes) -> tuple[dict[str, Any], memoryview]:
    """The head of a sealed file and the bytes after it; ValueError unless every byte is as
    ``seal`` wrote it."""
    end = content.find(b"\n") + 1
    body = memoryview(content)[end:]
    checksum = content[: max(0, end - 1)]
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        raise ValueError("the checksum does not match")
    start = content.find(b"\n", end) + 1
    head: dict[str, Any] = json.loads(content[end:start])
    return head, memoryview(content)[start:]


def cut(data: memoryview, sizes: Iterable[int]) -> list[memoryview]:
    """``data`` in consecutive parts of these sizes, in bytes."""
    parts = []
    start = 0
    for size in sizes:
        parts.append(data[start : start + size])
        start += size
    return parts
