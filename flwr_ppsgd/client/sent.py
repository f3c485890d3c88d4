"""What leaves a client's machine, for whoever runs it."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from flwr_ppsgd.arrays import decode_vector
from flwr_ppsgd.client.refusal import RefusedError
from flwr_ppsgd.client.shelf import Save, Shelf
from flwr_ppsgd.wire import GRADIENT, MASKED, Order

EVALUATE = "evaluate"
LONGEST_SHOWN = 1000  # characters of a text that a server or a mod chose


CHECK = "query"  # the type of a message that asks for nothing but an answer


@dataclass(frozen=True)
class Leaving:
    """One reply.

    Args:
        kind: what it answers: ``train``, ``evaluate``, or another type of message.
        sizes: the number of bytes of each record.
        norm: of the gradient, if there is one.
        order: the Order that it answers.
        w: the serialised arrays that it answers.
        code: of the error, if it is one.
    """

    kind: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    norm: float | None = None
    order: Order | None = None
    w: Mapping[str, bytes] = field(default_factory=dict)
    code: str = ""

    @classmethod
    def of(
        cls,
        kind: str,
        content: RecordDict,
        order: Order | None,
        w: Mapping[str, bytes],
    ) -> Self:
        """A reply as Flower puts it on the wire."""
        gradient = content.get(GRADIENT)
        norm = None
        if isinstance(gradient, ArrayRecord):
            norm = norm_of(decode_vector(array) for array in gradient.values())
        sizes = {name: _size(record) for name, record in content.items()}
        return cls(kind, sizes, norm, order, w)

    @property
    def promise(self) -> str:
        """What the server promised with its Order."""
        return self.order.promise if self.order else ""

    def as_line(self, run: int) -> dict[str, Any]:
        """What is written down about it."""
        line = {
            "run": run,
            "kind": self.kind,
            "round": None,
            "bytes": dict(self.sizes),
            "norm": self.norm,
            "clip_norm": None,
            "code": self.code,
        }
        if self.order is not None:
            line["round"] = self.order.round
            line["clip_norm"] = self.order.clip_norm
            if self.order.stage:
                line["stage"] = self.order.stage
        return line


def norm_of(arrays: Iterable[NDArray[Any]]) -> float:
    """The Euclidean norm of all arrays together."""
    total = 0.0
    for array in arrays:
        squares = np.square(array, dtype=np.float64)
        total += float(np.sum(squares))
    return math.sqrt(total)


def client_report(state_dir: Path) -> str:
    """In words: which runs this machine took part in, what left it, and what is promised."""
    shelves = Shelf.all_in(state_dir)
    if not shelves:
        raise ValueError(
            f"{state_dir} holds no θ of any run: give the directory that ppsgd-state-dir names"
        )
    return "\n\n".join(_about(shelf) for shelf in shelves)


def _about(shelf: Shelf) -> str:
    lines = [f"Run {shelf.run!r}, user {shelf.user!r}"]
    lines += _theta(shelf)
    lines += [f"  damaged, set aside: {_plain(path.name)}" for path in shelf.damaged()]
    lines += _left(shelf)
    lines.append(f"  promised: {_plain(_promise(shelf))}")
    return "\n".join(lines)


def _theta(shelf: Shelf) -> list[str]:
    try:
        newest = shelf.last()
    except RefusedError as error:
        return [f"  {_plain(str(error))}"]
    return _kept(newest) if newest else ["  no save of θ"]


def _kept(save: Save) -> list[str]:
    visits = save.stamp["visit"]
    size = save.vectors["theta"].size
    return [
        f"  took part in {visits} rounds; the last one was round {save.stamp['round']}",
        f"  stays here: θ, {size} numbers, in files that only you can read",
    ]


def _left(shelf: Shelf) -> list[str]:
    lines = list(shelf.notes())
    sizes: Counter[str] = Counter()
    runs = set()
    for line in lines:
        sizes.update(line["bytes"])
        runs.add(line.get("run"))
    replies = [line for line in lines if line.get("kind") != CHECK]
    return [
        f"  has left: {_in_words(sizes)}; {len(replies)} replies in {len(runs)} Flower runs",
        *_about_gradients(lines, set(sizes)),
        *_about_masked(lines),
        *_evaluations(lines),
        *_errors(lines),
    ]


def _in_words(sizes: Mapping[str, int]) -> str:
    if not sizes:
        return "nothing"
    return ", ".join(f"{size:,} bytes of {_plain(name)}" for name, size in sizes.items())


def _about_gradients(lines: list[dict[str, Any]], records: set[str]) -> list[str]:
    gradients = [line for line in lines if line.get("norm") is not None]
    if not gradients:
        return []
    only = "nothing but the clipped gradient"
    if records != {GRADIENT}:
        only = "the clipped gradient, and more"
    last = gradients[-1]
    largest = max(line["norm"] for line in gradients)
    return [
        f"  that is {only}; its norm was {last['norm']:.4g} the last time, {largest:.4g} at most, "
        f"clipped to {last['clip_norm']:g}"
    ]


def _about_masked(lines: list[dict[str, Any]]) -> list[str]:
    masked = [line for line in lines if MASKED in line["bytes"]]
    if not masked:
        return []
    return [
        f"  masked vectors: {len(masked)}; each hides a gradient that was bounded and had noise "
        "added here, and shows nothing until it is summed with others'"
    ]


def _evaluations(lines: list[dict[str, Any]]) -> list[str]:
    evaluations = [line for line in lines if line.get("kind") == EVALUATE]
    answered = [line for line in evaluations if not line.get("code")]
    if not answered:
        return []
    return [f"  evaluations answered: {len(answered)}, outside the guarantee"]


def _errors(lines: list[dict[str, Any]]) -> list[str]:
    """How often each kind of error was the reply, refusals included."""
    codes = [_plain(str(line["code"])) for line in lines if line.get("code")]
    if not codes:
        return []
    counts = sorted(Counter(codes).items())
    parts = ", ".join(f"{code} ({count})" for code, count in counts)
    return [f"  refused or failed, and the server was told only so: {parts}"]


def _promise(shelf: Shelf) -> str:
    try:
        return shelf.shared().promise or "nothing: the server stated no guarantee"
    except ValueError as error:
        return f"unknown: {error}"


def _plain(text: str) -> str:
    """A text without control characters, which could rewrite what a terminal shows."""
    shown = "".join(letter if letter.isprintable() else "�" for letter in text)
    return shown[:LONGEST_SHOWN]


def _size(record: Any) -> int:
    if isinstance(record, ArrayRecord):
        return sum(len(array.data) for array in record.values())
    return len(record.deflate())
