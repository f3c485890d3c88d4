"""Everyone's data at once: the minibatches of a whole cohort, and measures over all users.

The rows a user draws are those of ``datasets``: decided by (seed, user, visit) alone, so that every engine, and every
setting of a sweep, sees the same ones.
"""

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.datasets import Synthetic, minibatch_rows
from flwr_ppsgd.models import Loss, Matrix, mean_losses

Features: TypeAlias = NDArray[Any] | sparse.csr_array
Indices: TypeAlias = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Batch:
    """The minibatches of some users, each padded with zero rows to the same length m.

    x: users × m × d, or a sparse matrix of users·m rows. y: users × m × K. counts: m_i. rows: which rows of the table
    they are, users × m; None where samples are always fresh.
    """

    users: Indices
    x: Features
    y: NDArray[Any]
    counts: Indices
    rows: Indices | None = None

    @property
    def flat(self) -> Features:
        """x with one row a sample."""
        return self.x if isinstance(self.x, sparse.csr_array) else self.x.reshape(-1, self.x.shape[-1])

    def dense(self) -> NDArray[Any]:
        """x as users × m × d."""
        dense = self.x.toarray() if isinstance(self.x, sparse.csr_array) else self.x
        return np.asarray(dense).reshape(*self.y.shape[:2], -1)

    def gram(self) -> NDArray[Any]:
        """X_i X_iᵀ of each user: users × m × m."""
        if isinstance(self.x, sparse.csr_array):
            m = self.y.shape[1]
            parts = (self.x[start : start + m] for start in range(0, self.x.shape[0], m))
            return np.stack([(part @ part.T).toarray() for part in parts])
        return np.asarray(np.matmul(self.x, self.x.transpose(0, 2, 1)))


class Fitted(Protocol):
    """The parameters of many settings side by side: one column for each (setting, output)."""

    def shared(self) -> NDArray[Any]:
        """w of every setting: d × columns."""
        ...

    def add_personal(self, user: int, out: NDArray[Any]) -> None:
        """out += θ_i of every setting, d × columns."""
        ...

    def add_personal_scores(self, user: int, x: Features, out: NDArray[Any]) -> None:
        """out += x θ_i of every setting, for the user's test rows x."""
        ...


class Population(Protocol):
    """What the cohort engine needs to know of everyone's data."""

    features: int
    outputs: int
    batch_size: int
    loss: Loss

    def __len__(self) -> int: ...

    def batch(self, users: Indices, visits: Indices, dtype: np.dtype[Any]) -> Batch: ...

    def measures(self, fitted: Fitted, settings: int) -> dict[str, Vector]:
        """Each measure of every setting: a mean over users, weighted by their number of examples."""
        ...


class Table:
    """Rows of finitely many samples, sorted by user.

    x: rows × d, an array or a sparse matrix. y: rows × K, real targets or one-hot rows. users: N + 1 offsets, user i
    has the rows users[i] … users[i+1]−1. test: the same three of the rows on which users measure.
    """

    def __init__(
        self,
        x: Features,
        y: NDArray[Any],
        users: ArrayLike,
        *,
        batch_size: int,
        seed: int,
        loss: Loss = "squared",
        test: tuple[Features, NDArray[Any], ArrayLike] | None = None,
    ) -> None:
        self.x = sparse.csr_array(x) if sparse.issparse(x) else x
        self.y = y.reshape(len(y), -1)
        self.offsets: Indices = np.asarray(users, dtype=np.intp)
        self.sizes: Indices = np.diff(self.offsets)
        if len(self.sizes) < 1 or self.offsets[0] != 0 or self.offsets[-1] != len(self.y) or self.sizes.min() < 1:
            raise ValueError(f"every user needs at least one row, and the offsets of users must end at {len(self.y)}")
        self.features, self.outputs = int(self.x.shape[1]), int(self.y.shape[1])
        self.batch_size, self.seed, self.loss = batch_size, seed, loss
        self._test = test
        self._buffers: dict[np.dtype[Any], NDArray[Any]] = {}

    def __len__(self) -> int:
        return len(self.sizes)

    def own(self, user: int) -> Features:
        """All rows of one user."""
        return self.x[self.offsets[user] : self.offsets[user + 1]]

    def batch(self, users: Indices, visits: Indices, dtype: np.dtype[Any]) -> Batch:
        """x stands in memory that the next batch will use again."""
        sizes, starts = self.sizes[users], self.offsets[users]
        counts = np.minimum(self.batch_size, sizes)
        longest = int(counts.max(initial=0))
        rows = np.zeros((len(users), longest), dtype=np.intp)
        drawn = zip(rows, users.tolist(), visits.tolist(), sizes.tolist(), starts.tolist(), strict=True)
        for row, user, visit, size, start in drawn:
            own = minibatch_rows(self.seed, user, visit, size, self.batch_size)
            row[: len(own)] = own
            row += start
        x, y = self._taken(rows.reshape(-1), dtype), self.y[rows].astype(dtype)
        if counts.min(initial=longest) < longest:
            missing = np.arange(longest) >= counts[:, None]
            x, y[missing] = _without(x, missing.reshape(-1)), 0.0
        return Batch(users, x if sparse.issparse(x) else x.reshape(*rows.shape, -1), y, counts, rows)

    def _taken(self, rows: Indices, dtype: np.dtype[Any]) -> Features:
        """Rows of x in this dtype. Fresh memory for each batch would cost more than the copy."""
        if isinstance(self.x, sparse.csr_array):
            return self.x[rows].astype(dtype)
        taken = np.take(self.x, rows, axis=0, out=self._scratch(len(rows), self.x.dtype), mode="clip")
        if taken.dtype == dtype:
            return taken
        converted = self._scratch(len(rows), dtype)
        np.copyto(converted, taken, casting="unsafe")
        return converted

    def _scratch(self, rows: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        kept = self._buffers.get(dtype)
        if kept is None or len(kept) < rows:
            self._buffers[dtype] = kept = np.empty((rows, self.features), dtype)
        return kept[:rows]

    def measures(self, fitted: Fitted, settings: int) -> dict[str, Vector]:
        """Mean loss, and accuracy where there are classes to tell apart, on the users' test rows."""
        if self._test is None:
            return {}
        x, y, offsets = self._test[0], self._test[1], np.asarray(self._test[2], dtype=np.intp)
        w = fitted.shared()
        sums: dict[str, Vector] = {}
        measured = [user for user in range(len(self)) if offsets[user] < offsets[user + 1]]
        for user in measured:
            own = slice(int(offsets[user]), int(offsets[user + 1]))
            rows = x[own].astype(w.dtype)
            scores = rows @ w
            fitted.add_personal_scores(user, rows, scores)
            for name, value in _measures(scores.reshape(len(scores), settings, -1), y[own], self.loss).items():
                sums[name] = sums.get(name, 0.0) + self.sizes[user] * value
        total = self.sizes[measured].sum()
        return {name: value / total for name, value in sums.items()}


def _without(x: Features, missing: NDArray[np.bool_]) -> Features:
    """x with these rows set to zero."""
    if isinstance(x, sparse.csr_array):
        return sparse.csr_array(sparse.diags_array(~missing * 1.0) @ x)
    x[missing] = 0.0
    return x


def _measures(scores: NDArray[Any], y: Matrix, loss: Loss) -> dict[str, Vector]:
    """Of one user: scores are rows × settings × K."""
    measures = {"loss": mean_losses(scores, y[:, None, :], loss)}
    if y.shape[1] > 1:
        measures["accuracy"] = (scores.argmax(axis=2) == y.argmax(axis=1)[:, None]).mean(axis=0)
    return measures


class Fresh:
    """The synthetic problem: every minibatch is new, and the excess risk has a closed form."""

    outputs = 1
    loss: Loss = "squared"

    def __init__(self, problem: Synthetic, batch_size: int) -> None:
        self.problem, self.batch_size = problem, batch_size
        self.features = problem.optima.shape[1]

    def __len__(self) -> int:
        return len(self.problem.optima)

    def batch(self, users: Indices, visits: Indices, dtype: np.dtype[Any]) -> Batch:
        x, y = self.problem.batches(users, visits, self.batch_size)
        counts = np.full(len(users), self.batch_size)
        return Batch(users, x.astype(dtype, copy=False), y.astype(dtype, copy=False), counts)

    def measures(self, fitted: Fitted, settings: int) -> dict[str, Vector]:
        """(1/N)·Σ_i ‖w + θ_i − θ_i*‖²_Σ."""
        w = fitted.shared()
        squares = np.zeros((self.features, settings))
        for user, optimum in enumerate(self.problem.optima):
            distance = w - optimum[:, None]
            fitted.add_personal(user, distance)
            distance *= distance
            squares += distance
        return {"excess_risk": self.problem.variances @ squares / len(self)}
