"""Numpy arrays in Flower's records, read without a copy, and w as named arrays.

What an array *declares* about itself is not trusted, only what its bytes hold. Flower's own
conversions copy an array two or three times, which is slow for a large w.

Layer names and shapes exist only here; everywhere else a model is one flat vector.
"""

import fnmatch
import functools
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import DTypeLike, NDArray

from flwr_ppsgd.algorithm import Vector

NUMPY = "numpy.ndarray"  # Flower's name for its serialisation of numpy arrays
DOUBLE = np.dtype(np.float64)
SINGLE = np.dtype(np.float32)
LONGEST_HEADER = 4096  # bytes; numpy writes 128 for any array of parameters
STATISTICS = ("*running_mean", "*running_var", "*num_batches_tracked")  # BatchNorm's buffers

Hold: TypeAlias = Callable[[str, np.dtype[Any]], bool]


# --- one array


class ArrayHeader(NamedTuple):
    """The head of a serialised numpy array; the numbers begin at byte ``end``."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    end: int


def encode(values: NDArray[Any], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """``values`` in this shape and dtype."""
    with np.errstate(all="ignore"):  # a number too large for float32 becomes infinity
        numbers = np.ascontiguousarray(values, dtype)
    header = _written_header(numbers.dtype, shape)
    data = b"".join([header, numbers.data])
    return Array(str(numbers.dtype), shape, NUMPY, data)


def decode(array: Array, name: str = "vector") -> NDArray[Any]:
    """The numbers in ``array`` in one row, in the order of its rows: a view if they lie so.

    ValueError unless there are as many as its header says.
    """
    header = header_of(array, name)
    size = len(array.data) - header.end
    if size != math.prod(header.shape) * header.dtype.itemsize:
        raise ValueError(f"array {name!r} holds {size} bytes, not what its header says")
    values = np.frombuffer(array.data, header.dtype, offset=header.end)
    if header.fortran:
        return values.reshape(header.shape, order="F").reshape(-1)
    return values


def header_of(array: Array, name: str) -> ArrayHeader:
    """What an array really holds; ValueError if its header cannot be read."""
    if array.stype != NUMPY:
        raise ValueError(
            f"array {name!r} is serialised as {array.stype!r} where {NUMPY!r} was expected"
        )
    # magic and version take 8 bytes, then comes the length of the header, in 2 bytes in version 1
    first = array.data[:12]
    end = 10 if first[6:7] == b"\x01" else 12
    length = end + int.from_bytes(first[8:end], "little")
    if length > LONGEST_HEADER:
        raise ValueError(f"array {name!r} has no readable header")
    try:
        return _parse_header(array.data[:length])
    except Exception as error:  # numpy's parser raises many kinds on hostile bytes
        raise ValueError(f"array {name!r} has no readable header: {error}") from None


@functools.lru_cache(maxsize=256)
def _parse_header(head: bytes) -> ArrayHeader:
    stream = io.BytesIO(head)
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
    return ArrayHeader(dtype, tuple(map(int, shape)), fortran, stream.tell())


@functools.lru_cache(maxsize=256)
def _written_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue()


# --- records of arrays


def vector_record(vectors: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Named vectors, or other arrays, as a record."""
    arrays = {name: encode(each, each.shape, each.dtype) for name, each in vectors.items()}
    return ArrayRecord(arrays)


def record_from(serialised: Mapping[str, bytes]) -> ArrayRecord:
    """Named arrays from their bytes, as Flower would have them."""
    arrays = {}
    for name, data in serialised.items():
        header = header_of(Array("", (), NUMPY, data), name)
        arrays[name] = Array(str(header.dtype), header.shape, NUMPY, data)
    return ArrayRecord(arrays)


def record_of(tensors: Sequence[bytes]) -> ArrayRecord:
    """The legacy API's list of serialised arrays as a record with the keys 0, 1, 2, …"""
    return record_from({str(place): data for place, data in enumerate(tensors)})


def bytes_of(record: ArrayRecord) -> dict[str, bytes]:
    """The serialised arrays by name: ``record_from`` turns them back."""
    return {name: array.data for name, array in record.items()}


# --- w


@dataclass(frozen=True)
class Layout:
    """Names, shapes and dtypes of the arrays that make up w, in order.

    Args:
        names, shapes, dtypes: of the arrays that make up w.
        held: names of arrays that travel along and never change.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]
    held: frozenset[str] = frozenset()

    @classmethod
    def of(cls, record: ArrayRecord, hold: Hold | None = None) -> "Layout":
        """The layout of ``record``; ``hold(name, dtype)`` says which arrays are not part of w."""
        headers = [(name, header_of(array, name)) for name, array in record.items()]
        return _layout(tuple(headers), hold)

    @functools.cached_property
    def shape_of(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the arrays, by name."""
        return dict(zip(self.names, self.shapes, strict=True))

    def difference(self, other: "Layout") -> str:
        """Where two layouts differ, in words; empty if names and shapes are the same."""
        if self.names != other.names:
            return f"the arrays {list(self.names)} and {list(other.names)}"
        for name, shape in self.shape_of.items():
            if shape != other.shape_of[name]:
                return f"{name!r} of shape {shape} and {other.shape_of[name]}"
        return ""

    @functools.cached_property
    def columns(self) -> int:
        """The rows of a lone matrix, one for each column of users' rows; else ``size``."""
        first = self.shapes[0]
        if len(self.shapes) == 1 and first:
            return first[0]
        return self.size

    @functools.cached_property
    def size(self) -> int:
        """The number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    def flatten(self, record: ArrayRecord, *, as_sent: bool = False) -> Vector:
        """The arrays as one vector; ValueError unless names, shapes and dtypes fit.

        Args:
            record: the arrays.
            as_sent: leave float32 as it is, if all of them are; else the vector is float64.
        """
        if record.keys() - self.held != self.shape_of.keys():
            raise ValueError(f"keys {sorted(record)} where {sorted(self.names)} were expected")
        parts = []
        for name, shape in self.shape_of.items():
            header = header_of(record[name], name)
            if header.shape != shape or header.dtype.kind != "f":
                found = f"{header.dtype}{header.shape}"
                raise ValueError(f"array {name!r} holds {found} where floats{shape} were expected")
            parts.append(decode(record[name], name))
        single = as_sent and all(part.dtype == SINGLE for part in parts)
        dtype = SINGLE if single else DOUBLE
        if len(parts) == 1 and parts[0].dtype == dtype:
            return cast(Vector, parts[0])  # a view of the bytes
        vector = cast(Vector, np.empty(self.size, dtype))
        with np.errstate(all="ignore"):
            np.concatenate(parts, out=vector, casting="unsafe")
        return vector

    def unflatten(self, vector: Vector, like: ArrayRecord | None = None) -> ArrayRecord:
        """The vector as named arrays in w's shapes and dtypes.

        Args:
            vector: w.
            like: holds the arrays that travel along, and the order of all of them.
        """
        if vector.shape != (self.size,):
            raise ValueError(f"a vector of shape {vector.shape} where w has {self.size} parameters")
        arrays = {}
        start = 0
        for name, shape, dtype in zip(self.names, self.shapes, self.dtypes, strict=True):
            end = start + math.prod(shape)
            arrays[name] = encode(vector[start:end], shape, dtype)
            start = end
        if like is not None and self.held:
            arrays = {name: arrays.get(name, held) for name, held in like.items()}
        return ArrayRecord(arrays)


@functools.lru_cache(maxsize=64)
def _layout(headers: tuple[tuple[str, ArrayHeader], ...], hold: Hold | None) -> Layout:
    held = set()
    moving = {}
    for name, header in headers:
        if hold is not None and hold(name, header.dtype):
            held.add(name)
            continue
        if header.dtype.kind != "f":
            raise ValueError(
                f"array {name!r} of the shared parameters has dtype {header.dtype}: only real "
                "floats can take noise; keep counters and other buffers out of the record, or "
                "personal"
            )
        moving[name] = header
    if not moving:
        raise ValueError(
            "the shared parameters are an empty ArrayRecord: pass the initial w as initial_arrays"
        )
    shapes = tuple(header.shape for header in moving.values())
    dtypes = tuple(header.dtype for header in moving.values())
    return Layout(tuple(moving), shapes, dtypes, frozenset(held))


def is_buffer(name: str, dtype: np.dtype[Any]) -> bool:
    """Whether an array of a state_dict is a counter or a running statistic, not a parameter."""
    if dtype.kind != "f":
        return True
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in STATISTICS)
