"""Numpy arrays in Flower's records, read without a copy.

What an array *declares* about itself is not trusted, only what its bytes hold.
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


def encode(
    values: NDArray[Any], shape: tuple[int, ...], dtype: DTypeLike, scale: float = 1.0
) -> Array:
    """``values`` in this shape and dtype, multiplied by ``scale`` in double precision."""
    scaled = _scale_to(values, dtype, scale)
    header = _written_header(scaled.dtype, shape)
    data = b"".join([header, scaled.data])
    return Array(str(scaled.dtype), shape, NUMPY, data)


def _scale_to(values: NDArray[Any], dtype: DTypeLike, scale: float) -> NDArray[Any]:
    with np.errstate(all="ignore"):  # a number too large for float32 becomes infinity
        if scale == 1.0:
            return np.ascontiguousarray(values, dtype)
        scaled = np.empty(values.shape, dtype)
        np.multiply(values, scale, out=scaled, dtype=np.float64, casting="same_kind")
    return scaled


def decode(name: str, array: Array, shape: tuple[int, ...]) -> NDArray[np.floating[Any]]:
    """The numbers in ``array`` in one row, by rows of ``shape``: a view of its bytes if it can be.

    ValueError unless they are real floats of this shape.
    """
    header = header_of(name, array)
    if header.shape != shape or header.dtype.kind != "f":
        found = f"{header.dtype}{header.shape}"
        raise ValueError(f"array {name!r} holds {found} where floats{shape} were expected")
    return numbers(name, array, header)


def decode_vector(array: Array, name: str = "vector") -> NDArray[Any]:
    """A vector in a record that ``vector_record`` made."""
    return numbers(name, array, header_of(name, array))


def numbers(name: str, array: Array, header: ArrayHeader) -> NDArray[Any]:
    """All numbers by rows; ValueError unless there are as many as the header says."""
    size = len(array.data) - header.end
    if size != math.prod(header.shape) * header.dtype.itemsize:
        raise ValueError(f"array {name!r} holds {size} bytes, not what its header says")
    values = np.frombuffer(array.data, header.dtype, offset=header.end)
    return values.reshape(header.shape, order="F").reshape(-1) if header.fortran else values


def vector_record(vectors: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Flat vectors as a record, for a node's own state."""
    arrays = {name: encode(each, each.shape, each.dtype) for name, each in vectors.items()}
    return ArrayRecord(arrays)


def record_from(serialised: Mapping[str, bytes]) -> ArrayRecord:
    """Named arrays from their bytes, as Flower would have them."""
    arrays = {}
    for name, data in serialised.items():
        header = header_of(name, Array("", (), NUMPY, data))
        arrays[name] = Array(str(header.dtype), header.shape, NUMPY, data)
    return ArrayRecord(arrays)


def record_of(tensors: Sequence[bytes]) -> ArrayRecord:
    """The legacy API's list of serialised arrays as a record with the keys 0, 1, 2, …"""
    return record_from({str(place): data for place, data in enumerate(tensors)})


def bytes_of(record: ArrayRecord) -> dict[str, bytes]:
    """The serialised arrays by name: ``record_from`` turns them back."""
    return {name: array.data for name, array in record.items()}


def header_of(name: str, array: Array) -> ArrayHeader:
    """What an array really holds; ValueError if its header cannot be read."""
    if array.stype != NUMPY:
        raise ValueError(
            f"array {name!r} is serialised as {array.stype!r} where {NUMPY!r} was expected"
        )
    length = _header_length(array.data)
    if length > LONGEST_HEADER:
        raise ValueError(f"array {name!r} has no readable header")
    try:
        return _parse_header(array.data[:length])
    except Exception as error:  # numpy's parser raises many kinds on hostile bytes
        raise ValueError(f"array {name!r} has no readable header: {error}") from None


def _header_length(data: bytes) -> int:
    """Magic and version take 8 bytes, then comes the header's own length in 2 bytes (version 1) or
    4, then the header."""
    first = data[:12]
    if first[6:7] == b"\x01":
        return 10 + int.from_bytes(first[8:10], "little")
    return 12 + int.from_bytes(first[8:], "little")


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
