"""Predictions by the personal models of a run, for users who took part and for new ones.

Simulations hold everyone's rows, so the model of a user who took part is worked out again from them
and from what was published. Somebody new gets one from rows of the new file whose target is known.
Either way nothing is released.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.lab.evaluation import delivery_order
from flwr_ppsgd.lab.features import as_numbers, as_texts, encode_columns
from flwr_ppsgd.lab.learners import linear_learner
from flwr_ppsgd.lab.loading import class_name
from flwr_ppsgd.lab.outputs import read_config, read_model
from flwr_ppsgd.lab.per_user import PerUser
from flwr_ppsgd.lab.problem import LINEAR, SYNTHETIC, Problem
from flwr_ppsgd.lab.scaling import own_scaled, own_scaled_new
from flwr_ppsgd.lab.schema import OWN_MEAN, Schema
from flwr_ppsgd.lab.tables import RawTable, read_table_file
from flwr_ppsgd.models.solve import Mixture
from flwr_ppsgd.wire import SCHEMA_HASH, Order

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
class _NewRows:
    """The new rows.

    Args:
        table: the columns of the file.
        users: of each row.
        x: as the file has them, in the order of the model's features; gaps are NaN.
        y: amounts or class numbers where they are known, else NaN.
    """

    table: RawTable
    users: list[str]
    x: NDArray[np.float64]
    y: NDArray[np.float64]


def predict_file(
    directory: Path, data: Path, user: str | None = None, schema: str | None = None
) -> list[Prediction]:
    """A prediction for each row of ``data``, in its order.

    Args:
        directory: of a run with a linear model on data of one's own.
        data: a .csv or .parquet file with the columns of the run's features.
        user: the column that names users; the run's own if None.
        schema: the file that the run was given, if any; it is checked against the model.
    """
    problem = _problem_of(directory)
    published = read_model(directory)
    found = problem.written_schema() if schema is None else Schema.read(Path(schema))
    digest = published.get(SCHEMA_HASH)
    if digest is None or digest.tobytes().hex() != found.sha256:
        raise ValueError(
            f"{schema or problem.schema or problem.data}: not the schema that the model in "
            f"{directory} was trained with (sha256 {found.sha256[:12]}…): give that one"
        )
    trained = problem.per_user()
    w = np.asarray(published["w"], dtype=np.float64).reshape(-1)
    new = _read_new_rows(data, trained, replace(found, user=user or found.user))
    task = "regression" if trained.task == "regression" else "classification"
    order = delivery_order(task, published)
    models = _PersonalModels(problem, trained, w, order, new)
    numbers = {name: number for number, name in enumerate(trained.users)}
    predictions: list[Prediction] = []
    for name, rows in _rows_by_user(new.users):
        if name in numbers:
            predictions += models.of_known(numbers[name], rows)
        else:
            predictions += models.of_new(rows)
    return sorted(predictions, key=lambda one: one.row)


def _problem_of(directory: Path) -> Problem:
    problem = Problem.of(read_config(directory)).found()
    if problem.data == SYNTHETIC or problem.model != LINEAR:
        raise ValueError(
            f"{directory}: predictions are for linear models on data of one's own: load w of other "
            "models into their module with PersonalModel"
        )
    problem.check_squared()
    return problem


def _read_new_rows(path: Path, trained: PerUser, schema: Schema) -> _NewRows:
    if path.suffix.lower() == ".npz" or not schema.feature_names():
        raise ValueError(
            f"{path}: new rows need columns with names, as those of {trained.source}: train on a "
            ".csv or .parquet file, and give one here"
        )
    table = read_table_file(path, None, schema.encoding)
    for column in schema.used_columns:
        table.column(column.name)
    words, codes = as_texts(table.column(schema.user))
    if (codes < 0).any():
        row = int(np.argmax(codes < 0))
        raise table.refuse(f"column {schema.user!r} is empty", "every row needs its user", row)
    x = encode_columns(table, schema)
    x = x.toarray() if hasattr(x, "toarray") else np.asarray(x, dtype=np.float64)
    users = [words[code] for code in codes.tolist()]
    return _NewRows(table, users, x, _known_targets(table, schema))


def _known_targets(table: RawTable, schema: Schema) -> NDArray[np.float64]:
    """Amounts, or class numbers; NaN where the target is not known."""
    (name, *others) = schema.target
    if name not in table.columns or others or schema.task == "multi-label":
        return np.full(table.rows, np.nan)
    values = table.columns[name]
    if schema.task == "regression":
        return as_numbers(values, table.decimal)
    words, codes = as_texts(values)
    places = {class_name(one): place for place, one in enumerate(schema.classes)}
    numbers = [float(places.get(class_name(word), np.nan)) for word in words]
    return np.array([*numbers, np.nan])[codes]


def _rows_by_user(users: Sequence[str]) -> Iterator[tuple[str, NDArray[np.intp]]]:
    found: dict[str, list[int]] = {}
    for row, name in enumerate(users):
        found.setdefault(name, []).append(row)
    for name, rows in found.items():
        yield name, np.array(rows, dtype=np.intp)


@dataclass(frozen=True, eq=False)
class _PersonalModels:
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
    new: _NewRows

    @property
    def first_row(self) -> int:
        """Below the header of a .csv rows are counted as lines, if each is one."""
        return 2 if self.new.table.lines else 0

    def of_known(self, number: int, rows: NDArray[np.intp]) -> list[Prediction]:
        """By the model of a user who took part."""
        model = self._personal(self.trained, number)
        x = self._fill_gaps(rows, self._own_means(number))
        seen = own_scaled_new(self.trained.only([number]), x)
        return self._predictions(seen, model, rows, TOOK_PART)

    def of_new(self, rows: NDArray[np.intp]) -> list[Prediction]:
        """By a model made from the rows whose target is known; w alone if there are none."""
        known = rows[np.isfinite(self.new.y[rows])]
        means = np.zeros(self.new.x.shape[1])
        if len(known) and self.trained.schema and self.trained.schema.missing == OWN_MEAN:
            there = np.isfinite(self.new.x[known])
            sums = np.where(there, self.new.x[known], 0.0).sum(axis=0)
            means = sums / np.maximum(there.sum(axis=0), 1)
        if not len(known):
            self._refuse_amounts(int(rows[0]))
        own = self._newcomer(known if len(known) else rows, means)
        seen = own_scaled_new(own, self._fill_gaps(rows, means))
        model = self._personal(own, 0)
        if len(known):
            return self._predictions(seen, model, rows, NEW)
        assert model.shared_alone is not None
        return self._predictions(seen, model.shared_alone, rows, SHARED)

    def _fill_gaps(self, rows: NDArray[np.intp], means: Vector) -> NDArray[np.float64]:
        """New rows, with these numbers in their gaps."""
        x = self.new.x[rows]
        return np.where(np.isfinite(x), x, means)

    def _own_means(self, number: int) -> Vector:
        """The means of a user's training rows, in the units of the source; 0 if the rule is so."""
        schema = self.trained.schema
        if schema is None or schema.missing != OWN_MEAN:
            return np.zeros(self.new.x.shape[1])
        raw = replace(self.problem, scale="none").per_user()
        rows = raw.rows(number, test=False)
        own = raw.x[rows]
        return np.asarray(own.sum(axis=0)).reshape(-1) / max(len(rows), 1)

    def _newcomer(self, rows: NDArray[np.intp], means: Vector) -> PerUser:
        """A new user's rows as the only user's, scaled by themselves as everyone's were."""
        y: NDArray[Any] = np.nan_to_num(self.new.y[rows])
        if self.trained.task == "classification":
            y = y.astype(np.int64)
        if self.trained.task == "multi-label":
            y = 0 * self.trained.y[np.zeros(len(rows), dtype=np.intp)]
        raw = replace(
            self.trained,
            x=self._fill_gaps(rows, means),
            y=y,
            test=np.zeros(len(rows), dtype=np.bool_),
            validation=None,
            offsets=np.array([0, len(rows)]),
            users=(self.new.users[int(rows[0])],),
            own=None,
        )
        return raw if self.trained.own is None else own_scaled(raw)

    def _refuse_amounts(self, row: int) -> None:
        if self.trained.task == "regression":
            raise self.new.table.refuse(
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

    def _predictions(
        self, seen: PerUser, model: Mixture, rows: NDArray[np.intp], kind: str
    ) -> list[Prediction]:
        """The predictions for one user's new rows, which are all rows of ``seen``."""
        scores = model.predict(seen.model_rows(np.arange(len(rows))))
        found = []
        for row, score in zip(rows.tolist(), scores, strict=True):
            value = self._value(seen, score)
            found.append(Prediction(self.first_row + row, self.new.users[row], value, kind))
        return found

    def _value(self, seen: PerUser, score: Vector) -> float | str:
        if seen.task == "regression":
            amount = (score + self.problem.target_shift) * seen.units[0]
            if seen.own is not None:
                amount = amount + seen.own.centre[0]
            return float(amount[0])
        number = int(score.argmax())
        return seen.target_names[number] if seen.target_names else str(number)
