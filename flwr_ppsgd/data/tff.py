"""The SQLite files of TensorFlow Federated, and the ``tf.train.Example`` messages in them, without TensorFlow."""

import contextlib
import lzma
import os
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Feature: TypeAlias = list[bytes] | NDArray[np.float32] | NDArray[np.int64]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


def parse_example(message: bytes) -> dict[str, Feature]:
    """The features of a serialized ``tf.train.Example``.

    Example { Features features = 1 }; Features { map<string, Feature> feature = 1 }; an entry { key = 1, value = 2 };
    Feature { BytesList = 1 | FloatList = 2 | Int64List = 3 }; each list { repeated value = 1 }, packed or not.
    """
    features: dict[str, Feature] = {}
    for _, body in _fields(memoryview(message)):
        for _, entry in _fields(_bytes(body)):
            parts = dict(_fields(_bytes(entry)))
            features[bytes(_bytes(parts[1])).decode()] = _feature(_bytes(parts.get(2, memoryview(b""))))
    return features


def _feature(message: memoryview) -> Feature:
    for kind, body in _fields(message):
        values = [value for _, value in _fields(_bytes(body))]
        if kind == 1:
            return [bytes(_bytes(value)) for value in values]
        if kind == 2:
            return np.frombuffer(b"".join(bytes(_bytes(value)) for value in values), dtype="<f4")
        whole = [n for value in values for n in ([value] if isinstance(value, int) else _varints(value))]
        return np.array(whole, dtype=np.uint64).view(np.int64)
    return []


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, value): an int for a varint, else its bytes."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        value: int | memoryview
        if tag & 7 == VARINT:
            value, place = _varint(message, place)
        else:
            length, place = _length(message, tag & 7, place)
            value, place = message[place : place + length], place + length
            if place > len(message):
                raise ValueError("a tf.train.Example ends in the middle of a field")
        yield tag >> 3, value


def _length(message: memoryview, wire_type: int, place: int) -> tuple[int, int]:
    if wire_type == BYTES:
        return _varint(message, place)
    if wire_type in (FIXED64, FIXED32):
        return (8 if wire_type == FIXED64 else 4), place
    raise ValueError(f"a tf.train.Example has no wire type {wire_type}")


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(message) or shift > 63:
            raise ValueError("a tf.train.Example ends in the middle of a number")
        byte = message[place]
        value, place, shift = value | (byte & 127) << shift, place + 1, shift + 7
        if byte < 128:
            return value & (1 << 64) - 1, place


def _varints(packed: memoryview) -> list[int]:
    values, place = [], 0
    while place < len(packed):
        value, place = _varint(packed, place)
        values.append(value)
    return values


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a tf.train.Example has a number where a message was expected")
    return value


class Clients:
    """Examples by split and client: ``with Clients.open(path) as clients: …``."""

    def __init__(self, connection: sqlite3.Connection, source: str) -> None:
        self._connection, self._source = connection, source

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, unpacked_in: Path) -> Iterator["Clients"]:
        """path: .sqlite, or .sqlite.lzma, which is unpacked once into a directory."""
        if path.suffix == ".lzma":
            path = _unpacked(path, unpacked_in)
        _refuse_truncated(path)
        try:
            connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
            with contextlib.closing(connection):
                yield cls(connection, str(path))
        except sqlite3.Error as error:
            raise _broken(path, str(error)) from None

    def ids(self, split: str) -> list[str]:
        """Client ids of a split, sorted."""
        query = "SELECT DISTINCT client_id FROM client_metadata WHERE split_name = ? ORDER BY client_id"
        found = [str(row[0]) for row in self._connection.execute(query, (split,))]
        if not found:
            splits = "SELECT DISTINCT split_name FROM client_metadata ORDER BY split_name"
            names = ", ".join(str(row[0]) for row in self._connection.execute(splits))
            raise ValueError(f"{self._source}: there is no split {split!r} among {names}: is it the right file?")
        return found

    def examples(self, split: str, client: str, most: int | None = None) -> Iterator[dict[str, Feature]]:
        """A client's examples in the file's order, the first ``most`` of them."""
        wanted = "client_id = ? AND split_name = ? ORDER BY rowid LIMIT ?"
        query = f"SELECT serialized_example_proto FROM examples WHERE {wanted}"
        rows = self._connection.execute(query, (client, split, -1 if most is None else most))
        for number, (blob,) in enumerate(rows):
            try:
                yield parse_example(blob)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self._source}: example {number} of client {client!r} in {split!r} is damaged ({error}): "
                    "download the file again"
                ) from None


def _unpacked(path: Path, folder: Path) -> Path:
    target = folder / path.stem
    if target.is_file() and target.stat().st_mtime_ns >= path.stat().st_mtime_ns:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.stem}.", delete=False) as file:
        try:
            with lzma.open(path) as packed:
                shutil.copyfileobj(packed, file, 1 << 20)
            file.flush()
            os.replace(file.name, target)
        except (EOFError, lzma.LZMAError) as error:
            Path(file.name).unlink(missing_ok=True)
            raise _broken(path, str(error)) from None
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    return target


def _refuse_truncated(path: Path) -> None:
    """By the header: 16 bytes of magic, the page size at 16, the number of pages at 28."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file: download it from TensorFlow Federated and put it there")
    with path.open("rb") as file:
        header = file.read(100)
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        raise _broken(path, "it does not begin as one")
    page, pages = struct.unpack(">H", header[16:18])[0], struct.unpack(">I", header[28:32])[0]
    expected = (65536 if page == 1 else page) * pages
    if header[24:28] == header[92:96] and path.stat().st_size < expected:
        raise _broken(path, f"it has {path.stat().st_size:,} of {expected:,} bytes")


def _broken(path: Path, why: str) -> ValueError:
    return ValueError(f"{path}: not a complete SQLite file of TensorFlow Federated ({why}): download it again")
