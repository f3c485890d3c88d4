"""What leaves a client's machine, for whoever runs it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from flwr_ppsgd.client.shelf import Save, Shelf
from flwr_ppsgd.wire import GRADIENT, Order


@dataclass(frozen=True)
class Leaving:
    """One reply.

    Args:
        sizes: the number of bytes of each record.
        norm: of the gradient, if there is one.
        order: the Order that it answers.
        w: the serialised arrays that it answers.
    """

    sizes: Mapping[str, int]
    norm: float | None = None
    order: Order | None = None
    w: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, content: RecordDict, order: Order | None, w: Mapping[str, bytes]) -> Self:
        """A reply as Flower puts it on the wire."""
        gradient = content.get(GRADIENT)
        norm = None
        if isinstance(gradient, ArrayRecord):
            norm = norm_of(gradient.to_numpy_ndarrays())
        sizes = {name: _size(record) for name, record in content.items()}
        return cls(sizes, norm, order, w)

    @property
    def promise(self) -> str:
        """What the server promised with its Order."""
        return self.order.promise if self.order else ""

    def as_line(self, run: int) -> dict[str, Any]:
        """What is written down about it."""
        return {
            "run": run,
            "round": self.order.round if self.order else None,
            "bytes": dict(self.sizes),
            "norm": self.norm,
            "clip_norm": self.order.clip_norm if self.order else None,
        }


def norm_of(arrays: Iterable[NDArray[Any]]) -> float:
    """The Euclidean norm of all arrays together."""
    squares = [float(np.sum(np.square(array, dtype=np.float64))) for array in arrays]
    return float(np.sqrt(sum(squares)))


def client_report(state_dir: Path) -> str:
    """In words: which runs this machine took part in, what left it, and what is promised."""
    shelves = Shelf.all_in(state_dir)
    if not shelves:
        raise ValueError(
            f"{state_dir} holds no θ of any run: give the directory that ppsgd-state-dir names"
        )
    return "\n\n".join(_about(shelf) for shelf in shelves)


def _about(shelf: Shelf) -> str:
    newest = next(shelf.saves(), None)
    lines = [f"Run {shelf.run!r}, user {shelf.user!r}"]
    lines += _kept(newest) if newest else ["  no whole save of θ"]
    lines += [f"  damaged, set aside: {path.name}" for path in shelf.damaged()]
    lines += _left(shelf)
    lines.append(f"  promised: {_promise(shelf)}")
    return "\n".join(lines)


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
    for line in lines:
        sizes.update(line["bytes"])
    runs = {line["run"] for line in lines}
    what = ", ".join(f"{size:,} bytes of {name}" for name, size in sizes.items()) or "nothing"
    told = [f"  has left: {what}; {len(lines)} replies in {len(runs)} Flower runs"]
    gradients = [line for line in lines if line["norm"] is not None]
    if gradients:
        told.append(_about_gradients(gradients, set(sizes)))
    return told


def _about_gradients(lines: list[dict[str, Any]], records: set[str]) -> str:
    norms = [line["norm"] for line in lines]
    only = "nothing but the clipped gradient"
    if records != {GRADIENT}:
        only = "the clipped gradient, and more"
    return (
        f"  that is {only}; its norm was {norms[-1]:.4g} the last time, {max(norms):.4g} at most, "
        f"clipped to {lines[-1]['clip_norm']:g}"
    )


def _promise(shelf: Shelf) -> str:
    try:
        return shelf.shared().promise or "nothing: the server stated no guarantee"
    except ValueError as error:
        return f"unknown: {error}"


def _size(record: Any) -> int:
    if isinstance(record, ArrayRecord):
        return sum(len(array.data) for array in record.values())
    return len(record.deflate())
