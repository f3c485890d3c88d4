"""Small files in the format of TensorFlow Federated, written with Google's own protobuf."""

import functools
import importlib
import lzma
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Values = Sequence[bytes] | Sequence[float] | Sequence[int]
Row = tuple[str, str, bytes]  # split, client, example

LISTS = (
    ("bytes_list", "BytesList", 12),
    ("float_list", "FloatList", 2),
    ("int64_list", "Int64List", 3),
)
MESSAGE, STRING, OPTIONAL, REPEATED = 11, 9, 1, 3


@functools.cache
def example_class(packed: bool) -> Any:
    """``tf.train.Example`` from its published definition; numbers packed, or one by one as old
    writers have them."""
    descriptor_pb2 = importlib.import_module("google.protobuf.descriptor_pb2")
    file = descriptor_pb2.FileDescriptorProto(
        name=f"example{packed}.proto", package=f"t{packed}", syntax="proto3"
    )

    def message(
        name: str, *fields: tuple[str, int, int, str | None, int], nested: Any = None
    ) -> None:
        made = (file.message_type if nested is None else nested).add(name=name)
        for field, number, kind, of, label in fields:
            added = made.field.add(name=field, number=number, type=kind, label=label)
            if of:
                added.type_name = f".t{packed}.{of}"
            if label == REPEATED and kind in (2, 3):
                added.options.packed = packed

    for _, name, kind in LISTS:
        message(name, ("value", 1, kind, None, REPEATED))
    message(
        "Feature",
        *((field, i + 1, MESSAGE, name, OPTIONAL) for i, (field, name, _) in enumerate(LISTS)),
    )
    message("Features", ("feature", 1, MESSAGE, "Features.FeatureEntry", REPEATED))
    entry = (("key", 1, STRING, None, OPTIONAL), ("value", 2, MESSAGE, "Feature", OPTIONAL))
    message("FeatureEntry", *entry, nested=file.message_type[-1].nested_type)
    file.message_type[-1].nested_type[0].options.map_entry = True
    message("Example", ("features", 1, MESSAGE, "Features", OPTIONAL))
    pool = importlib.import_module("google.protobuf.descriptor_pool").DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName(f"t{packed}.Example")
    return importlib.import_module("google.protobuf.message_factory").GetMessageClass(found)


def example(features: Mapping[str, Values], packed: bool = True) -> bytes:
    made = example_class(packed)()
    for name, values in features.items():
        kind = next((type(value) for value in values), bytes)
        field = {bytes: "bytes_list", float: "float_list", int: "int64_list"}[kind]
        getattr(made.features.feature[name], field).value.extend(values)
    serialized: bytes = made.SerializeToString()
    return serialized


def write(path: Path, rows: Iterable[Row]) -> Path:
    """A file with these rows; packed with LZMA where its name says so."""
    rows, plain = list(rows), path.with_suffix("") if path.suffix == ".lzma" else path
    connection = sqlite3.connect(plain)
    connection.execute(
        "CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
    )
    connection.execute(
        "CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)"
    )
    connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    counts = {(client, split): 0 for split, client, _ in rows}
    for split, client, _ in rows:
        counts[client, split] += 1
    connection.executemany(
        "INSERT INTO client_metadata VALUES (?, ?, ?)", [(*key, n) for key, n in counts.items()]
    )
    connection.commit()
    connection.close()
    if plain != path:
        path.write_bytes(lzma.compress(plain.read_bytes()))
        plain.unlink()
    return path
