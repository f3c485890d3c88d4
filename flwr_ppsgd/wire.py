"""Everything that travels: the names of the records, the Order, and w as named arrays.

Layer names and shapes exist only here; everywhere else a model is one flat vector.
"""

import fnmatch
import functools
import hashlib
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args, get_origin, get_type_hints

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Reduction, Vector
from flwr_ppsgd.arrays import DOUBLE, ArrayHeader, decode, encode, header_of
from flwr_ppsgd.checks import LARGEST_COUNT
from flwr_ppsgd.secure.terms import TYPES as TERMS
from flwr_ppsgd.secure.terms import SecureTerms

ARRAYS = "arrays"  # w, under the name that Flower's stock strategies use
CONFIG = "config"
METRICS = "metrics"
ORDER = "ppsgd-order"
GRADIENT = "gradient"
ANSWER = "answer"  # the only array of an answer to "unit", "size", "count" or "columns"
SECURE = "ppsgd-secure"  # a message of a secure sum, up or down
DATA = "data"  # its bytes
MASKED = "masked"  # the record of a masked vector, and its only array
SINGLE = np.dtype(np.float32)
VARIANCE = "ppsgd-variance"  # ν, beside w in what auto publishes
UNIT = "ppsgd-unit"  # u
SIZE = "ppsgd-size"  # C
SCHEMA_HASH = "schema-sha256"  # in model.npz: of what was public about the rows
BESIDE = (VARIANCE, UNIT, SIZE)
STAGES = 4  # exchanges of a secure sum
NUM_EXAMPLES = "num-examples"
SERVER_ROUND = "server_round"  # in a legacy config, beside the fields of the Order
PROTOCOL = 6  # of the Order
LONGEST_PROMISE = 1000  # characters
LONGEST_NAME = 200  # characters: of a measure, a key, a signature
LONGEST_SHOWN = 80  # characters of a wrong value that an error shows
MOST_METRICS = 100
MOST_STARTS = 1_000_000
_NUMBER = re.compile(r"[1-9][0-9]{0,14}")
_PLANNED = re.compile(r"([a-z]+)=([0-9.e+-]{1,30}):([1-9][0-9]{0,14})")
STATISTICS = ("*running_mean", "*running_var", "*num_batches_tracked")  # BatchNorm's buffers

# what an Order may ask for: see ``Order.asks``
Asked: TypeAlias = Literal["gradient", "solution", "unit", "size", "count", "columns", "nothing"]
BEFORE_ROUNDS = ("unit", "size", "count", "columns")  # asked once, of everybody
OrderTask: TypeAlias = Literal["", "regression", "classification"]
Plan: TypeAlias = Mapping[str, tuple[float, int]]  # by what is asked for: z, how often
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
        asks: "gradient"; of the recipe, "solution" is what the user would add to w, divided by
            ``size``; "unit", "size" and "count" are one number, "columns" which sparse columns the
            user has; "nothing" brings the last w.
        task: of the recipe; empty for the paper's method.
        sparse: the number of sparse columns.
        unit: u, the public unit of targets.
        size: C, by which solutions are divided; of "columns", what those are divided by.
        variance: ν, the noise in the w that comes along; empty while nobody needs it.
        last: whether this w is the last one: the device makes the personal model and keeps it.
        publishes: whether a gradient is wanted; at α = 0 none is sent.
        average: whether the average iterate of θ is kept, and used in evaluation.
        metrics: names of training measures to send along, which are released with the gradient's
            noise.
        training: a number that the training keeps over restarts of the server.
        starts: the first round of every start of the server in this training, this start last;
            empty if the server keeps nothing on disk and so cannot go back.
        back: the number of rounds that the server may go back after it has died.
        charges: the number of charges in the server's journal so far.
        epsilon: ε that is promised for the planned rounds; infinite if nothing is guaranteed.
        plan: everything that this training releases about a user: for each thing that it asks for,
            its noise multiplier z and how often. The first Order fixes it. Empty: nothing is said.
        sampled: whether a round asks a secret part of the users only.
        promise: the guarantee in one line, for the owner of the client.
        terms: of a secure sum, in every Order of a training that has one; None: the server adds the
            noise.
        stage: which exchange of a secure sum this is, 1 to 4; 0 if it is none.
        payload: the hash of the message of a secure sum that came along; empty if there is none.
        server_key: the public key of the training; empty if the Order is not signed.
        signature: over all other fields, the arrays that travel along, the type of the message and
            the run, as of ``flwr_ppsgd.signature``.
        protocol: the version of this record.
        visit: the number of rounds that this user has taken part in, this one included. Counted by
            the client, never sent.
    """

    round: int
    step: float
    clip_norm: float
    reduction: Reduction
    publishes: bool
    asks: Asked = "gradient"
    task: OrderTask = ""
    sparse: int = 0
    unit: float = 1.0
    size: float = 1.0
    variance: tuple[float, ...] = ()
    last: bool = False
    average: bool = False
    metrics: tuple[str, ...] = ()
    training: int = 0
    starts: tuple[int, ...] = ()
    back: int = 0
    charges: int = 0
    epsilon: float = math.inf
    plan: Plan = field(default_factory=dict)
    sampled: bool = False
    promise: str = ""
    terms: SecureTerms | None = None
    stage: int = 0
    payload: str = ""
    server_key: str = ""
    signature: str = ""
    protocol: int = PROTOCOL
    visit: int = 0

    def to_flat(self) -> dict[str, Any]:
        """The Order as one flat record; lists are texts with commas, empty texts are left out.

        Flower's size mods reject empty texts.
        """
        flat: dict[str, Any] = {name: kind(getattr(self, name)) for name, kind in _PLAIN.items()}
        plan = [f"{part}={z!r}:{times}" for part, (z, times) in self.plan.items()]
        flat["plan"] = ",".join(plan)
        flat["metrics"] = ",".join(self.metrics)
        flat["starts"] = ",".join(str(int(start)) for start in self.starts)
        flat["variance"] = np.array(self.variance, "<f8").tobytes()
        if self.terms is not None:
            for name, value in self.terms.to_flat().items():
                flat[PREFIX + name] = value
        return {name: value for name, value in flat.items() if value not in ("", b"")}

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any]) -> "Order":
        """The Order that ``to_flat`` gave; ValueError unless every field is as it must be."""
        protocol = flat.get("protocol")
        if type(protocol) is not int or protocol != PROTOCOL:
            raise ValueError(
                f"an Order of protocol {_short_repr(protocol)}, this client speaks {PROTOCOL}: "
                "install the same flwr-ppsgd on the server and on the clients"
            )
        has_terms = PREFIX + "honest" in flat
        types = {**_TYPES, **_TERM_TYPES} if has_terms else _TYPES
        empty = {name: types[name]() for name in MAY_BE_EMPTY if name in types}
        flat = {**empty, **flat}
        wrong = sorted(map(str, types.keys() ^ flat.keys()))
        _check(not wrong, "there must be every field and no unknown field", wrong)
        for name, kind in types.items():  # exactly: a bool is no int
            value = flat[name]
            _check(type(value) is kind, f"{name} must be of type {kind.__name__}", value)
        values = {name: flat[name] for name in _PLAIN}
        values["plan"] = _parse_plan(flat["plan"])
        values["metrics"] = tuple(_words(flat["metrics"]))
        values["starts"] = _parse_starts(flat["starts"])
        values["variance"] = _parse_variance(flat["variance"])
        if has_terms:
            values["terms"] = SecureTerms(**{name: flat[PREFIX + name] for name in TERMS})
        order = cls(**values)
        order._check_values()
        return order

    def _check_values(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            _check(least <= value <= most, f"{name} must be from {least:g} to {most:g}", value)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            _check(value in choices, f"{name} must be one of {choices}", value)
        for name, longest in _LONGEST.items():
            text = getattr(self, name)
            fits = len(text) <= longest and text.isprintable()
            _check(fits, f"{name} must be at most {longest} printable characters", text)
        for name in self.metrics:
            fits = 0 < len(name.strip()) <= LONGEST_NAME and name.isprintable()
            _check(fits, f"metrics must be names of at most {LONGEST_NAME} characters", name)
        distinct = len(self.metrics) == len(set(self.metrics)) <= MOST_METRICS
        _check(distinct, f"metrics must be at most {MOST_METRICS} different names", self.metrics)
        releases = self.publishes or self.asks in ("gradient", "nothing")
        _check(releases, f"publishes must be true if it asks for a {self.asks}", self.publishes)
        # the evaluation before the first round of a start is of the round before it
        last = max(self.starts[-1:], default=0)
        _check(last <= self.round + 1, f"starts must not end after round {self.round}", last)
        _check(self.stage == 0 or self.terms is not None, "stage needs terms", self.stage)
        if self.terms is not None:
            try:
                _ = self.terms.release
                self.terms.metrics(self.metrics)
            except ValueError as error:
                raise ValueError(
                    f"in an Order the terms of a secure sum are wrong: {error}"
                ) from None


# The fields that travel as they are, and their types; the others become text or bytes.
_PLAIN: dict[str, type] = {
    name: str if get_origin(hint) is Literal else hint
    for name, hint in get_type_hints(Order).items()
    if hint in (int, float, bool, str) or get_origin(hint) is Literal
}
del _PLAIN["visit"]
_TYPES = {**_PLAIN, "plan": str, "metrics": str, "starts": str, "variance": bytes}
PREFIX = "secure_"  # before the names of the terms of a secure sum
_TERM_TYPES = {PREFIX + name: kind for name, kind in TERMS.items()}
_RANGES: dict[str, tuple[float, float]] = {  # least and most
    "round": (0, LARGEST_COUNT),
    "back": (0, LARGEST_COUNT),
    "charges": (0, LARGEST_COUNT),
    "sparse": (0, LARGEST_COUNT),
    "training": (0, 2**63),
    "stage": (0, STAGES),
    "step": (0, sys.float_info.max),
    "epsilon": (0, math.inf),
    "clip_norm": (sys.float_info.min, sys.float_info.max),
    "unit": (sys.float_info.min, sys.float_info.max),
    "size": (sys.float_info.min, sys.float_info.max),
}
_CHOICES = {"reduction": get_args(Reduction), "asks": get_args(Asked), "task": get_args(OrderTask)}
_LONGEST = {
    "promise": LONGEST_PROMISE,
    "server_key": LONGEST_NAME,
    "signature": LONGEST_NAME,
    "payload": LONGEST_NAME,
}
MAY_BE_EMPTY = (
    *("metrics", "starts", "plan", "variance", "task"),
    *("promise", "server_key", "signature", "payload", PREFIX + "bounds"),
)


def _check(holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"in an Order {rule}, got {_short_repr(value)}: it is not obeyed")


def _words(text: str) -> list[str]:
    return text.split(",") if text else []


def _parse_starts(text: str) -> tuple[int, ...]:
    """Whole numbers in a text with commas, written as ``str`` writes them."""
    words = _words(text)
    _check(len(words) <= MOST_STARTS, f"starts must be at most {MOST_STARTS} rounds", len(words))
    fits = all(_NUMBER.fullmatch(word) for word in words)
    _check(fits, "starts must be whole numbers from 1 to 10^15", text)
    return tuple(map(int, words))


def _parse_plan(text: str) -> dict[str, tuple[float, int]]:
    """What ``to_flat`` wrote, as in "unit=4.5:1,solution=2.0:8"."""
    plan: dict[str, tuple[float, int]] = {}
    for word in _words(text):
        found = _PLANNED.fullmatch(word)
        fits = found is not None and found[1] in get_args(Asked) and found[1] not in plan
        _check(fits, "plan must be such as solution=2.0:8, each thing once", word)
        assert found is not None
        try:
            z = float(found[2])
        except ValueError:
            z = math.nan
        _check(0 <= z < math.inf, "each noise multiplier in plan must be at least 0", word)
        plan[found[1]] = (z, int(found[3]))
    return plan


def _parse_variance(data: bytes) -> tuple[float, ...]:
    _check(len(data) % 8 == 0, "variance must be numbers of 8 bytes", len(data))
    numbers = np.frombuffer(data, "<f8")
    fits = bool((numbers >= 0).all() and np.isfinite(numbers).all())
    _check(fits, "variance must be finite and at least 0", numbers.size)
    return tuple(numbers.tolist())


def _short_repr(value: object) -> str:
    """A value that a server chose, for one line of a log: no control characters, not too long."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…"


def answer_length(order: Order) -> int:
    """Of the vector that answers what is asked before the first round; 0 in a round."""
    if order.asks not in BEFORE_ROUNDS:
        return 0
    return order.sparse if order.asks == "columns" else 2


def payload_hash(payload: bytes) -> str:
    """By which an Order names the message of a secure sum that comes along; empty without one."""
    return hashlib.sha256(payload).hexdigest() if payload else ""


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


def words_of(record: ArrayRecord | None, size: int) -> NDArray[np.uint64]:
    """The masked vector in a reply; ValueError unless it is one of this size."""
    if record is None or set(record) != {MASKED}:
        raise ValueError(f"no masked vector among {sorted(record or ())}")
    header = header_of(record[MASKED], MASKED)
    if header.dtype != np.dtype("<u8") or header.shape != (size,):
        raise ValueError(f"a masked vector of {header.dtype}{header.shape}, expected {size} words")
    return decode(record[MASKED], MASKED)
