"""Crash-safe writes for results and sweeps: a file is complete or absent."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from flwr_ppsgd import database


@contextmanager
def open_replacement(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write, which replaces ``path`` in one move when the block ends.

    After a failure the old file is unchanged.

    Args:
        path: the file to replace, or a new one.
        mode: permissions of the new file, less the umask.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    database.sync(path.parent)


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace ``path`` by a text, in one move; ``mode`` as in ``open_replacement``."""
    with open_replacement(path, mode=mode) as file:
        file.write(text.encode())


def append(path: Path, data: bytes) -> None:
    """Add to the end of a file, which is created if it is missing, and sync it."""
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def cut_torn_line(path: Path) -> None:
    """Remove an unfinished last line that a crash has left."""
    with path.open("r+b") as file:
        whole, newline, _ = file.read().rpartition(b"\n")
        file.truncate(len(whole) + len(newline))
        os.fsync(file.fileno())
