"""One user's model outside training: w and θ from a state directory, or a θ for somebody who never took part.

Whatever happens here stays on the user's machine and costs no privacy: it is computed from the published w and from the
user's own data.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.client.message_api import Learner, visit
from flwr_ppsgd.client.shelf import Shelf
from flwr_ppsgd.wire import Layout, Order, record_from

if TYPE_CHECKING:
    from torch import nn

    from flwr_ppsgd.models.split import SplitModel

Shared: TypeAlias = ArrayRecord | Mapping[str, NDArray[Any]] | Vector


@dataclass(frozen=True)
class PersonalModel:
    """w, as named arrays, and the θ of one user."""

    shared: ArrayRecord
    theta: Vector

    @classmethod
    def load(cls, state_dir: Path | str, user: str, *, run: str | None = None, w: Shared | None = None) -> Self:
        """What the node of ``user`` kept last.

        run: the ``ppsgd-run``, where the user took part in more than one. w: the published parameters, where they are
        newer than those that came with the user's last round.
        """
        shelf = _shelf(Path(state_dir), user, run)
        save = next(shelf.saves(), None)
        if save is None:
            raise ValueError(f"{shelf.directory} holds no whole θ of user {user!r}: restore one from a backup")
        shared = record_from(shelf.shared().arrays) if w is None else _record(w)
        return cls(shared, save.vectors["theta"])

    @property
    def w(self) -> Vector:
        """The shared parameters as one flat vector."""
        return Layout.of(self.shared).flatten(self.shared)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """w + θ under w's names and in its shapes, for additive models; a split one has a ``module``."""
        if self.theta.shape != self.w.shape:
            raise ValueError(
                f"w has {self.w.size} parameters and θ {self.theta.size}, so they cannot be added: use module(model)"
            )
        added = Layout.of(self.shared).unflatten(self.w + self.theta)
        return {name: array.numpy() for name, array in added.items()}

    def module(self, model: "SplitModel") -> "nn.Module":
        """A copy of the model's torch module that holds w and θ, ready to predict."""
        return model.module_with(self.shared, self.theta).eval()


def personalize(
    w: Shared, data: Learner, *, step: float = 0.1, visits: int = 100, theta: Vector | None = None
) -> PersonalModel:
    """θ for a user who never took part: ``visits`` steps on θ alone, at the published w.

    data: the user's learner, which is the model together with the user's data. theta: where to begin; the learner's
    initial θ unless given.
    """
    record = _record(w)
    flat, now = Layout.of(record).flatten(record), data.initial_theta() if theta is None else theta
    for number in range(1, visits + 1):
        order = Order(0, step, math.inf, "mean", False, visit=number)
        _, now = visit(data, flat, now, order)
    return PersonalModel(record, now)


def _shelf(root: Path, user: str, run: str | None) -> Shelf:
    found = [shelf for shelf in Shelf.all_in(root) if shelf.user == str(user) and run in (None, shelf.run)]
    if len(found) == 1:
        return found[0]
    if not found:
        known = sorted({(shelf.run, shelf.user) for shelf in Shelf.all_in(root)})
        raise ValueError(f"{root} holds no θ of user {user!r}{f' in run {run!r}' if run else ''}, only of {known}")
    raise ValueError(f"user {user!r} took part in {[shelf.run for shelf in found]}: name one with run=")


def _record(w: Shared) -> ArrayRecord:
    if isinstance(w, ArrayRecord):
        return w
    return ArrayRecord([w]) if isinstance(w, np.ndarray) else ArrayRecord({name: Array(a) for name, a in w.items()})
