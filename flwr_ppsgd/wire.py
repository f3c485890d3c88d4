"""What travels beside arrays: the names of the records, and the Order."""

import hashlib
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args, get_origin, get_type_hints

import numpy as np

from flwr_ppsgd.algorithm import Reduction
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

# what an Order may ask for: see ``Order.asks``
Asked: TypeAlias = Literal["gradient", "solution", "unit", "size", "count", "columns", "nothing"]
BEFORE_ROUNDS = ("unit", "size", "count", "columns")  # asked once, of everybody
OrderTask: TypeAlias = Literal["", "regression", "classification"]
Plan: TypeAlias = Mapping[str, tuple[float, int]]  # by what is asked for: z, number of times


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
        stage: which exchange of a secure sum this is, 1 to 4; 0 of a plain one.
        payload: the hash of the message of a secure sum that came along; empty if there is none.
        server_key: the public key of the training; empty if the Order is not signed.
        signature: over all other fields, the arrays that travel along, the type of the message and
            the run; see ``flwr_ppsgd.signature``.
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

    @classmethod
    def own_step(cls, step: float, visit: int, *, publishes: bool = False) -> "Order":
        """For a step that a device takes by itself: no server asks for it, and no bound holds.

        Args:
            step: s_θ.
            visit: the number of the step.
            publishes: whether the gradient of w is wanted too.
        """
        return cls(0, step, math.inf, "mean", publishes, visit=visit)

    @classmethod
    def delivery(cls, task: str, published: Mapping[str, Any]) -> "Order":
        """What brings the last w of the recipe to a device.

        Args:
            task: the recipe's, "classification" or "regression".
            published: what is published beside w; see ``PPSGD.published``.
        """
        variance = np.asarray(published[VARIANCE]).reshape(-1)
        return cls(
            round=0,
            step=0.0,
            clip_norm=1.0,
            reduction="mean",
            publishes=False,
            asks="nothing",
            task=cast(OrderTask, task),
            unit=float(np.asarray(published[UNIT])),
            size=float(np.asarray(published[SIZE])),
            variance=tuple(variance.tolist()),
            last=True,
        )

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
_HINTS = {name: hint for name, hint in get_type_hints(Order).items() if name != "visit"}
_CHOICES = {name: get_args(hint) for name, hint in _HINTS.items() if get_origin(hint) is Literal}
_PLAIN: dict[str, type] = {
    name: str if name in _CHOICES else hint
    for name, hint in _HINTS.items()
    if name in _CHOICES or hint in (int, float, bool, str)
}
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
