"""One user's model outside training.

w and θ come from a state directory, or θ is made for somebody who never took part. Whatever happens
here stays on the user's machine and costs no privacy: it is computed from the published w and from
the user's own data.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.arrays import Layout, vector_record
from flwr_ppsgd.client.theta import RUN
from flwr_ppsgd.client.theta_store import DiskStore, file_of, users_in
from flwr_ppsgd.client.visit import model_around, respond
from flwr_ppsgd.learner import OWN_THETA, OWN_W, Learner, Solver, offers
from flwr_ppsgd.models.mixture import Mixture
from flwr_ppsgd.wire import BESIDE, SCHEMA_HASH, VARIANCE, Order

STEP = 0.1  # of θ, for somebody who never took part
VISITS = 100
MOST_NAMED = 10  # users in an error
Published: TypeAlias = ArrayRecord | Mapping[str, NDArray[Any]] | Vector


class ModuleMaker(Protocol):
    """A model that can put w and θ into a torch module: ``SplitModel`` is one."""

    def module_with(self, w: ArrayRecord | Vector, theta: Vector | None = None) -> Any:
        """The module that holds both."""
        ...


@dataclass(frozen=True)
class PersonalModel:
    """w, as named arrays, and what makes it one user's own model.

    Args:
        shared: w.
        theta: θ of the paper's method; empty under ``PPSGD.auto``.
        mixture: the personal model of ``PPSGD.auto``, if there is one.
    """

    shared: ArrayRecord
    theta: Vector
    mixture: Mixture | None = None

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
        store = _store(Path(state_dir), str(user), run)
        theta = store.newest()
        if w is None:
            shared, _ = store.last_shared()
        else:
            shared = _record(w)
        arrays = store.model()
        store.close()
        if arrays is None:
            return cls(shared, theta.theta)
        return cls._from_solution(shared, arrays)

    @classmethod
    def _from_solution(cls, shared: ArrayRecord, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """The model of ``PPSGD.auto`` in a learner's arrays; a network's w is among them."""
        if OWN_W in arrays:
            shared = Layout.of(shared).unflatten(arrays[OWN_W])
        if OWN_THETA in arrays:
            return cls(shared, arrays[OWN_THETA])
        return cls(shared, np.zeros(0), Mixture.from_arrays(arrays))

    def predict(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Of new rows of this user: amounts, rows × 1, or scores of classes, rows × classes.

        Those of a network are ``model.features(personal.w, x)``.
        """
        if self.mixture is None:
            raise ValueError(
                "this model was stepped, not solved: use arrays() for w + θ, or module(model)"
            )
        return self.mixture.predict(rows)

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

    def module(self, model: ModuleMaker) -> Any:
        """A copy of the model's torch module that holds w and θ, ready to predict."""
        return model.module_with(self.shared, self.theta).eval()


def personalize(
    w: Published,
    data: Learner,
    *,
    step: float = STEP,
    visits: int = VISITS,
    theta: Vector | None = None,
) -> PersonalModel:
    """The personal model of somebody who never took part, at the published w.

    Args:
        w: the published parameters; what ``PPSGD.published`` gives makes the model of
            ``PPSGD.auto``, anything else a θ by steps.
        data: the user's learner, which is the model together with the user's data.
        step: the size of a step.
        visits: the number of steps.
        theta: where to begin; the learner's initial θ unless given.
    """
    record = _record(w)
    flat = Layout.of(record).flatten(record)
    if not isinstance(w, ArrayRecord | np.ndarray) and VARIANCE in w and offers(data, Solver):
        own = model_around(data, flat, Order.delivery(data.task, w))
        return PersonalModel._from_solution(record, own.arrays())
    now = data.initial_theta() if theta is None else theta
    for number in range(1, visits + 1):
        _, _, now = respond(data, flat, now, Order.own_step(step, number))
    return PersonalModel(record, now)


def _store(root: Path, user: str, run: str | None) -> DiskStore:
    """The store of this user, for the only run that it holds θ of, or the one that is named."""
    where = f"{root} holds no θ of user {user!r}"
    if not file_of(root, user).exists():
        users = users_in(root)
        raise ValueError(f"{where}, only of {len(users)} others: {users[:MOST_NAMED]}")
    store = DiskStore(root, user, read_only=True)
    runs = [each for each in store.runs() if store.of_run(each).stamps()]
    found = [each for each in runs if run in (None, each)]
    if len(found) == 1:
        return store.of_run(found[0])
    store.close()
    if found:
        raise ValueError(f"user {user!r} took part in {found}: name one with run=, or {RUN}")
    raise ValueError(f"{where} in run {run!r}, only in {runs}")


def _record(w: Published) -> ArrayRecord:
    if isinstance(w, ArrayRecord):
        return w
    if isinstance(w, np.ndarray):
        return ArrayRecord([w])
    beside = (*BESIDE, SCHEMA_HASH)
    return vector_record({name: np.asarray(w[name]) for name in w if name not in beside})
