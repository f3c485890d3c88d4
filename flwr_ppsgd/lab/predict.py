"""Predictions by the personal models of a run, for users who took part and for new ones.

Simulations hold everyone's rows, so the model of a user who took part is worked out again from them
and from what was published. Somebody new gets one from rows of the new file whose target is known.
Either way nothing is released.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.lab.data.columns import Columns
from flwr_ppsgd.lab.data.features import features_like
from flwr_ppsgd.lab.data.frames import frame_of, lookup, origin_of, plain
from flwr_ppsgd.lab.data.learners import linear_learner
from flwr_ppsgd.lab.data.per_user import PerUser
from flwr_ppsgd.lab.data.raw import REFUSE, Origin, canonical, is_missing
from flwr_ppsgd.lab.data.scaling import own_scaled_new, scaled_alike
from flwr_ppsgd.lab.evaluation import delivery_order
from flwr_ppsgd.lab.outputs import read_config, read_model
from flwr_ppsgd.lab.problem import LINEAR, SYNTHETIC, Problem
from flwr_ppsgd.models.solve import Mixture
from flwr_ppsgd.wire import Order

TOOK_PART = "personal"
NEW = "new user"
SHARED = "shared alone"


@dataclass(frozen=True)
class Prediction:
    """One row of the new file.

    Args:
        row: its number, as messages count rows.
        user: its user.
        value: the predicted amount, class or label.
        model: "personal", "new user" or "shared alone".
    """

    row: int
    user: str
    value: float | str
    model: str


@dataclass(frozen=True, eq=False)
class _New:
    """The new rows.

    Args:
        users: of each row.
        x: as the file has them, in the order of the model's features.
        targets: where they are known, else None.
        origin: the file.
    """

    users: list[str]
    x: NDArray[np.float64]
    targets: list[Any]
    origin: Origin


def predict(directory: Path, data: Path, user: str | None = None) -> list[Prediction]:
    """A prediction for each row of ``data``, in its order.

    Args:
        directory: of a run with a linear model on data of one's own.
        data: a .csv or .parquet file with the columns of the run's features.
        user: the column that names users; the run's own if None.
    """
    problem = _problem_of(directory)
    trained = problem.per_user()
    columns = problem.columns() or Columns()
    if user is not None:
        columns = replace(columns, user=user)
    published = read_model(directory)
    w = np.asarray(published["w"], dtype=np.float64).reshape(-1)
    new = _read(data, trained, columns)
    task = "regression" if trained.task == "regression" else "classification"
    order = delivery_order(task, published)
    models = _Models(problem, trained, w, order, new)
    numbers = {canonical(name): number for number, name in enumerate(trained.users)}
    found: list[Prediction] = []
    for name, rows in _by_user(new.users):
        if name in numbers:
            found += models.of_known(numbers[name], rows)
        else:
            found += models.of_new(rows)
    return sorted(found, key=lambda one: one.row)


def _problem_of(directory: Path) -> Problem:
    problem = Problem.of(read_config(directory)).found()
    if problem.data == SYNTHETIC or problem.model != LINEAR:
        raise ValueError(
            f"{directory}: predictions are for linear models on data of one's own: load w of other "
            "models into their module with PersonalModel"
        )
    problem.check_squared()
    return problem


def _read(path: Path, trained: PerUser, columns: Columns) -> _New:
    if path.suffix.lower() not in (".csv", ".parquet") or not path.is_file():
        raise ValueError(
            f"{path}: new rows must be a .csv or .parquet file that exists: convert it"
        )
    if not trained.feature_names:
        raise ValueError(
            f"{trained.source}: its features have no names, so that columns of {path} cannot be "
            "told: train on a .csv or .parquet file"
        )
    frame, _ = frame_of(path, columns)
    origin = origin_of(path)
    users = plain(lookup(frame, columns.user, path)).tolist()
    for row, one in enumerate(users):
        if is_missing(one):
            raise origin.refuse(
                f"column {columns.user!r} is empty", "every row needs its user", row
            )
    x = features_like(frame, trained.feature_names, columns, origin).toarray()
    _fill(x, trained, columns, origin)
    targets: list[Any] = [None] * frame.num_rows
    if columns.target in frame.column_names:
        targets = plain(frame.column(columns.target)).tolist()
    return _New([canonical(one) for one in users], x, targets, origin)


def _fill(x: NDArray[np.float64], trained: PerUser, columns: Columns, origin: Origin) -> None:
    """Gaps become 0 if the training's rule fills them; else they are refused."""
    bad = np.argwhere(~np.isfinite(x))
    if len(bad) and columns.impute == REFUSE:
        row, column = bad[0].tolist()
        raise origin.refuse(
            f"{trained.column_name(column)} is not a finite number", "fill it in", row
        )
    x[~np.isfinite(x)] = 0.0


def _by_user(users: Sequence[str]) -> Iterator[tuple[str, NDArray[np.intp]]]:
    found: dict[str, list[int]] = {}
    for row, name in enumerate(users):
        found.setdefault(name, []).append(row)
    for name, rows in found.items():
        yield name, np.array(rows, dtype=np.intp)


@dataclass(frozen=True, eq=False)
class _Models:
    """The personal models of a run.

    Args:
        problem: of the run.
        trained: everyone's rows.
        w: the published parameters.
        order: what was published beside them.
        new: the rows to predict.
    """

    problem: Problem
    trained: PerUser
    w: Vector
    order: Order | None
    new: _New

    def of_known(self, number: int, rows: NDArray[np.intp]) -> list[Prediction]:
        """By the model of a user who took part."""
        model = self._personal(self.trained, number)
        seen = own_scaled_new(self.trained.only([number]), self.new.x[rows])
        return self._predicted(seen, model, rows, TOOK_PART)

    def of_new(self, rows: NDArray[np.intp]) -> list[Prediction]:
        """By a model made from the rows whose target is known; w alone if there are none."""
        known = [row for row in rows.tolist() if not is_missing(self.new.targets[row])]
        if not known:
            self._refuse_amounts(int(rows[0]))
            own = _newcomer(self.trained, self.new, rows, labelled=False)
            model = self._personal(own, 0).shared_alone
            assert model is not None
            seen = own_scaled_new(own, self.new.x[rows])
            return self._predicted(seen, model, rows, SHARED)
        own = _newcomer(self.trained, self.new, np.array(known, dtype=np.intp), labelled=True)
        seen = own_scaled_new(own, self.new.x[rows])
        return self._predicted(seen, self._personal(own, 0), rows, NEW)

    def _refuse_amounts(self, row: int) -> None:
        if self.trained.task == "regression":
            raise self.new.origin.refuse(
                f"user {self.new.users[row]!r} is new and has no row with a target, and targets "
                "are learnt around each user's own mean: first",
                "add rows of that user with a known target",
                row,
            )

    def _personal(self, data: PerUser, number: int) -> Mixture:
        """The personal model of one user."""
        learner = linear_learner(
            data,
            number,
            batch_size=self.problem.batch_size,
            seed=self.problem.data_seed,
            shift=self.problem.target_shift,
        )
        if self.order is None:
            return learner.stepped_model(self.w).mixture
        variance = np.array(self.order.variance)
        return learner.personal_model(self.w, variance, self.order).mixture

    def _predicted(
        self, seen: PerUser, model: Mixture, rows: NDArray[np.intp], kind: str
    ) -> list[Prediction]:
        """The predictions for one user's new rows, which are all rows of ``seen``."""
        scores = model.predict(seen.seen(np.arange(len(rows))))
        found = []
        for row, score in zip(rows.tolist(), scores, strict=True):
            value = self._value(seen, score)
            number = row + self.new.origin.first_row
            found.append(Prediction(number, self.new.users[row], value, kind))
        return found

    def _value(self, seen: PerUser, score: Vector) -> float | str:
        if seen.task == "regression":
            amount = (score + self.problem.target_shift) * seen.units[0]
            if seen.own is not None:
                amount = amount + seen.own.centre[0]
            return float(amount[0])
        number = int(score.argmax())
        return seen.target_names[number] if seen.target_names else str(number)


def _newcomer(trained: PerUser, new: _New, rows: NDArray[np.intp], labelled: bool) -> PerUser:
    """A new user's rows as the only user's, scaled by themselves as everyone's were."""
    x = new.x[rows]
    y = 0 * trained.y[np.zeros(len(rows), dtype=np.intp)]  # of the right kind; w alone needs none
    if labelled:
        y = _targets(trained, new, rows)
    raw = replace(
        trained,
        x=x,
        y=y,
        test=np.zeros(len(rows), dtype=np.bool_),
        validation=None,
        offsets=np.array([0, len(rows)]),
        users=(new.users[int(rows[0])],),
        own=None,
    )
    if trained.own is None:
        return raw
    return scaled_alike(raw, trained.own)


def _targets(trained: PerUser, new: _New, rows: NDArray[np.intp]) -> NDArray[Any]:
    """Known targets: amounts, or class numbers by their names."""
    values = [new.targets[row] for row in rows.tolist()]
    if trained.task == "regression":
        return np.asarray(values, dtype=np.float64)
    if trained.task == "multi-label":
        raise new.origin.refuse(
            "new users cannot have several labels here", "leave rows of new users out", int(rows[0])
        )
    names = _names_of(trained)
    numbers = []
    for row, value in zip(rows.tolist(), values, strict=True):
        if canonical(value) not in names:
            raise new.origin.refuse(f"{value!r} is none of the classes", "correct it", row)
        numbers.append(names[canonical(value)])
    return np.array(numbers)


def _names_of(trained: PerUser) -> Mapping[str, int]:
    names = trained.target_names or tuple(str(number) for number in range(trained.outputs))
    return {canonical(name): number for number, name in enumerate(names)}
