"""Numpy arrays in Flower's records: written when they are sent, read without a copy.

What an array *declares* about itself is not trusted, only what its bytes hold.
"""

import functools
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import DTypeLike, NDArray

from flwr_ppsgd.records import entries, filled

NUMPY = "numpy.ndarray"  # Flower's name for its serialisation of numpy arrays
DOUBLE = np.dtype(np.float64)
LONGEST_HEADER = 4096  # bytes; numpy writes 128 for any array of parameters


class Header(NamedTuple):
    """The head of a serialised numpy array; the numbers begin at byte ``end``."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool = False
    end: int = 0


class HeldArray(Array):
    """An array that is serialised when somebody asks for its bytes; from then on it is an Array.

    What stays in this process is never serialised: a node's θ, and replies in a simulation. A copy
    for another process is Flower's own class, too.
    """

    @classmethod
    def of(cls, values: NDArray[Any], shape: tuple[int, ...]) -> "HeldArray":
        """Hold these values, ``fixed``."""
        values = fixed(values)
        held = object.__new__(cls)
        held.__dict__.update(
            dtype=_dtype_name(values.dtype),
            shape=shape,
            stype=NUMPY,
            values=values,
        )
        return held

    @classmethod
    def later(
        cls, make: Callable[[], NDArray[Any]], size: int, dtype: np.dtype[Any], note: Any = None
    ) -> "HeldArray":
        """A vector that is made when somebody reads it.

        Args:
            make: makes it.
            size: its length.
            dtype: of its numbers.
            note: what it says, so that nobody in this process has to read it.
        """
        held = object.__new__(cls)
        name = _dtype_name(dtype)
        held.__dict__.update(dtype=name, shape=(size,), stype=NUMPY, make=make, note=note)
        return held

    @functools.cached_property
    def data(self) -> bytes:  # type: ignore[override]
        """Numpy's header and the numbers."""
        values = _held(self)
        if values is None:  # another thread was faster
            done: bytes = self.__dict__["data"]
            return done
        header = _written_header(values.dtype, self.shape)
        numbers = b"".join([header, values.data])
        # in this order: another thread may be reading
        self.__dict__["data"] = numbers
        self.__class__ = Array  # type: ignore[assignment]
        for name in ("values", "make", "note"):
            self.__dict__.pop(name, None)
        return numbers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and _fields(self) == _fields(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return Array, _fields(self)

    __hash__ = None  # type: ignore[assignment]


def note_on(array: Array) -> Any:
    """What ``HeldArray.later`` noted; None if the array was serialised since, or changed."""
    return array.__dict__.get("note") if _is_held(array) else None


def holds(array: Array, values: NDArray[Any]) -> bool:
    """Whether the array holds these very numbers, in the same memory."""
    return _held(array) is values


def _fields(array: Array) -> tuple[str, tuple[int, ...], str, bytes]:
    return array.dtype, array.shape, array.stype, array.data


def _held(array: Array) -> NDArray[Any] | None:
    """The values of an array that has not been serialised."""
    if not _is_held(array):
        return None
    values: NDArray[Any] | None = array.__dict__.get("values")
    if values is not None:
        return values
    make = array.__dict__.get("make")
    return None if make is None else unchanging(make())


def _is_held(array: Array) -> bool:
    """Whether nobody has asked for the array's bytes, or written others."""
    return type(array) is HeldArray and "data" not in array.__dict__


def encode(
    values: NDArray[Any], shape: tuple[int, ...], dtype: DTypeLike, scale: float = 1.0
) -> Array:
    """A copy of ``values`` in this shape and dtype, multiplied by ``scale`` in double precision."""
    return HeldArray.of(unchanging(_scaled(values, dtype, scale)), shape)


def _scaled(values: NDArray[Any], dtype: DTypeLike, scale: float) -> NDArray[Any]:
    with np.errstate(all="ignore"):  # a number too large for float32 becomes infinity
        if values.dtype == dtype == DOUBLE:
            return values * scale
        if scale == 1.0:
            return np.array(values, dtype, order="C")
        scaled = np.empty(values.shape, dtype)
        np.multiply(values, scale, out=scaled, dtype=np.float64, casting="same_kind")
    return scaled


def unchanging(values: NDArray[Any]) -> NDArray[Any]:
    """The same array, which nobody can change from now on: it needs no copy to be held."""
    values.flags.writeable = False
    return values


def fixed(values: NDArray[Any]) -> NDArray[Any]:
    """The same array, or a copy if somebody could still change it."""
    flags = values.flags
    if flags.writeable or not flags.owndata:
        return unchanging(np.array(values, order="C"))
    return values


def decode(name: str, array: Array, shape: tuple[int, ...]) -> NDArray[np.floating[Any]]:
    """The numbers in ``array`` in one row, by rows of ``shape``: a view of its bytes if it can be.

    ValueError unless they are real floats of this very shape.
    """
    header = header_of(name, array)
    if header.shape != shape or header.dtype.kind != "f":
        found = f"{header.dtype}{header.shape}"
        raise ValueError(f"array {name!r} holds {found} where floats{shape} were expected")
    return numbers(name, array, header)


def decode_vector(array: Array, name: str = "vector") -> NDArray[Any]:
    """A vector in a record that ``vector_record`` made."""
    return numbers(name, array, header_of(name, array))


def numbers(name: str, array: Array, header: Header) -> NDArray[Any]:
    """All numbers by rows; ValueError unless there are as many as the header says."""
    held = _held(array)
    if held is not None:
        return held if held.ndim == 1 else held.reshape(-1)
    if not header.end:  # another thread has asked for its bytes since
        header = header_of(name, array)
    size = len(array.data) - header.end
    if size != math.prod(header.shape) * header.dtype.itemsize:
        raise ValueError(f"array {name!r} holds {size} bytes, not what its header says")
    values = np.frombuffer(array.data, header.dtype, offset=header.end)
    return values.reshape(header.shape, order="F").reshape(-1) if header.fortran else values


def vector_record(vectors: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Flat vectors as a record, for a node's own state."""
    held = {name: HeldArray.of(vector, vector.shape) for name, vector in vectors.items()}
    return filled(ArrayRecord, held)


def record_from(serialised: Mapping[str, bytes]) -> ArrayRecord:
    """Named arrays from their bytes, as Flower would have them."""
    arrays = {}
    for name, data in serialised.items():
        header = header_of(name, Array("", (), NUMPY, data))
        arrays[name] = Array(str(header.dtype), header.shape, NUMPY, data)
    return filled(ArrayRecord, arrays)


def record_of(tensors: Sequence[bytes]) -> ArrayRecord:
    """The legacy API's list of serialised arrays as a record with the keys 0, 1, 2, …"""
    return record_from({str(place): data for place, data in enumerate(tensors)})


def bytes_of(record: ArrayRecord) -> dict[str, bytes]:
    """The serialised arrays by name: ``record_from`` turns them back."""
    return {name: array.data for name, array in entries(record).items()}


def header_of(name: str, array: Array) -> Header:
    """What an array really holds; ValueError if nobody can tell."""
    held = _held(array)
    if held is not None:
        return Header(held.dtype, array.shape)
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
def _parse_header(head: bytes) -> Header:
    stream = io.BytesIO(head)
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
    return Header(dtype, tuple(map(int, shape)), fortran, stream.tell())


@functools.lru_cache(maxsize=256)
def _written_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue()


@functools.lru_cache(maxsize=64)
def _dtype_name(dtype: np.dtype[Any]) -> str:
    """Flower's name for a dtype."""
    return str(dtype)
