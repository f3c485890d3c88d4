"""Numpy arrays in Flower's records, read without a copy.

What an array *declares* about itself is not trusted, only what its bytes hold. Flower's own
conversions copy an array two or three times, which is slow for a large w.
"""

import functools
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import DTypeLike, NDArray

NUMPY = "numpy.ndarray"  # Flower's name for its serialisation of numpy arrays
DOUBLE = np.dtype(np.float64)
LONGEST_HEADER = 4096  # bytes; numpy writes 128 for any array of parameters


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
