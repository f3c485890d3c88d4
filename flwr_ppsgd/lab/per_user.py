"""Everyone's rows, sorted by user, and how a model sees them."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray
from scipy import sparse

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.lab.features import count_of, list_names
from flwr_ppsgd.lab.schema import Schema, TaskName
from flwr_ppsgd.lab.tables import Values
from flwr_ppsgd.learner import generator
from flwr_ppsgd.models.representation import Representation, Shape, width_of
from flwr_ppsgd.recipe import Matrix

Indices: TypeAlias = NDArray[np.intp]
MOST_NAMED = 5  # users in a message


def held_out_rows(offsets: Indices, fraction: float, seed: int | None) -> NDArray[np.bool_]:
    """A share of each user's rows, rounded; of two or more rows at least one, and never all.

    Args:
        offsets: the first row of each user, and the number of rows at the end.
        fraction: the share, between 0 and 1.
        seed: decides which rows; None: the last ones.
    """
    held_out = np.zeros(int(offsets[-1]), dtype=np.bool_)
    for user, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        n = end - start
        wanted = max(1, round(fraction * n))
        count = min(wanted, n - 1)
        order = np.arange(n)
        if seed is not None:
            order = generator("split", seed, user).permutation(n)
        held_out[start + order[n - count :]] = True
    return held_out


@dataclass(frozen=True, eq=False)
class OwnScale:
    """How each user's device has scaled the user's own rows.

    Args:
        columns: the columns of x that were scaled.
        mean: users × columns, of the user's training rows.
        std: likewise.
        centre: users × K, subtracted from the user's targets.
        unit: of each user, by which the difference was divided; measures are in the source's units.
    """

    columns: Indices
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    centre: NDArray[np.float64]
    unit: Vector

    def only(self, users: Sequence[int] | Indices) -> "OwnScale":
        """These users alone."""
        which = np.asarray(users, dtype=np.intp)
        return replace(
            self,
            mean=self.mean[which],
            std=self.std[which],
            centre=self.centre[which],
            unit=self.unit[which],
        )


@dataclass(frozen=True, eq=False)
class PerUser:
    """Rows of many users, sorted by user: user i has the rows offsets[i] … offsets[i+1]−1.

    Args:
        source: where the rows come from, for messages.
        x: rows × d as they are stored (bytes stay bytes), dense or CSR. A model sees x / divisor,
            and a last column of ones if ``bias`` is set.
        y: class numbers 0 … K−1; real numbers, one or more per row; or, for multi-label tasks,
            rows × K of zeros and ones in CSR.
        test: which rows belong to the test part of their user.
        offsets: the first row of each user, and the number of rows at the end.
        users: each user's label in the source.
        schema: what the columns of the source are.
        divisor: 255 for pixels.
        bias: whether a model sees a last feature that is always 1.
        feature_names: a name for each column of x, or none.
        notes: what a reader decided or left out, in sentences to print.
        own: how users have scaled x and y; None: not at all.
        shape: of one row, such as (28, 28) for images; () if it is not known.
        representation: Φ: a model sees Φ(x / divisor). None: rows as they are.
        validation: which rows are for choosing settings: neither training rows nor test rows.
        kinds: of each feature but a bias, as in ``AdditiveLinear``; empty: all are used as they
            are.
        looked: what was chosen by looking at everyone's rows; empty if the schema was given.
    """

    source: str
    x: Values
    y: Values
    test: NDArray[np.bool_]
    offsets: Indices
    users: tuple[str, ...]
    schema: Schema
    divisor: float = 1.0
    bias: bool = False
    feature_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    own: OwnScale | None = None
    shape: Shape = ()
    representation: Representation | None = None
    validation: NDArray[np.bool_] | None = None
    kinds: tuple[str, ...] = ()
    looked: tuple[str, ...] = ()

    def __len__(self) -> int:
        """The number of users."""
        return len(self.users)

    @property
    def task(self) -> TaskName:
        """Classification, multi-label or regression."""
        return self.schema.task

    @property
    def outputs(self) -> int:
        """K."""
        return self.schema.outputs

    @property
    def features(self) -> int:
        """The number of features that a model sees: d, and one more with a bias column."""
        return self.width + self.bias

    @functools.cached_property
    def width(self) -> int:
        """The number of columns, or of features of the representation."""
        columns = int(self.x.shape[1])
        if self.representation is None:
            return columns
        return width_of(self.representation, columns)

    @property
    def all_kinds(self) -> tuple[str, ...]:
        """The kind of each feature; a bias is used as it is."""
        kinds = self.kinds or ("as-is",) * self.width
        return (*kinds, "as-is") if self.bias else kinds

    @property
    def is_sparse(self) -> bool:
        """Whether x is in CSR."""
        return bool(sparse.issparse(self.x))

    @property
    def train_sizes(self) -> Indices:
        """n_i, the number of training rows of each user."""
        return np.diff(self._offsets_of(False))

    @property
    def test_sizes(self) -> Indices:
        """The number of test rows of each user."""
        return np.diff(self._offsets_of(True))

    def rows(self, user: int, *, test: bool) -> Indices:
        """The rows of one user's training or test part, in the order of the source."""
        if not 0 <= user < len(self):
            raise ValueError(
                f"{self.source}: there is no user number {user}: they go from 0 to {len(self) - 1}"
            )
        span = self.span(user)
        chosen = np.flatnonzero(self._part(test)[span])
        return chosen + int(span.start)

    def span(self, user: int) -> slice:
        """All rows of one user."""
        return slice(int(self.offsets[user]), int(self.offsets[user + 1]))

    def matrix(self, rows: Indices) -> Matrix:
        """These rows as a model sees them: dense, float64."""
        seen = self.model_rows(rows)
        dense: Matrix = seen.toarray() if self.is_sparse else seen
        return dense

    def model_rows(self, rows: Indices, dtype: DTypeLike = np.float64) -> Values:
        """The same; CSR stays CSR."""
        if self.is_sparse:
            x = self.x[rows].astype(dtype)
            if not self.bias:
                return x
            ones = np.ones((len(rows), 1), dtype=dtype)
            return sparse.csr_array(sparse.hstack([x, ones]))
        dense = np.ones((len(rows), self.features), dtype=dtype)
        inner = dense[:, : self.width]
        if self.representation is None:
            np.divide(self.x[rows], self.divisor, out=inner, casting="unsafe")
        else:
            inner[:] = self._represented_rows.of(rows)
        return dense

    def targets(self, rows: Indices, shift: float = 0.0) -> Matrix:
        """rows × K minus ``shift``: one-hot rows, multi-hot rows, or real numbers.

        Args:
            rows: which rows.
            shift: 0.1 in the paper's linear experiments.
        """
        taken = self.y[rows]
        if self.task == "regression":
            real = np.asarray(taken, dtype=np.float64)
            return real.reshape(len(rows), self.outputs) - shift
        if self.task == "multi-label":
            return np.asarray(taken.toarray(), dtype=np.float64) - shift
        one_hot: Matrix = np.eye(self.outputs)[taken]
        return one_hot - shift

    def part(
        self, *, test: bool, shift: float = 0.0, dtype: DTypeLike = np.float64
    ) -> tuple[Values, NDArray[Any], Indices]:
        """(x, targets, offsets) of everyone's training or test rows, as a model sees them.

        CSR stays CSR.
        """
        rows = np.flatnonzero(self._part(test))
        x = self.model_rows(rows, dtype)
        y = self.targets(rows, shift).astype(dtype)
        return x, y, self._offsets_of(test)

    def with_validation(self, fraction: float, seed: int) -> "PerUser":
        """With a share of each user's training rows set apart, for choosing settings.

        Users with one training row keep it. With a time column it is the last training rows.
        """
        by_time = bool(self.schema.time)
        apart = np.zeros(len(self.test), dtype=np.bool_)
        offsets = self._offsets_of(False)
        apart[self.train_rows] = held_out_rows(offsets, fraction, None if by_time else seed)
        which = "the last" if by_time else "a random"
        share = f"{which} {fraction:.0%} of each user's training rows"
        note = f"validation part: {share}, for choosing settings"
        return replace(self, validation=apart, notes=(*self.notes, note))

    def validation_as_test(self) -> "PerUser":
        """The same with validation rows as the test part, to measure what settings are chosen by;
        unchanged without validation rows."""
        if self.validation is None:
            return self
        return replace(self, test=self.validation, validation=self.test)

    def with_at_least(self, train_rows: int) -> "PerUser":
        """Without the users who have fewer training rows; a note names them."""
        sizes = self.train_sizes
        short = np.flatnonzero(sizes < train_rows)
        if not len(short):
            return self
        if len(short) == len(self):
            raise ValueError(
                f"{self.source}: no user has {train_rows} training rows: the most is {sizes.max()}"
            )
        named = _name_users(self.users, short, sizes)
        note = f"left out {named} with fewer than {train_rows} training rows"
        kept = self.only(np.flatnonzero(sizes >= train_rows))
        return replace(kept, notes=(*self.notes, note), looked=(*self.looked, "who is left out"))

    def only(self, users: Sequence[int] | Indices) -> "PerUser":
        """These users alone, renumbered in this order."""
        every = np.arange(len(self.test))
        spans = [every[self.span(int(user))] for user in users]
        rows = np.concatenate(spans)
        sizes = [len(span) for span in spans]
        return replace(
            self,
            x=self.x[rows],
            y=self.y[rows],
            test=self.test[rows],
            validation=None if self.validation is None else self.validation[rows],
            offsets=np.cumsum([0, *sizes]),
            users=tuple(self.users[int(user)] for user in users),
            own=None if self.own is None else self.own.only(users),
        )

    def with_rows(self, x: Values, y: Values) -> "PerUser":
        """These rows in place of all others, as training rows of a single user."""
        rows = x.shape[0]
        return replace(
            self,
            x=x,
            y=y,
            test=np.zeros(rows, dtype=np.bool_),
            validation=None,
            offsets=np.array([0, rows]),
            users=self.users[:1],
        )

    def describe(self, batch_size: int = 10) -> str:
        """Sizes, task, notes and users with few rows, in lines to print.

        Args:
            batch_size: users with fewer training rows are named.
        """
        sizes = self.train_sizes
        each = f"{sizes.min():,} each"
        if sizes.min() < sizes.max():
            each = f"{sizes.min():,} to {sizes.max():,} each"
        rows = f"{sizes.sum():,} training rows ({each})"
        if self.validation is not None:
            rows += f", {int(self.validation.sum()):,} validation rows"
        rows += f", {self.test_sizes.sum():,} test rows"
        kind = " (sparse)" if self.is_sparse else ""
        about = f"{rows}, {count_of(self.features, 'feature')}{kind}, {self.task_words()}"
        lines = [f"{self.source}: {count_of(len(self), 'user')}, {about}", *self.notes]
        short = np.flatnonzero(sizes < batch_size)
        if short.size:
            named = _name_users(self.users, short, sizes)
            lines.append(f"fewer than {batch_size} training rows, so smaller minibatches: {named}")
        unmeasured = np.flatnonzero(self.test_sizes == 0)
        if unmeasured.size:
            named = _name_users(self.users, unmeasured, sizes)
            lines.append(f"no test rows, so trained but not measured: {named}")
        return "\n".join(lines)

    def task_words(self) -> str:
        """The task for people, with its classes if those are few."""
        if self.task == "regression":
            several = f" with {self.outputs} outputs" if self.outputs > 1 else ""
            return f"regression{several}"
        if self.task == "multi-label":
            return f"multi-label with {self.outputs:,} labels"
        if self.outputs > MOST_NAMED:
            return f"classification in {self.outputs:,} classes"
        return f"classification ({list_names(self.schema.classes)})"

    @property
    def train_rows(self) -> NDArray[np.bool_]:
        """Which rows are training rows."""
        return ~self.test if self.validation is None else ~(self.test | self.validation)

    def _part(self, test: bool) -> NDArray[np.bool_]:
        return self.test if test else self.train_rows

    def _offsets_of(self, test: bool) -> Indices:
        counted = np.cumsum(self._part(test))
        before = np.concatenate([[0], counted])
        return before[self.offsets].astype(np.intp)

    @functools.cached_property
    def _represented_rows(self) -> "_RepresentedRows":
        return _RepresentedRows(self)

    def amounts(self, rows: Indices) -> Matrix:
        """Targets of regression in the units of the source: rows × K."""
        found = self.targets(rows)
        if self.own is None:
            return found
        user = np.searchsorted(self.offsets, rows, side="right") - 1
        unit = self.own.unit[user, None]
        back: Matrix = found * unit + self.own.centre[user]
        return back

    @property
    def units(self) -> Vector:
        """One unit of each user's targets, in the units of the source."""
        return np.ones(len(self)) if self.own is None else self.own.unit


class _RepresentedRows:
    """Φ of users' rows, computed when a user is first seen and kept in memory.

    A user's rows are always computed together, so that every engine sees the same numbers.
    """

    def __init__(self, data: PerUser) -> None:
        self._data = data
        self._known = np.zeros(len(data), dtype=bool)
        self._values = np.empty((len(data.test), data.width), dtype=np.float32)

    def of(self, rows: Indices) -> NDArray[np.float32]:
        """One row of features for each of these rows."""
        data = self._data
        assert data.representation is not None
        users = np.unique(np.searchsorted(data.offsets, rows, side="right") - 1)
        for user in users[~self._known[users]].tolist():
            span = data.span(user)
            pixels = np.divide(data.x[span], data.divisor, dtype=np.float64)
            self._values[span] = data.representation(pixels)
            self._known[user] = True
        return self._values[rows]


def _name_users(labels: Sequence[str], which: Indices, sizes: Indices) -> str:
    """The number of users, and the first few of them with their training rows."""
    parts = [f"{labels[user]!r} ({sizes[user]})" for user in which[:MOST_NAMED].tolist()]
    named = ", ".join(parts)
    if len(which) > MOST_NAMED:
        named += ", …"
    return f"{count_of(len(which), 'user')}: {named}"
