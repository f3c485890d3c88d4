"""Predictions by the personal models of a run, for users who took part and for new ones.

Simulations hold everyone's rows, so the model of a user who took part is computed again from them
and from the published arrays. A new user's model is made from the rows of the new file whose target
is known. Either way nothing is released.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.lab.evaluation import delivery_order
from flwr_ppsgd.lab.features import as_numbers, encode_columns, map_texts
from flwr_ppsgd.lab.learners import linear_learner
from flwr_ppsgd.lab.loading import class_numbers
from flwr_ppsgd.lab.outputs import read_config, read_model
from flwr_ppsgd.lab.per_user import Indices, PerUser
from flwr_ppsgd.lab.problem import LINEAR, SYNTHETIC, Problem
from flwr_ppsgd.lab.scaling import scale_new_rows, scale_own_rows
from flwr_ppsgd.lab.schema import OWN_MEAN, Schema
from flwr_ppsgd.lab.tables import UTF_8, RawTable, read_table_file
from flwr_ppsgd.learner import SHARED as SHARED_PREFIX
from flwr_ppsgd.models.additive_linear import MixtureModel
from flwr_ppsgd.models.mixture import Mixture
from flwr_ppsgd.wire import SCHEMA_HASH

if TYPE_CHECKING:
    import pandas as pd

TOOK_PART = "personal"
NEW = "new user"
SHARED = "shared alone"


def predict_file(
    directory: Path, data: Path, user: str | None = None, schema: str | None = None
) -> "pd.DataFrame":
    """A prediction for each row of ``data``, in its order: row, user, prediction and model.

    Rows are numbered as in messages, and the model is "personal", "new user" or "shared alone".

    Args:
        directory: of a run with a linear model on data of one's own.
        data: a .csv or .parquet file with the columns of the run's features.
        user: the column that names users; the run's own if None.
        schema: the file that the run was given, if any; it is checked against the model.
    """
    import pandas as pd

    models = _PersonalModels(directory, data, user, schema)
    numbers = {name: number for number, name in enumerate(models.trained.users)}
    first = 2 if models.table.lines else 0  # the line below the header of a .csv
    users = pd.Series(models.users)
    parts = []
    for name, rows in users.groupby(users).indices.items():
        if name in numbers:
            values = models.predict_known(numbers[name], rows)
            model = TOOK_PART
        else:
            values, model = models.predict_new(name, rows)
        found = {"row": rows + first, "user": name, "prediction": values, "model": model}
        parts.append(pd.DataFrame(found))
    return pd.concat(parts).sort_values("row")


class _PersonalModels:
    """The personal models of a run, and the new rows to predict by them.

    Args:
        directory: of the run.
        data: the file of new rows.
        user: its column of users, if it is not the run's.
        schema: the file that the run was given, if any.
    """

    def __init__(self, directory: Path, data: Path, user: str | None, schema: str | None) -> None:
        problem = Problem.of(read_config(directory)).with_checksums()
        if problem.data == SYNTHETIC or problem.model != LINEAR:
            raise ValueError(
                f"{directory}: predictions are for linear models on data of one's own: load w of "
                "other models into their module with PersonalModel"
            )
        problem.check_squared()
        published = read_model(directory)
        self.schema = problem.written_schema() if schema is None else Schema.read(Path(schema))
        digest = published.get(SCHEMA_HASH)
        if digest is None or digest.tobytes().hex() != self.schema.sha256:
            raise ValueError(
                f"{schema or problem.schema or problem.data}: not the schema that the model in "
                f"{directory} was trained with (sha256 {self.schema.sha256[:12]}…): give that one"
            )
        self.problem = problem
        self.trained = problem.per_user()
        self.w: Vector = np.asarray(published["w"], dtype=np.float64).reshape(-1)
        task = "regression" if self.trained.task == "regression" else "classification"
        self.order = delivery_order(task, published)

        named = replace(self.schema, user=user or self.schema.user)
        if data.suffix.lower() == ".npz" or not named.feature_names():
            raise ValueError(
                f"{data}: new rows need columns with names, as those of {self.trained.source}: "
                "train on a .csv or .parquet file, and give one here"
            )
        # a byte order mark of the new file may differ from the run's
        encoding = "" if named.encoding in (UTF_8, "utf-16") else named.encoding
        self.table = read_table_file(data, None, encoding)
        if not self.table.rows:
            raise self.table.refuse("there are no rows", "give at least one")
        for column in named.used_columns:
            self.table.column(column.name)
        self.users = _users_of(self.table, named.user)
        x = encode_columns(self.table, named)
        self.x: NDArray[np.float64] = x.toarray() if hasattr(x, "toarray") else np.asarray(x)
        self.y = _known_targets(self.table, named)

    def predict_known(self, number: int, rows: Indices) -> list[float | str]:
        """Predictions by the model of a user who took part."""
        means = np.zeros(self.x.shape[1])
        if self.schema.missing == OWN_MEAN:
            raw = replace(self.problem, scale="none").per_user()
            own = raw.rows(number, test=False)
            sums = np.asarray(raw.x[own].sum(axis=0))
            means = sums.reshape(-1) / max(len(own), 1)
        model = self._model(self.trained, number).mixture
        return self._predictions(self.trained.only([number]), model, rows, means)

    def predict_new(self, name: str, rows: Indices) -> tuple[list[float | str], str]:
        """Predictions by a model from the rows with a known target, or by w alone without any; and
        which of the two it was."""
        known = rows[np.isfinite(self.y[rows])]
        if not len(known) and self.trained.task == "regression":
            raise self.table.refuse(
                f"user {name!r} is new and has no row with a target, and targets are learnt around "
                "each user's own mean: first",
                "add rows of that user with a known target",
                int(rows[0]),
            )
        means = np.zeros(self.x.shape[1])
        if len(known) and self.schema.missing == OWN_MEAN:
            there = np.isfinite(self.x[known])
            sums = np.where(there, self.x[known], 0.0).sum(axis=0)
            means = sums / np.maximum(there.sum(axis=0), 1)
        own = self._new_user(known if len(known) else rows, means)
        model = self._model(own, 0)
        if len(known):
            return self._predictions(own, model.mixture, rows, means), NEW
        shared_alone = model.models[SHARED_PREFIX]
        return self._predictions(own, shared_alone, rows, means), SHARED

    def _new_user(self, rows: Indices, means: Vector) -> PerUser:
        """A new user alone, whose rows are scaled by themselves as everyone's were."""
        y: Any = np.nan_to_num(self.y[rows])
        if self.trained.task == "classification":
            y = y.astype(np.int64)
        if self.trained.task == "multi-label":
            y = 0 * self.trained.y[np.zeros(len(rows), dtype=np.intp)]
        x = self._fill_means(rows, means)
        raw = replace(self.trained.with_rows(x, y), own=None)
        return raw if self.trained.own is None else scale_own_rows(raw)

    def _fill_means(self, rows: Indices, means: Vector) -> NDArray[np.float64]:
        """New rows with these means in their gaps."""
        return np.where(np.isfinite(self.x[rows]), self.x[rows], means)

    def _model(self, data: PerUser, number: int) -> MixtureModel:
        """The personal model of one user, and w alone."""
        learner = linear_learner(
            data,
            number,
            batch_size=self.problem.batch_size,
            seed=self.problem.data_seed,
            shift=self.problem.target_shift,
        )
        if self.order is None:
            return learner.stepped_model(self.w)
        variance = np.array(self.order.variance)
        return learner.personal_model(self.w, variance, self.order)

    def _predictions(
        self, own: PerUser, model: Mixture, rows: Indices, means: Vector
    ) -> list[float | str]:
        """A model's predictions for new rows of the only user in ``own``."""
        seen = scale_new_rows(own, self._fill_means(rows, means))
        x = seen.model_rows(np.arange(len(rows)))
        scores = model.predict(x)
        if own.task == "regression":
            amounts = (scores[:, 0] + self.problem.target_shift) * own.units[0]
            if own.own is not None:
                amounts = amounts + own.own.centre[0, 0]
            return [float(amount) for amount in amounts]
        return [own.schema.classes[place] for place in scores.argmax(axis=1)]


def _users_of(table: RawTable, column: str) -> list[str]:
    """The user of each row."""
    users = map_texts(table.column(column), str, "")
    if (users == "").any():
        row = int(np.argmax(users == ""))
        raise table.refuse(f"column {column!r} is empty", "every row needs its user", row)
    return [str(user) for user in users]


def _known_targets(table: RawTable, schema: Schema) -> NDArray[np.float64]:
    """Amounts, or class numbers; NaN where the target is not known."""
    (name, *others) = schema.target
    if name not in table.columns or others or schema.task == "multi-label":
        return np.full(table.rows, np.nan)
    if schema.task == "regression":
        return as_numbers(table.columns[name], table.decimal)
    numbers = class_numbers(table.columns[name], schema.classes)
    return np.where(numbers < 0, np.nan, numbers)
