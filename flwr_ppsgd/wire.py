"""Everything that travels: the names of the records, the Order, and w as named arrays.

Layer names and shapes exist only here; everywhere else a model is one flat vector. What an array
*declares* about itself is not trusted, only what its bytes hold.
"""

import fnmatch
import functools
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Reduction, Vector

ARRAYS = "arrays"  # w, under the name that Flower's stock strategies use
CONFIG = "config"
METRICS = "metrics"
ORDER = "ppsgd-order"
GRADIENT = "gradient"
NUM_EXAMPLES = "num-examples"
PROTOCOL = 1  # of the Order
LONGEST_HEADER = 4096  # bytes; numpy writes 128 for any array of parameters
NUMPY = "numpy.ndarray"  # Flower's name for its serialisation of numpy arrays
STATISTICS = ("*running_mean", "*running_var", "*num_batches_tracked")  # BatchNorm's buffers

Hold: TypeAlias = Callable[[str, np.dtype[Any]], bool]


@dataclass(frozen=True)
class Order:
    """What the server asks of a client in one round.

    Args:
        round: counted from 1 over the whole training, restarts included.
        step: s_θ.
        clip_norm: C.
        reduction: whether gradients over a minibatch are averaged (Algorithm 3) or summed
            (Algorithm 2).
        publishes: whether a gradient is wanted; at α = 0 none is sent.
        average: whether the average iterate of θ is kept, and used in evaluation.
        metrics: names of training measures to send along, which are released with the gradient's
            noise.
        training: a number that the training keeps over restarts of the server.
        starts: the first round of every start of the server in this training, this start last;
            empty if the server keeps nothing on disk and so cannot go back.
        promise: the guarantee in one line, for whoever runs the client.
        protocol: the version of this record.
        visit: the number of rounds that this user has taken part in, this one included. Counted by
            the client, never sent.
    """

    round: int
    step: float
    clip_norm: float
    reduction: Reduction
    publishes: bool
    average: bool = False
    metrics: tuple[str, ...] = ()
    training: int = 0
    starts: tuple[int, ...] = ()
    promise: str = ""
    protocol: int = PROTOCOL
    visit: int = 0

    def to_flat(self) -> dict[str, Any]:
        """The Order as one flat record; lists are texts with commas."""
        flat = asdict(self)
        del flat["visit"]
        flat["metrics"] = ",".join(self.metrics)
        flat["starts"] = ",".join(map(str, self.starts))
        return flat

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any]) -> Self:
        """The Order that ``to_flat`` gave; ValueError if it is of another protocol."""
        protocol = flat.get("protocol")
        if protocol != PROTOCOL:
            raise ValueError(
                f"an Order of protocol {protocol!r}, this client speaks {PROTOCOL}: install the "
                "same flwr-ppsgd on the server and on the clients"
            )
        values = {name: flat[name] for name in _SENT}
        values["metrics"] = tuple(filter(None, flat["metrics"].split(",")))
        values["starts"] = tuple(map(int, filter(None, flat["starts"].split(","))))
        return cls(**values)


_SENT = tuple(each.name for each in fields(Order) if each.name != "visit")


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
        headers = tuple((name, _header(name, array)) for name, array in record.items())
        return _layout(headers, hold)

    @functools.cached_property
    def size(self) -> int:
        """The number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    @functools.cached_property
    def _parts(self) -> list[slice]:
        """Where each array is in the vector."""
        sizes = (math.prod(shape) for shape in self.shapes)
        ends = itertools.accumulate(sizes, initial=0)
        return list(itertools.starmap(slice, itertools.pairwise(ends)))

    def flatten(self, record: ArrayRecord) -> Vector:
        """The arrays as one float64 vector; ValueError unless names, shapes and dtypes fit."""
        if set(record) - self.held != set(self.names):
            raise ValueError(f"keys {sorted(record)} where {sorted(self.names)} were expected")
        pairs = zip(self.names, self.shapes, strict=True)
        parts = [_decode(name, record[name], shape) for name, shape in pairs]
        with np.errstate(all="ignore"):
            flat = [part.reshape(-1).astype(np.float64, copy=False) for part in parts]
        return flat[0] if len(flat) == 1 else np.concatenate(flat)

    def unflatten(self, vector: Vector, like: ArrayRecord | None = None) -> ArrayRecord:
        """The vector as named arrays in w's shapes and dtypes.

        Args:
            vector: w.
            like: holds the arrays that travel along, and the order of all of them.
        """
        if vector.shape != (self.size,):
            raise ValueError(f"a vector of shape {vector.shape} where w has {self.size} parameters")
        forms = zip(self.names, self._parts, self.shapes, self.dtypes, strict=True)
        arrays = ArrayRecord()
        with np.errstate(all="ignore"):  # a number too large for float32 becomes infinity
            for name, part, shape, dtype in forms:
                arrays[name] = _encode(vector[part], shape, dtype)
        if like is None or not self.held:
            return arrays
        record = ArrayRecord()
        for name in like:
            record[name] = arrays[name] if name in arrays else like[name]
        return record


@functools.lru_cache(maxsize=64)
def _layout(headers: "tuple[tuple[str, _Header], ...]", hold: Hold | None) -> Layout:
    held = frozenset(
        name for name, header in headers if hold is not None and hold(name, header.dtype)
    )
    moving = {name: header for name, header in headers if name not in held}
    for name, header in moving.items():
        if header.dtype.kind != "f":
            raise ValueError(
                f"array {name!r} of the shared parameters has dtype {header.dtype}: only real "
                "floats can take noise; keep counters and other buffers out of the record, or "
                "personal"
            )
    if not moving:
        raise ValueError(
            "the shared parameters are an empty ArrayRecord: pass the initial w as initial_arrays"
        )
    shapes = tuple(header.shape for header in moving.values())
    dtypes = tuple(header.dtype for header in moving.values())
    return Layout(tuple(moving), shapes, dtypes, held)


def is_buffer(name: str, dtype: np.dtype[Any]) -> bool:
    """Whether an array of a state_dict is a counter or a running statistic, not a parameter."""
    if dtype.kind != "f":
        return True
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in STATISTICS)


def record_from(serialised: Mapping[str, bytes]) -> ArrayRecord:
    """Named arrays from their bytes, as Flower would have them."""
    record = ArrayRecord()
    for name, data in serialised.items():
        header = _header(name, Array("", (), NUMPY, data))
        record[name] = Array(str(header.dtype), header.shape, NUMPY, data)
    return record


def bytes_of(record: ArrayRecord) -> dict[str, bytes]:
    """The serialised arrays by name: ``record_from`` turns them back."""
    return {name: array.data for name, array in record.items()}


def record_of(tensors: Sequence[bytes]) -> ArrayRecord:
    """The legacy API's list of serialised arrays as a record with the keys 0, 1, 2, …"""
    return record_from({str(place): data for place, data in enumerate(tensors)})


@dataclass(frozen=True)
class _Header:
    """The head of a serialised numpy array; the numbers begin at byte ``end``."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    end: int


@functools.lru_cache(maxsize=256)
def _parse_header(head: bytes) -> _Header:
    stream = io.BytesIO(head)
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
    return _Header(dtype, shape, fortran, stream.tell())


def _header_length(data: bytes) -> int:
    """Magic and version take 8 bytes, then comes the header's own length in 2 bytes (version 1) or
    4, then the header."""
    first = data[:12]
    if first[6:7] == b"\x01":
        return 10 + int.from_bytes(first[8:10], "little")
    return 12 + int.from_bytes(first[8:], "little")


def _header(name: str, array: Array) -> _Header:
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


def _decode(name: str, array: Array, shape: tuple[int, ...]) -> NDArray[np.floating[Any]]:
    """The numbers in ``array``, a view of its bytes.

    ValueError unless they are real floats of this very shape.
    """
    header = _header(name, array)
    if header.shape != shape or header.dtype.kind != "f":
        found = f"{header.dtype}{header.shape}"
        raise ValueError(f"array {name!r} holds {found} where floats{shape} were expected")
    size = len(array.data) - header.end
    if size != math.prod(shape) * header.dtype.itemsize:
        raise ValueError(f"array {name!r} holds {size} bytes, not what its header says")
    values = np.frombuffer(array.data, header.dtype, offset=header.end)
    return values.reshape(shape, order="F" if header.fortran else "C")


@functools.lru_cache(maxsize=256)
def _describe(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[str, bytes]:
    """Flower's name for the dtype and numpy's header."""
    stream = io.BytesIO()
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return str(dtype), stream.getvalue()


def _encode(values: NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    name, header = _describe(dtype, shape)
    numbers = np.ascontiguousarray(values, dtype)
    return Array(name, shape, NUMPY, b"".join([header, numbers.data]))


def vector_record(vectors: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Flat vectors as a record, for a node's own state."""
    record = ArrayRecord()
    for name, vector in vectors.items():
        record[name] = _encode(vector, vector.shape, vector.dtype)
    return record


def decode_vector(array: Array) -> NDArray[Any]:
    """A vector in a record that ``vector_record`` made."""
    header = _header("vector", array)
    return np.frombuffer(array.data, header.dtype, offset=header.end)
