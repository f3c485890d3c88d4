"""The SQLite files of TensorFlow Federated, and the ``tf.train.Example`` messages in them.

TensorFlow is not needed.
"""

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
Field: TypeAlias = tuple[int, int | memoryview]  # its number; its value, or its bytes

VARINT = 0  # wire types
FIXED64 = 1
BYTES = 2
FIXED32 = 5

BYTES_LIST = 1  # the kinds of a feature
FLOAT_LIST = 2

NAME = 1  # the fields of a map's entry
VALUE = 2

HEADER_SIZE = 100  # of an SQLite file
LARGEST_PAGE = 65536


def parse_example(message: bytes) -> dict[str, Feature]:
    """The features of a serialized ``tf.train.Example``.

    Example { Features features = 1 }; Features { map<string, Feature> feature = 1 }; an entry { key
    = 1, value = 2 }; Feature { BytesList = 1 | FloatList = 2 | Int64List = 3 }; each list {
    repeated value = 1 }, packed or not.
    """
    features: dict[str, Feature] = {}
    for _, body in _fields(memoryview(message)):
        for _, entry in _fields(_as_message(body)):
            parts = dict(_fields(_as_message(entry)))
            name = bytes(_as_message(parts[NAME])).decode()
            value = _as_message(parts.get(VALUE, memoryview(b"")))
            features[name] = _feature(value)
    return features


def _feature(message: memoryview) -> Feature:
    for kind, body in _fields(message):
        values = [value for _, value in _fields(_as_message(body))]
        if kind == BYTES_LIST:
            return [bytes(_as_message(value)) for value in values]
        if kind == FLOAT_LIST:
            parts = [bytes(_as_message(value)) for value in values]
            return np.frombuffer(b"".join(parts), dtype="<f4")
        return _whole_numbers(values)
    return []


def _whole_numbers(values: list[int | memoryview]) -> NDArray[np.int64]:
    whole: list[int] = []
    for value in values:
        if isinstance(value, int):
            whole.append(value)
        else:
            whole += _varints(value)
    return np.array(whole, dtype=np.uint64).view(np.int64)


def _fields(message: memoryview) -> Iterator[Field]:
    """The fields of a message, one after the other."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number = tag >> 3
        wire_type = tag & 7
        if wire_type == VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        length, place = _field_length(message, wire_type, place)
        end = place + length
        if end > len(message):
            raise ValueError("a tf.train.Example ends in the middle of a field")
        yield number, message[place:end]
        place = end


def _field_length(
    message: memoryview,
    wire_type: int,
    place: int,
) -> tuple[int, int]:
    """The number of bytes of a value, and where they begin."""
    if wire_type == BYTES:
        return _varint(message, place)
    if wire_type == FIXED64:
        return 8, place
    if wire_type == FIXED32:
        return 4, place
    raise ValueError(f"a tf.train.Example has no wire type {wire_type}")


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """The number that begins at ``place``, modulo 2⁶⁴, and the place after it."""
    value = 0
    shift = 0
    while True:
        if place >= len(message) or shift > 63:
            raise ValueError("a tf.train.Example ends in the middle of a number")
        byte = message[place]
        value |= (byte & 127) << shift
        place += 1
        shift += 7
        if byte < 128:
            return value & (1 << 64) - 1, place


def _varints(packed: memoryview) -> list[int]:
    values = []
    place = 0
    while place < len(packed):
        value, place = _varint(packed, place)
        values.append(value)
    return values


def _as_message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a tf.train.Example has a number where a message was expected")
    return value


class Clients:
    """Examples by split and client: ``with Clients.open(path, folder) as clients: …``.

    Args:
        connection: to the SQLite file.
        source: its name, for messages.
    """

    def __init__(self, connection: sqlite3.Connection, source: str) -> None:
        self._connection = connection
        self._source = source

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, unpacked_in: Path) -> Iterator["Clients"]:
        """The clients of a file, until the block ends.

        Args:
            path: .sqlite, or .sqlite.lzma.
            unpacked_in: the folder into which an .lzma file is unpacked, once.
        """
        if path.suffix == ".lzma":
            path = _unpack(path, unpacked_in)
        _refuse_truncated(path)
        address = f"{path.resolve().as_uri()}?mode=ro"
        try:
            with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
                yield cls(connection, str(path))
        except sqlite3.Error as error:
            raise _broken_file_error(path, str(error)) from None

    def ids(self, split: str) -> list[str]:
        """The client ids of a split, sorted."""
        query = (
            "SELECT DISTINCT client_id FROM client_metadata WHERE split_name = ? ORDER BY client_id"
        )
        rows = self._connection.execute(query, (split,))
        found = [str(client) for (client,) in rows]
        if not found:
            names = ", ".join(self._splits())
            raise ValueError(
                f"{self._source}: there is no split {split!r} among {names}: is it the right file?"
            )
        return found

    def _splits(self) -> list[str]:
        query = "SELECT DISTINCT split_name FROM client_metadata ORDER BY split_name"
        return [str(split) for (split,) in self._connection.execute(query)]

    def examples(
        self,
        split: str,
        client: str,
        most: int | None = None,
    ) -> Iterator[dict[str, Feature]]:
        """A client's examples in the file's order.

        Args:
            split: the name of the split.
            client: the client's id.
            most: only the first ``most`` of them; None is all.
        """
        wanted = "client_id = ? AND split_name = ? ORDER BY rowid LIMIT ?"
        query = f"SELECT serialized_example_proto FROM examples WHERE {wanted}"
        limit = -1 if most is None else most
        rows = self._connection.execute(query, (client, split, limit))
        for number, (blob,) in enumerate(rows):
            try:
                yield parse_example(blob)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self._source}: example {number} of client {client!r} in {split!r} is "
                    f"damaged ({error}): download the file again"
                ) from None


def _unpack(path: Path, folder: Path) -> Path:
    """The unpacked file, which is made unless it is there and newer than ``path``.

    Several processes may unpack at the same time, for minutes: each writes a file of its own.
    """
    target = folder / path.stem
    if target.is_file() and target.stat().st_mtime_ns >= path.stat().st_mtime_ns:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        dir=folder,
        prefix=f".{path.stem}.",
        delete=False,
    ) as file:
        try:
            with lzma.open(path) as packed:
                shutil.copyfileobj(packed, file, 1 << 20)
            file.flush()
            os.replace(file.name, target)
        except BaseException as error:
            Path(file.name).unlink(missing_ok=True)
            if isinstance(error, EOFError | lzma.LZMAError):
                raise _broken_file_error(path, str(error)) from None
            raise
    return target


def _refuse_truncated(path: Path) -> None:
    """By the header: 16 bytes of magic, the page size at 16, the number of pages at 28."""
    if not path.is_file():
        raise ValueError(
            f"{path}: there is no such file: download it from TensorFlow Federated and put it there"
        )
    with path.open("rb") as file:
        header = file.read(HEADER_SIZE)
    if len(header) < HEADER_SIZE or not header.startswith(b"SQLite format 3\0"):
        raise _broken_file_error(path, "it does not begin as one")
    (page,) = struct.unpack(">H", header[16:18])
    (pages,) = struct.unpack(">I", header[28:32])
    if page == 1:
        page = LARGEST_PAGE
    expected = page * pages
    found = path.stat().st_size
    counted = header[24:28] == header[92:96]  # else the number of pages is not valid
    if counted and found < expected:
        raise _broken_file_error(path, f"it has {found:,} of {expected:,} bytes")


def _broken_file_error(path: Path, why: str) -> ValueError:
    return ValueError(
        f"{path}: not a complete SQLite file of TensorFlow Federated ({why}): download it again"
    )
