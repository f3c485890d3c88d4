"""Everyone's data for the engines of linear models: finitely many rows, or fresh samples.

A user's gradient XᵀR lies in the span of the user's own rows, and so does θ_i. Engines keep θ_i in
*own coordinates*: an orthonormal basis Q_i of that span, of at most n_i directions. Lengths are the
same there, and nothing of size d is formed for each user.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.checks import require
from flwr_ppsgd.lab.engine import Indices
from flwr_ppsgd.lab.learners import user_measures
from flwr_ppsgd.lab.schema import TaskName
from flwr_ppsgd.lab.synthetic import Synthetic
from flwr_ppsgd.learner import minibatch_rows
from flwr_ppsgd.models.additive_linear import Loss, mean_losses

DType: TypeAlias = np.dtype[Any]
Floats: TypeAlias = NDArray[Any]  # float32 or float64
Features: TypeAlias = Floats | sparse.csr_array
RowsByUser: TypeAlias = tuple[Features, Floats, ArrayLike]  # the fields of ``UserRows``

LEAST_EIGENVALUE = 1e-14  # relative: smaller ones are rounding errors


@dataclass(frozen=True, eq=False)
class Batch:
    """The minibatches of some users, one after the other.

    Args:
        users: whose minibatches they are.
        counts: m_i, the number of samples of each user.
        x: samples × d.
        y: samples × K.
        own: for each user the same rows in own coordinates, m_i × r_i.
    """

    users: Indices
    counts: Indices
    x: Features
    y: Floats
    own: list[Floats]

    def slices(self) -> Iterator[tuple[slice, Floats]]:
        """(the samples, the same in own coordinates) of each user."""
        end = 0
        for own in self.own:
            start = end
            end += len(own)
            yield slice(start, end), own


class UserRows(NamedTuple):
    """Rows sorted by user: user i has offsets[i] … offsets[i+1]−1."""

    x: Features
    y: Floats
    offsets: Indices

    @classmethod
    def of(cls, x: Features, y: Floats, offsets: ArrayLike) -> Self:
        """With CSR for any sparse matrix, y as rows × K, and offsets as integers."""
        x = sparse.csr_array(x) if sparse.issparse(x) else x
        return cls(x, y.reshape(len(y), -1), np.asarray(offsets, dtype=np.intp))

    @property
    def sizes(self) -> Indices:
        """The number of rows of each user."""
        return np.diff(self.offsets)

    @property
    def measured_users(self) -> Indices:
        """The users who have rows here."""
        return np.flatnonzero(self.sizes)

    def rows_of(self, user: int) -> slice:
        """The rows of one user."""
        return slice(int(self.offsets[user]), int(self.offsets[user + 1]))

    def scores(self, w: Floats, at_once: int) -> Iterator[tuple[int, Floats]]:
        """(user, x w) of each measured user; users share products of about ``at_once`` rows."""
        groups = 1 + int(self.offsets[-1]) // at_once
        for group in np.array_split(self.measured_users, groups):
            if not len(group):
                continue
            rows = slice(int(self.offsets[group[0]]), int(self.offsets[group[-1] + 1]))
            together = np.asarray(self.x[rows] @ w)
            ends = np.cumsum(self.sizes[group])
            yield from zip(group.tolist(), np.split(together, ends[:-1]), strict=True)


class FinitePopulation:
    """Finitely many samples, one row each, sorted by user.

    Args:
        x: rows × d, an array or a sparse matrix.
        y: rows × K, real targets or one-hot rows.
        users: N + 1 offsets; user i has the rows users[i] … users[i+1]−1.
        batch_size: the number of rows in a minibatch; a user with fewer rows takes all of them.
        seed: decides which rows each user draws at each visit.
        loss: "squared" or "softmax".
        test: the rows on which users measure; None if nobody measures.
        validation: the rows on which settings are compared; None: on test rows.
        task: decides what users measure; None is classification if there is more than one output,
            and otherwise the loss alone.
        most_visits: the number of visits after which each user drops out; None: never.
        units: of each user's targets, in the units of RMSE; None: 1.
    """

    def __init__(
        self,
        x: Features,
        y: Floats,
        users: ArrayLike,
        *,
        batch_size: int,
        seed: int,
        loss: Loss = "squared",
        test: RowsByUser | None = None,
        validation: RowsByUser | None = None,
        task: TaskName | None = None,
        most_visits: Indices | None = None,
        units: Vector | None = None,
    ) -> None:
        self.rows = UserRows.of(x, y, users)
        self.x, self.y, self.offsets = self.rows
        self.sizes: Indices = self.rows.sizes
        rule = "every user needs at least one row"
        require(self.sizes.min() >= 1, rule, self.sizes.min(), "leave out users without rows")
        self.features = int(self.x.shape[1])
        self.outputs = int(self.y.shape[1])
        self.batch_size = batch_size
        self.seed = seed
        self.loss = loss
        self.task = task
        self.most_visits = most_visits
        self.units = np.ones(len(self.sizes)) if units is None else units
        self.counts: Indices = np.minimum(self.sizes, batch_size)  # m_i
        self.widths: Indices = np.minimum(self.sizes, self.features)  # r_i
        self.parts: dict[str, UserRows] = {}  # on which users measure
        for name, part in (("test", test), ("validation", validation)):
            if part is not None:
                self.parts[name] = UserRows.of(*part)
        self._coordinates: dict[tuple[int, DType], list[Floats]] = {}

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        """The memory of the rows, and of the same rows in own coordinates."""
        given = 0
        own = 0  # float64 numbers in own coordinates
        for rows in (self.rows, *self.parts.values()):
            given += array_bytes(rows.x) + array_bytes(rows.y)
            own += int((rows.sizes * self.widths).sum())
        return given + 8 * own

    def batch(self, users: Indices, visits: Indices, dtype: DType) -> Batch:
        """The minibatches of these users at these visits."""
        drawn = []
        own = []
        for user, visit in zip(users.tolist(), visits.tolist(), strict=True):
            rows = minibatch_rows(self.seed, user, visit, int(self.sizes[user]), self.batch_size)
            training, *_ = self.coordinates(user, dtype)
            drawn.append(self.offsets[user] + rows)
            own.append(training.take(rows, axis=0))
        rows = np.concatenate([*drawn, np.zeros(0, np.intp)])
        x = self.x[rows].astype(dtype, copy=False)
        y = self.y[rows].astype(dtype, copy=False)
        return Batch(users, self.counts[users], x, y, own)

    def basis(self, user: int) -> Floats:
        """Q_i: θ_i is Q_i times what it is in own coordinates, d × r_i."""
        own = _to_dense(self.x[self.rows.rows_of(user)]).astype(np.float64)
        if len(own) >= self.features:
            return np.eye(self.features)
        return own.T @ _inverse_root(own @ own.T)

    def coordinates(self, user: int, dtype: DType) -> list[Floats]:
        """One user's rows in own coordinates, computed once: the training rows, n_i × r_i, then
        those of each part on which the user measures.

        If the user has fewer rows than columns, Q = XᵀB with B of ``_inverse_root``, and only
        products of rows with rows are formed.
        """
        key = (user, dtype)
        if key in self._coordinates:
            return self._coordinates[key]
        own = self.x[self.rows.rows_of(user)]
        every = [own, *(part.x[part.rows_of(user)] for part in self.parts.values())]
        if own.shape[0] >= self.features:
            found = [_to_dense(rows) for rows in every]
        else:
            products = [_to_dense(rows.astype(np.float64) @ own.T) for rows in every]
            root = _inverse_root(products[0])
            found = [product @ root for product in products]
        self._coordinates[key] = [rows.astype(dtype) for rows in found]
        return self._coordinates[key]

    def user_measures(self, name: str, user: int, scores: Floats) -> dict[str, Vector]:
        """One user's measures on the part of that name: scores are rows × settings × K."""
        part = self.parts[name]
        y = part.y[part.rows_of(user)]
        if self.task is None and y.shape[1] == 1:
            return {"loss": mean_losses(scores, y[:, None, :], self.loss)}
        task = self.task or "classification"
        return user_measures(scores, y, self.loss, task, unit=float(self.units[user]))


class FreshPopulation:
    """The synthetic problem: every minibatch is new, and the excess risk has a closed form.

    A user has no fixed rows, so own coordinates are the features themselves.

    Args:
        problem: the optimum of each user, and how samples are drawn.
        batch_size: the number of samples in a minibatch.
    """

    outputs = 1
    loss: Loss = "squared"
    most_visits: Indices | None = None

    def __init__(self, problem: Synthetic, batch_size: int) -> None:
        self.problem = problem
        self.batch_size = batch_size
        self.features = problem.optima.shape[1]
        self.counts: Indices = np.full(len(problem.optima), batch_size)
        self.widths: Indices = np.full(len(problem.optima), self.features)
        self.bytes = int(problem.optima.nbytes)

    def __len__(self) -> int:
        return len(self.problem.optima)

    def batch(self, users: Indices, visits: Indices, dtype: DType) -> Batch:
        """Fresh samples of these users."""
        drawn_x, drawn_y = self.problem.batches(users, visits, self.batch_size)
        x = drawn_x.astype(dtype, copy=False)  # users × m × d
        y = drawn_y.astype(dtype, copy=False)  # users × m × 1
        rows = x.reshape(-1, self.features)
        return Batch(users, self.counts[users], rows, y.reshape(-1, 1), list(x))

    def basis(self, user: int) -> Floats:  # noqa: ARG002 - the same for every user
        """The features themselves."""
        return np.eye(self.features)


Population: TypeAlias = FinitePopulation | FreshPopulation


def _inverse_root(gram: Floats) -> Floats:
    """B with B BᵀK = projection on the range of K = XXᵀ: XᵀB is an orthonormal basis of the rows.

    Directions whose eigenvalue is a rounding error become zero columns.
    """
    values, vectors = np.linalg.eigh(gram)
    largest = max(values[-1], np.finfo(np.float64).tiny)
    kept = values > LEAST_EIGENVALUE * largest
    scales = np.zeros_like(values)
    scales[kept] = 1 / np.sqrt(values[kept])
    return np.asarray(vectors * scales)


def _to_dense(x: Features) -> Floats:
    return np.asarray(x.toarray() if isinstance(x, sparse.csr_array) else x)


def array_bytes(x: Features) -> int:
    """The memory of an array or a sparse matrix."""
    if isinstance(x, sparse.csr_array):
        return int(x.data.nbytes + x.indices.nbytes + x.indptr.nbytes)
    return int(x.nbytes)
