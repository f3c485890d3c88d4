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
    """One reply: bytes by the record that holds them, and the norm of the gradient, where there is one.

    order, w: what it answers; w as serialised arrays.
    """

    sizes: Mapping[str, int]
    norm: float | None = None
    order: Order | None = None
    w: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, content: RecordDict, order: Order | None, w: Mapping[str, bytes]) -> Self:
        """A reply as Flower puts it on the wire."""
        gradient = content.get(GRADIENT)
        norm = norm_of(gradient.to_numpy_ndarrays()) if isinstance(gradient, ArrayRecord) else None
        return cls({name: _size(record) for name, record in content.items()}, norm, order, w)

    @property
    def promise(self) -> str:
        return self.order.promise if self.order else ""

    def as_line(self, run: int) -> dict[str, Any]:
        """What is written down about it."""
        clip_norm = self.order.clip_norm if self.order else None
        round_ = self.order.round if self.order else None
        return {"run": run, "round": round_, "bytes": dict(self.sizes), "norm": self.norm, "clip_norm": clip_norm}


def norm_of(arrays: Iterable[NDArray[Any]]) -> float:
    return float(np.sqrt(sum(float(np.sum(np.square(array, dtype=np.float64))) for array in arrays)))


def client_report(state_dir: Path) -> str:
    """In words: which runs this machine took part in, how often, what left it, and what is promised."""
    shelves = Shelf.all_in(state_dir)
    if not shelves:
        raise ValueError(f"{state_dir} holds no θ of any run: give the directory that ppsgd-state-dir names")
    return "\n\n".join(_about(shelf) for shelf in shelves)


def _about(shelf: Shelf) -> str:
    newest = next(shelf.saves(), None)
    lines = [f"Run {shelf.run!r}, user {shelf.user!r}", *(_kept(newest) if newest else ["  no whole save of θ"])]
    lines += [f"  damaged, set aside: {path.name}" for path in shelf.damaged()]
    return "\n".join([*lines, *_left(shelf), f"  promised: {_promise(shelf)}"])


def _kept(save: Save) -> list[str]:
    return [
        f"  took part in {save.stamp['visit']} rounds; the last one was round {save.stamp['round']}",
        f"  stays here: θ, {save.vectors['theta'].size} numbers, in files that only you can read",
    ]


def _left(shelf: Shelf) -> list[str]:
    sizes: Counter[str] = Counter()
    runs, norms, replies, clip_norm = set(), [0.0], 0, None
    for line in shelf.notes():
        sizes.update(line["bytes"])
        runs.add(line["run"])
        replies += 1
        if line["norm"] is not None:
            norms.append(line["norm"])
            clip_norm = line["clip_norm"]
    what = ", ".join(f"{size:,} bytes of {name}" for name, size in sizes.items()) or "nothing"
    lines = [f"  has left: {what}; {replies} replies in {len(runs)} Flower runs"]
    if clip_norm is not None:
        only = "nothing but the clipped gradient" if set(sizes) == {GRADIENT} else "the clipped gradient, and more"
        lines.append(
            f"  that is {only}; its norm was {norms[-1]:.4g} the last time, {max(norms):.4g} at most, clipped to "
            f"{clip_norm:g}"
        )
    return lines


def _promise(shelf: Shelf) -> str:
    try:
        return shelf.shared().promise or "nothing: the server stated no guarantee"
    except ValueError as error:
        return f"unknown: {error}"


def _size(record: Any) -> int:
    if isinstance(record, ArrayRecord):
        return sum(len(array.data) for array in record.values())
    return len(record.deflate())
