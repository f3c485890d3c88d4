"""Read the SQLite files of TensorFlow Federated, and the ``tf.train.Example`` messages in them.

TensorFlow is not needed: the protobuf that Flower depends on reads the messages.
"""

import contextlib
import functools
import importlib
import lzma
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

Feature: TypeAlias = list[Any]  # of bytes, floats or whole numbers

# the fields of tf.train.Example that are read; on the wire a map is a list of entries
DEFINITION = """
name: "example.proto" package: "tff" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature"
  field { name: "bytes_list" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".tff.BytesList" }
  field { name: "float_list" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".tff.FloatList" }
  field { name: "int64_list" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".tff.Int64List" }
}
message_type { name: "Entry"
  field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".tff.Feature" }
}
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".tff.Entry" }
}
message_type { name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".tff.Features" }
}
"""  # noqa: E501


@functools.cache
def _example_class() -> Any:
    """The class of ``tf.train.Example``."""
    protobuf = "google.protobuf"
    text_format = importlib.import_module(f"{protobuf}.text_format")
    file_class = importlib.import_module(f"{protobuf}.descriptor_pb2").FileDescriptorProto
    pool = importlib.import_module(f"{protobuf}.descriptor_pool").DescriptorPool()
    pool.Add(text_format.Parse(DEFINITION, file_class()))
    found = pool.FindMessageTypeByName("tff.Example")
    return importlib.import_module(f"{protobuf}.message_factory").GetMessageClass(found)


def parse_example(message: bytes) -> dict[str, Feature]:
    """The features of a serialized ``tf.train.Example``; ValueError if it is damaged."""
    broken = importlib.import_module("google.protobuf.message").DecodeError
    try:
        example = _example_class().FromString(message)
    except broken:
        raise ValueError("not a whole tf.train.Example") from None
    features: dict[str, Feature] = {}
    for entry in example.features.feature:
        features[entry.key] = []
        for _, values in entry.value.ListFields():
            features[entry.key] = list(values.value)
    return features


@contextlib.contextmanager
def open_clients(path: Path, unpacked_in: Path) -> Iterator["TffClients"]:
    """The clients of a file, which is closed when the block ends.

    Args:
        path: .sqlite, or .sqlite.lzma.
        unpacked_in: the folder in which an unpacked .lzma file is kept.
    """
    try:
        if path.suffix == ".lzma":
            path = _unpack(path, unpacked_in)
        address = f"{path.resolve().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            (page,) = connection.execute("PRAGMA page_size").fetchone()
            if path.stat().st_size < pages * page:  # SQLite would fill the last page with zeros
                raise sqlite3.DatabaseError(f"it has fewer than {pages * page:,} bytes")
            yield TffClients(connection, str(path))
    except (sqlite3.Error, lzma.LZMAError, EOFError) as error:
        raise ValueError(
            f"{path}: not a complete SQLite file of TensorFlow Federated ({error}): download "
            "it again"
        ) from None


class TffClients:
    """The examples of a file, by split and client.

    Args:
        connection: to the SQLite file.
        source: its name, for messages.
    """

    def __init__(self, connection: sqlite3.Connection, source: str) -> None:
        self._connection = connection
        self._source = source

    def ids(self, split: str) -> list[str]:
        """The client ids of a split, sorted."""
        query = "SELECT DISTINCT split_name, client_id FROM client_metadata ORDER BY client_id"
        rows = self._connection.execute(query).fetchall()
        clients = [str(client) for name, client in rows if name == split]
        if not clients:
            names = ", ".join(sorted({str(name) for name, _ in rows}))
            raise ValueError(
                f"{self._source}: there is no split {split!r} among {names}: is it the right file?"
            )
        return clients

    def examples(
        self, split: str, client: str, most: int | None = None
    ) -> Iterator[dict[str, Feature]]:
        """A client's examples in the file's order; the first ``most`` of them, or all."""
        wanted = "client_id = ? AND split_name = ? ORDER BY rowid LIMIT ?"
        query = f"SELECT serialized_example_proto FROM examples WHERE {wanted}"
        limit = -1 if most is None else most
        rows = self._connection.execute(query, (client, split, limit))
        for number, (blob,) in enumerate(rows):
            try:
                yield parse_example(blob)
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{self._source}: example {number} of client {client!r} in {split!r} is "
                    f"damaged ({error}): download the file again"
                ) from None


def _unpack(path: Path, folder: Path) -> Path:
    """The unpacked file, which is made unless there is one that is newer than ``path``.

    Several processes may unpack at the same time, for minutes: each writes its own file.
    """
    target = folder / path.stem
    if target.is_file() and target.stat().st_mtime_ns >= path.stat().st_mtime_ns:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        try:
            with lzma.open(path) as packed:
                shutil.copyfileobj(packed, file, 1 << 20)
            file.flush()
            os.replace(file.name, target)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    return target
