"""One user's model outside training.

w and θ come from a state directory, or θ is made for somebody who never took part. Whatever happens
here stays on the user's machine and costs no privacy: it is computed from the published w and from
the user's own data.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.client.shelf import Shelf
from flwr_ppsgd.client.visit import visit
from flwr_ppsgd.learner import Learner
from flwr_ppsgd.wire import Layout, Order, record_from

Published: TypeAlias = ArrayRecord | Mapping[str, NDArray[Any]] | Vector


class Modular(Protocol):
    """A model that can put w and θ into a torch module: ``SplitModel`` is one."""

    def module_with(self, w: ArrayRecord | Vector, theta: Vector | None = None) -> Any:
        """The module that holds both."""
        ...


@dataclass(frozen=True)
class PersonalModel:
    """w, as named arrays, and the θ of one user."""

    shared: ArrayRecord
    theta: Vector

    @classmethod
    def load(
        cls,
        state_dir: Path | str,
        user: str,
        *,
        run: str | None = None,
        w: Published | None = None,
    ) -> Self:
        """What the node of ``user`` kept last.

        Args:
            state_dir: the node config's ``ppsgd-state-dir``.
            user: the name of the user.
            run: the ``ppsgd-run``, if the user took part in more than one.
            w: the published parameters, if they are newer than those that came with the user's
                last round.
        """
        shelf = _shelf(Path(state_dir), user, run)
        save = shelf.last()
        assert save is not None
        shared = record_from(shelf.shared().arrays) if w is None else _record(w)
        return cls(shared, save.vectors["theta"])

    @property
    def w(self) -> Vector:
        """The shared parameters as one flat vector."""
        return Layout.of(self.shared).flatten(self.shared)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """w + θ under w's names and in its shapes, for additive models.

        A split model has a ``module``.
        """
        w = self.w
        if self.theta.shape != w.shape:
            raise ValueError(
                f"w has {w.size} parameters and θ {self.theta.size}, so they cannot be added: use "
                "module(model)"
            )
        added = Layout.of(self.shared).unflatten(w + self.theta)
        return {name: array.numpy() for name, array in added.items()}

    def module(self, model: Modular) -> Any:
        """A copy of the model's torch module that holds w and θ, ready to predict."""
        return model.module_with(self.shared, self.theta).eval()


def personalize(
    w: Published,
    data: Learner,
    *,
    step: float = 0.1,
    visits: int = 100,
    theta: Vector | None = None,
) -> PersonalModel:
    """θ for a user who never took part: steps on θ alone, at the published w.

    Args:
        w: the published parameters.
        data: the user's learner, which is the model together with the user's data.
        step: the size of a step.
        visits: the number of steps.
        theta: where to begin; the learner's initial θ unless given.
    """
    record = _record(w)
    flat = Layout.of(record).flatten(record)
    now = data.initial_theta() if theta is None else theta
    for number in range(1, visits + 1):
        order = Order(0, step, math.inf, "mean", False, visit=number)
        _, now = visit(data, flat, now, order)
    return PersonalModel(record, now)


def _shelf(root: Path, user: str, run: str | None) -> Shelf:
    """The only shelf of this user, in this run if one is named."""
    shelf = Shelf.only(root, str(user), run)
    if shelf is None:
        shelves = Shelf.all_in(root)
        known = sorted({(other.run, other.user) for other in shelves if other.holds_theta()})
        where = f" in run {run!r}" if run else ""
        raise ValueError(f"{root} holds no θ of user {user!r}{where}, only of {known}")
    return shelf


def _record(w: Published) -> ArrayRecord:
    if isinstance(w, ArrayRecord):
        return w
    if isinstance(w, np.ndarray):
        return ArrayRecord([w])
    return ArrayRecord({name: Array(values) for name, values in w.items()})
