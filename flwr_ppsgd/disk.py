"""Files that survive a crash: complete or not there, and damage shows."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def seal(head: Mapping[str, Any], parts: Iterable[bytes | memoryview]) -> list[bytes | memoryview]:
    """What makes up a file: a checksum of the rest, a line of JSON, then ``parts`` as they are."""
    body: list[bytes | memoryview] = [json.dumps(head).encode() + b"\n", *parts]
    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    return [digest.hexdigest().encode() + b"\n", *body]


def unseal(content: bytes) -> tuple[dict[str, Any], memoryview]:
    """The head and the bytes after it; ValueError unless every byte is as ``seal`` wrote it."""
    end = content.find(b"\n") + 1
    body = memoryview(content)[end:]
    if hashlib.sha256(body).hexdigest().encode() != content[: max(0, end - 1)]:
        raise ValueError("the checksum does not match")
    start = content.find(b"\n", end) + 1
    head: dict[str, Any] = json.loads(content[end:start])
    return head, memoryview(content)[start:]


def write(path: Path, parts: Iterable[bytes | memoryview], *, mode: int = 0o666, sync: bool = True) -> None:
    """Atomic: beside the old file, synced, renamed into place. After a failure the old file is as it was.

    ``sync=False`` leaves out the wait for the disk: what can be had again may be lost with the power.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make a new or renamed file's name durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
