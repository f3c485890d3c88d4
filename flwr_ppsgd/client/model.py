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
from flwr_ppsgd.arrays import record_from
from flwr_ppsgd.client.shelf import Shelf
from flwr_ppsgd.client.visit import solved, visit
from flwr_ppsgd.learner import Learner
from flwr_ppsgd.wire import Layout, Order

STEP = 0.1  # of θ, for somebody who never took part
VISITS = 100
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
        learner: Learner | None = None,
    ) -> Self:
        """What the node of ``user`` kept last.

        Args:
            state_dir: the node config's ``ppsgd-state-dir``.
            user: the name of the user.
            run: the ``ppsgd-run``, if the user took part in more than one.
            w: the published parameters, if they are newer than those that came with the user's
                last round.
            learner: the user's model and data: θ is then solved anew for w, if the learner can.
        """
        shelf = _shelf(Path(state_dir), user, run)
        save = shelf.last()
        assert save is not None
        shared = record_from(shelf.shared().arrays) if w is None else _record(w)
        theta = save.vectors["theta"]
        solution = None if learner is None else solved(learner, _flat(shared))
        return cls(shared, theta if solution is None else solution.theta)

    @property
    def w(self) -> Vector:
        """The shared parameters as one flat vector."""
        return _flat(self.shared)

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
    step: float | None = None,
    visits: int | None = None,
    theta: Vector | None = None,
) -> PersonalModel:
    """θ for a user who never took part, at the published w.

    A learner that can solve for θ does so. Without that, or if ``step``, ``visits`` or ``theta`` is
    given, θ alone is moved by steps.

    Args:
        w: the published parameters.
        data: the user's learner, which is the model together with the user's data.
        step: the size of a step; 0.1 unless given.
        visits: the number of steps; 100 unless given.
        theta: where to begin; the learner's initial θ unless given.
    """
    record = _record(w)
    flat = _flat(record)
    if step is None and visits is None and theta is None:
        solution = solved(data, flat)
        if solution is not None:
            return PersonalModel(record, solution.theta)
    now = data.initial_theta() if theta is None else theta
    size = STEP if step is None else step
    for number in range(1, (VISITS if visits is None else visits) + 1):
        order = Order(0, size, math.inf, "mean", False, visit=number)
        _, now = visit(data, flat, now, order)
    return PersonalModel(record, now)


def _flat(record: ArrayRecord) -> Vector:
    return Layout.of(record).flatten(record)


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
