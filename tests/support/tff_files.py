"""Small files in the format of TensorFlow Federated, written with Google's own protobuf."""

import functools
import importlib
import lzma
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Values = Sequence[bytes] | Sequence[float] | Sequence[int]
Row = tuple[str, str, bytes]  # split, client, example

# tensorflow/core/example/example.proto and feature.proto, as a descriptor
EXAMPLE = """
name: "tensorflow.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature"
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".tensorflow.BytesList" }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".tensorflow.FloatList" }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".tensorflow.Int64List" } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE
          type_name: ".tensorflow.Features.FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".tensorflow.Feature" } } }
message_type { name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".tensorflow.Features" } }
"""
LISTS = {bytes: "bytes_list", float: "float_list", int: "int64_list"}


@functools.cache
def example_class() -> Any:
    """``tf.train.Example`` from its published definition."""
    descriptor_pb2 = importlib.import_module("google.protobuf.descriptor_pb2")
    text_format = importlib.import_module("google.protobuf.text_format")
    pool = importlib.import_module("google.protobuf.descriptor_pool").DescriptorPool()
    pool.Add(text_format.Parse(EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    found = pool.FindMessageTypeByName("tensorflow.Example")
    return importlib.import_module("google.protobuf.message_factory").GetMessageClass(found)


def example(features: Mapping[str, Values]) -> bytes:
    made = example_class()()
    for name, values in features.items():
        kind = next((type(value) for value in values), bytes)
        getattr(made.features.feature[name], LISTS[kind]).value.extend(values)
    serialized: bytes = made.SerializeToString()
    return serialized


def write(path: Path, rows: Iterable[Row]) -> Path:
    """A file with these rows; packed with LZMA where its name says so."""
    rows = list(rows)
    plain = path.with_suffix("") if path.suffix == ".lzma" else path
    connection = sqlite3.connect(plain)
    connection.execute(
        "CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
    )
    connection.execute(
        "CREATE TABLE client_metadata (split_name TEXT, client_id TEXT, num_examples INTEGER)"
    )
    connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    counts = Counter((split, client) for split, client, _ in rows)
    counted = [(split, client, count) for (split, client), count in counts.items()]
    connection.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", counted)
    connection.commit()
    connection.close()
    if plain != path:
        path.write_bytes(lzma.compress(plain.read_bytes()))
        plain.unlink()
    return path
