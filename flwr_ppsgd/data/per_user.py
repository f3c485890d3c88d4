"""Everyone's rows in one value."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy import sparse

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.models.split import Matrix

Task: TypeAlias = Literal["classification", "multi-label", "regression"]
Table: TypeAlias = Any  # an array or a scipy.sparse.csr_array, which has no types
Indices: TypeAlias = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class PerUser:
    """Rows of many users, sorted by user: user i has the rows offsets[i] … offsets[i+1]−1.

    source: where they come from, for messages.
    x: rows × d as they are stored (bytes stay bytes), dense or CSR. A model sees (x − mean) / std, and a last column
        of ones where ``bias`` is set.
    y: class numbers 0 … K−1; real numbers, one or more a row; or rows × K of zeros and ones in CSR (multi-label).
    test: which rows belong to the test part of their user.
    users: each user's label in the source.
    outputs: K.
    notes: what a reader decided or left out, in sentences: print them.
    """

    source: str
    x: Table
    y: Table
    test: NDArray[np.bool_]
    offsets: Indices
    users: tuple[int | str, ...]
    task: Task
    outputs: int
    mean: Vector | float = 0.0
    std: Vector | float = 1.0
    bias: bool = False
    feature_names: tuple[str, ...] = ()
    target_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """The number of users."""
        return len(self.users)

    @property
    def features(self) -> int:
        """What a model sees of a row: d, and one more with a bias column."""
        return int(self.x.shape[1]) + self.bias

    @property
    def is_sparse(self) -> bool:
        return bool(sparse.issparse(self.x))

    @property
    def train_sizes(self) -> Indices:
        """n_i, the training rows of each user."""
        return np.diff(self._offsets_of(False))

    @property
    def test_sizes(self) -> Indices:
        return np.diff(self._offsets_of(True))

    def rows(self, user: int, *, test: bool) -> Indices:
        """The rows of one user's training or test part, in the order of the source."""
        if not 0 <= user < len(self):
            raise ValueError(f"{self.source}: there is no user number {user}: they go from 0 to {len(self) - 1}")
        start, stop = int(self.offsets[user]), int(self.offsets[user + 1])
        return start + np.flatnonzero(self.test[start:stop] == test)

    def matrix(self, rows: Indices) -> Matrix:
        """What a model sees of these rows: dense, float64."""
        seen = self._scaled(self.x[rows], np.float64)
        dense: Matrix = seen.toarray() if self.is_sparse else seen
        return dense

    def targets(self, rows: Indices, shift: float = 0.0) -> Matrix:
        """rows × K minus ``shift``: one-hot or multi-hot (shift .1 in the paper's linear experiments); real numbers."""
        taken = self.y[rows]
        if self.task == "regression":
            return np.asarray(taken, dtype=np.float64).reshape(len(rows), -1) - shift
        hot = taken.toarray() if self.task == "multi-label" else np.eye(self.outputs)[taken]
        return np.asarray(hot, dtype=np.float64) - shift

    def part(
        self, *, test: bool, shift: float = 0.0, dtype: DTypeLike = np.float64
    ) -> tuple[Table, NDArray[Any], Indices]:
        """(x, targets, offsets) of everyone's training or test rows, as a model sees them; CSR stays CSR."""
        rows = np.flatnonzero(self.test == test)
        return self._scaled(self.x[rows], dtype), self.targets(rows, shift).astype(dtype), self._offsets_of(test)

    def with_bias(self) -> "PerUser":
        """With a last feature that is 1 for every row."""
        return replace(self, bias=True)

    def standardised(self, mean: ArrayLike, std: ArrayLike) -> "PerUser":
        """A model sees (x − mean) / std, in the source's units.

        The statistics must be public: none is ever computed from users' rows, since no privacy would be charged for it.
        """
        mean, std, width = np.asarray(mean, dtype=np.float64), np.asarray(std, dtype=np.float64), self.x.shape[1]
        for name, values in (("mean", mean), ("std", std)):
            if values.shape not in ((), (width,)) or not np.isfinite(values).all():
                raise ValueError(
                    f"{self.source}: public {name} must be finite, one number or {width}, got {values.shape}: give one "
                    "for each feature column"
                )
        if not (std > 0).all():
            column = self._column(int(np.flatnonzero(~(np.atleast_1d(std) > 0))[0]))
            raise ValueError(f"{self.source}: public std of {column} must be above 0: leave that column out, or use 1")
        if self.is_sparse and mean.any():
            raise ValueError(f"{self.source}: x is sparse and a mean would fill it: give mean 0, and std alone")
        return replace(self, mean=mean, std=std)

    def with_at_least(self, train_rows: int) -> "PerUser":
        """Without the users who have fewer training rows; a note names them."""
        sizes = self.train_sizes
        short = np.flatnonzero(sizes < train_rows)
        if not len(short):
            return self
        if len(short) == len(self):
            raise ValueError(f"{self.source}: no user has {train_rows} training rows: the most is {sizes.max()}")
        note = f"left out {_users(self.users, short, sizes)} with fewer than {train_rows} training rows"
        kept = np.flatnonzero(sizes >= train_rows)
        return replace(self.only(kept), notes=(*self.notes, note))

    def only(self, users: Sequence[int] | Indices) -> "PerUser":
        """These users alone, renumbered in this order."""
        spans = [np.arange(self.offsets[user], self.offsets[user + 1]) for user in users]
        rows, offsets = np.concatenate(spans), np.cumsum([0, *map(len, spans)])
        labels = tuple(self.users[int(user)] for user in users)
        return replace(self, x=self.x[rows], y=self.y[rows], test=self.test[rows], offsets=offsets, users=labels)

    def describe(self, batch_size: int = 10) -> str:
        """What was found, in lines to print; users with too few rows are named."""
        sizes, tested = self.train_sizes, self.test_sizes
        lines = [
            f"{self.source}: {len(self):,} users, {sizes.sum():,} training rows ({sizes.min()} to {sizes.max()} each), "
            f"{tested.sum():,} test rows, {self.features:,} features{' (sparse)' * self.is_sparse}, "
            f"{_TASK_WORDS[self.task].format(self.outputs)}",
            *self.notes,
        ]
        if (short := np.flatnonzero(sizes < batch_size)).size:
            listed = _users(self.users, short, sizes)
            lines.append(f"fewer than {batch_size} training rows, so smaller minibatches: {listed}")
        if (unmeasured := np.flatnonzero(tested == 0)).size:
            lines.append(f"no test rows, so trained but not measured: {_users(self.users, unmeasured, sizes)}")
        return "\n".join(lines)

    def _offsets_of(self, test: bool) -> Indices:
        before = np.concatenate([[0], np.cumsum(self.test == test)])
        return before[self.offsets].astype(np.intp)

    def _scaled(self, x: Table, dtype: DTypeLike) -> Table:
        if self.is_sparse:
            if np.any(self.std != 1.0):
                x = sparse.csr_array(x * (1 / np.asarray(self.std)))
            if self.bias:
                x = sparse.csr_array(sparse.hstack([x, np.ones((x.shape[0], 1))]))
            return x.astype(dtype)
        dense = np.empty((len(x), self.features), dtype=dtype)
        inner = dense[:, : x.shape[1]]
        np.subtract(x, self.mean, out=inner, casting="unsafe")
        np.divide(inner, self.std, out=inner, casting="unsafe")
        dense[:, x.shape[1] :] = 1.0
        return dense

    def _column(self, index: int) -> str:
        return f"column {self.feature_names[index]!r}" if self.feature_names else f"feature {index}"


_TASK_WORDS: dict[Task, str] = {
    "classification": "classification in {} classes",
    "multi-label": "multi-label with {} labels",
    "regression": "regression with {} output(s)",
}


def _users(labels: Sequence[int | str], which: Indices, sizes: Indices, most: int = 5) -> str:
    named = ", ".join(f"{labels[i]!r} ({sizes[i]})" for i in which[:most].tolist())
    return f"{len(which):,} user{'s' * (len(which) > 1)}: {named}{', …' * (len(which) > most)}"
