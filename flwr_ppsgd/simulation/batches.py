"""Everyone's data at once: the minibatches of a whole cohort, and measures over all users.

The rows a user draws are those of ``datasets``: decided by (seed, user, visit) alone, so that every engine, and every
setting of a sweep, sees the same ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from flwr_ppsgd.algorithm import Cohort, Vector
from flwr_ppsgd.data.learners import user_measures
from flwr_ppsgd.data.per_user import Task
from flwr_ppsgd.data.synthetic import Synthetic, minibatch_rows
from flwr_ppsgd.models.split import Loss, Matrix, mean_losses
from flwr_ppsgd.simulation.measures import summary

Features: TypeAlias = NDArray[Any] | sparse.csr_array
Indices: TypeAlias = NDArray[np.intp]

TEST_ROWS_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class Batch:
    """The minibatches of some users, each padded with zero rows to the same length m.

    x: users × m × d, or a sparse matrix of users·m rows. y: users × m × K. counts: m_i. rows: which rows of the table
    they are, users × m; None where samples are always fresh. padded: whether any m_i is less than m.
    """

    users: Indices
    x: Features
    y: NDArray[Any]
    counts: Indices
    rows: Indices | None = None
    padded: bool = False

    @property
    def flat(self) -> Features:
        """x with one row a sample."""
        return self.x if isinstance(self.x, sparse.csr_array) else self.x.reshape(-1, self.x.shape[-1])

    def dense(self) -> NDArray[Any]:
        """x as users × m × d."""
        dense = self.x.toarray() if isinstance(self.x, sparse.csr_array) else self.x
        return np.asarray(dense).reshape(*self.y.shape[:2], -1)

    def present(self, padded: NDArray[Any]) -> NDArray[Any]:
        """Of users × m × … what belongs to samples, one row each."""
        if not self.padded:
            return padded.reshape(-1, *padded.shape[2:])
        return padded[np.arange(padded.shape[1]) < self.counts[:, None]]

    def gram(self) -> NDArray[Any]:
        """X_i X_iᵀ of each user: users × m × m."""
        if isinstance(self.x, sparse.csr_array):
            m = self.y.shape[1]
            parts = (self.x[start : start + m] for start in range(0, self.x.shape[0], m))
            return np.stack([(part @ part.T).toarray() for part in parts])
        return np.asarray(np.matmul(self.x, self.x.transpose(0, 2, 1)))


class Scratch:
    """Memory for one batch at a time, used again for the next: fresh memory would cost more than the copy."""

    def __init__(self) -> None:
        self._kept: dict[np.dtype[Any], NDArray[Any]] = {}

    def __call__(self, rows: int, columns: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """rows × columns numbers; whatever was given before in this dtype is overwritten."""
        if dtype not in self._kept or self._kept[dtype].size < rows * columns:
            self._kept[dtype] = np.empty(rows * columns, dtype)
        return self._kept[dtype][: rows * columns].reshape(rows, columns)


def drawn(cohort: Cohort, uniforms: Vector, visits: Indices, most_visits: Indices | None) -> Indices:
    """The members of a cohort. A user who has used up the visits drops out, and others take the place.

    Who is left tells how many samples users have: simulation only, as in the paper's experiments.
    """
    if most_visits is None:
        return cohort.members(uniforms)
    left = visits < most_visits
    chosen = cohort.members(np.where(left, uniforms, np.inf))
    return chosen[left[chosen]]


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
    most_visits: Indices | None

    @property
    def bytes(self) -> int:
        """That the data take in memory."""
        ...

    def __len__(self) -> int: ...

    def batch(self, users: Indices, visits: Indices, dtype: np.dtype[Any], scratch: Scratch | None = None) -> Batch:
        """The minibatches of these visits; its x may stand in ``scratch`` where that is given."""
        ...

    def measures(self, fitted: Fitted, settings: int) -> dict[str, Vector]:
        """Each measure of every setting: a mean over users, weighted by their number of examples."""
        ...

    def by_user(self, fitted: Fitted, settings: int) -> dict[str, NDArray[Any]]:
        """Each measure, users who are measured × settings; nothing where users are not told apart."""
        ...


class Table:
    """Rows of finitely many samples, sorted by user.

    x: rows × d, an array or a sparse matrix. y: rows × K, real targets or one-hot rows. users: N + 1 offsets, user i
    has the rows users[i] … users[i+1]−1. test: the same three of the rows on which users measure. task: decides what
    they measure; where it is not given, classes if there is more than one output. most_visits: after so many a user
    drops out; None: never.
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
        task: Task | None = None,
        most_visits: Indices | None = None,
    ) -> None:
        self.x = sparse.csr_array(x) if sparse.issparse(x) else x
        self.y = y.reshape(len(y), -1)
        self.offsets: Indices = np.asarray(users, dtype=np.intp)
        self.sizes: Indices = np.diff(self.offsets)
        if len(self.sizes) < 1 or self.offsets[0] != 0 or self.offsets[-1] != len(self.y) or self.sizes.min() < 1:
            raise ValueError(f"every user needs at least one row, and the offsets of users must end at {len(self.y)}")
        self.features, self.outputs = int(self.x.shape[1]), int(self.y.shape[1])
        self.batch_size, self.seed, self.loss = batch_size, seed, loss
        self._even = bool(self.sizes.min() >= batch_size)  # every minibatch is whole
        self._test = None if test is None else (test[0], test[1], np.asarray(test[2], dtype=np.intp))
        self.task, self.most_visits = task, most_visits

    @property
    def bytes(self) -> int:
        tested = self._test[:2] if self._test else ()
        return sum(map(_bytes, (self.x, self.y, *tested)))

    def __len__(self) -> int:
        return len(self.sizes)

    def own(self, user: int) -> Features:
        """All rows of one user."""
        return self.x[self.offsets[user] : self.offsets[user + 1]]

    def batch(self, users: Indices, visits: Indices, dtype: np.dtype[Any], scratch: Scratch | None = None) -> Batch:
        sizes = self.sizes[users]
        counts = np.minimum(self.batch_size, sizes)
        longest = self.batch_size if self._even else int(counts.max(initial=0))
        rows = np.zeros((len(users), longest), dtype=np.intp)
        for row, user, visit, size in zip(rows, users.tolist(), visits.tolist(), sizes.tolist(), strict=True):
            own = minibatch_rows(self.seed, user, visit, size, self.batch_size)
            row[: len(own)] = own
        rows += self.offsets[users][:, None]
        x, y = self._taken(rows.reshape(-1), dtype, scratch or Scratch()), self.y[rows].astype(dtype, copy=False)
        padded = not self._even and int(counts.min(initial=longest)) < longest
        if padded:
            missing = np.arange(longest) >= counts[:, None]
            x, y[missing] = _without(x, missing.reshape(-1)), 0.0
        return Batch(users, x if sparse.issparse(x) else x.reshape(*rows.shape, -1), y, counts, rows, padded)

    def _taken(self, rows: Indices, dtype: np.dtype[Any], scratch: Scratch) -> Features:
        """Rows of x in this dtype."""
        if isinstance(self.x, sparse.csr_array):
            return self.x[rows].astype(dtype)
        taken = np.take(self.x, rows, axis=0, out=scratch(len(rows), self.features, self.x.dtype), mode="clip")
        if taken.dtype == dtype:
            return taken
        converted = scratch(len(rows), self.features, dtype)
        np.copyto(converted, taken, casting="unsafe")
        return converted

    def measures(self, fitted: Fitted, settings: int) -> dict[str, Vector]:
        """On the users' test rows: means over users, weighted by their training samples, and the spread over users."""
        return summary(self.by_user(fitted, settings), self.sizes[self.measured].astype(np.float64))

    @property
    def measured(self) -> Indices:
        """The users who have test rows."""
        return np.flatnonzero(np.diff(self._test[2])) if self._test else np.zeros(0, dtype=np.intp)

    def by_user(self, fitted: Fitted, settings: int) -> dict[str, NDArray[Any]]:
        """Each measure, users who are measured × settings."""
        found: dict[str, list[Vector]] = {}
        w = fitted.shared()
        for user, rows, scores in self._test_scores(w):
            fitted.add_personal_scores(user, rows, scores)
            for name, values in self.user_measures(scores.reshape(len(scores), settings, -1), user).items():
                found.setdefault(name, []).append(values)
        return {name: np.array(values) for name, values in found.items()}

    def _test_scores(self, w: NDArray[Any]) -> Iterator[tuple[int, Features, NDArray[Any]]]:
        """(user, x, x w) of each user who is measured; several users share one product, which reads w once."""
        groups = 1 + (int(self._test[2][-1]) if self._test else 0) // TEST_ROWS_AT_ONCE
        for users in np.array_split(self.measured, groups):
            if len(users):
                own = [self.test_rows(user)[0] for user in users.tolist()]
                rows = sparse.vstack(own, format="csr") if sparse.issparse(own[0]) else np.concatenate(own)
                scores = np.split(np.asarray(rows @ w), np.cumsum([x.shape[0] for x in own])[:-1])
                yield from zip(users.tolist(), own, scores, strict=True)

    def test_rows(self, user: int) -> tuple[Features, Matrix]:
        """(x, y) of one user's test part."""
        assert self._test is not None
        x, y, offsets = self._test
        own = slice(int(offsets[user]), int(offsets[user + 1]))
        return x[own], y[own]

    def user_measures(self, scores: NDArray[Any], user: int) -> dict[str, Vector]:
        """What one user measures on the test part: scores are rows × settings × K."""
        y = self.test_rows(user)[1]
        if self.task is not None or y.shape[1] > 1:
            return user_measures(scores, y, self.loss, self.task or "classification")
        return {"loss": mean_losses(scores, y[:, None, :], self.loss)}


def _bytes(x: Features) -> int:
    if isinstance(x, sparse.csr_array):
        return int(x.data.nbytes + x.indices.nbytes + x.indptr.nbytes)
    return int(x.nbytes)


def _without(x: Features, missing: NDArray[np.bool_]) -> Features:
    """x with these rows set to zero."""
    if isinstance(x, sparse.csr_array):
        return sparse.csr_array(sparse.diags_array((~missing).astype(x.dtype)) @ x)
    x[missing] = 0.0
    return x


class Fresh:
    """The synthetic problem: every minibatch is new, and the excess risk has a closed form."""

    outputs = 1
    loss: Loss = "squared"
    most_visits: Indices | None = None

    def __init__(self, problem: Synthetic, batch_size: int) -> None:
        self.problem, self.batch_size = problem, batch_size
        self.features = problem.optima.shape[1]

    @property
    def bytes(self) -> int:
        return int(self.problem.optima.nbytes)

    def __len__(self) -> int:
        return len(self.problem.optima)

    def batch(
        self,
        users: Indices,
        visits: Indices,
        dtype: np.dtype[Any],
        scratch: Scratch | None = None,  # noqa: ARG002
    ) -> Batch:
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

    def by_user(self, fitted: Fitted, settings: int) -> dict[str, NDArray[Any]]:  # noqa: ARG002
        """Users differ by chance alone here."""
        return {}
