"""Everyone's data at once: the minibatches of a whole cohort, and measures over all users.

The rows that a user draws are those of ``learner.minibatch_rows``. They depend on (seed, user,
visit) alone, so that every engine, and every setting of a sweep, sees the same ones.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from flwr_ppsgd.algorithm import Cohort, Vector
from flwr_ppsgd.checks import require
from flwr_ppsgd.lab.data.learners import user_measures
from flwr_ppsgd.lab.data.per_user import Task
from flwr_ppsgd.lab.data.synthetic import Synthetic
from flwr_ppsgd.lab.engines.measures import for_choosing, summary
from flwr_ppsgd.lab.engines.products import OwnProducts
from flwr_ppsgd.learner import generator, minibatch_rows, shuffled_by
from flwr_ppsgd.models.linear import Loss, Matrix, mean_losses

DType: TypeAlias = np.dtype[Any]
Floats: TypeAlias = NDArray[Any]  # float32 or float64
Features: TypeAlias = Floats | sparse.csr_array
ByFeature: TypeAlias = Floats | sparse.csc_array
Indices: TypeAlias = NDArray[np.intp]

TEST_ROWS_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class Batch:
    """The minibatches of some users, each padded with zero rows to the same length m.

    Args:
        users: whose minibatches they are.
        x: users × m × d, or a sparse matrix of users·m rows.
        y: users × m × K.
        counts: m_i, the number of samples in each minibatch.
        rows: which rows of the table the samples are, users × m; None if every sample is new.
        padded: whether any m_i is less than m.
    """

    users: Indices
    x: Features
    y: Floats
    counts: Indices
    rows: Indices | None = None
    padded: bool = False

    @property
    def flat(self) -> Features:
        """x with one row per sample."""
        if isinstance(self.x, sparse.csr_array):
            return self.x
        return self.x.reshape(-1, self.x.shape[-1])

    @functools.cached_property
    def by_feature(self) -> ByFeature:
        """``by_feature`` of ``flat``, worked out once."""
        return by_feature(self.flat)

    def dense(self) -> Floats:
        """x as users × m × d."""
        users, m, _ = self.y.shape
        if isinstance(self.x, sparse.csr_array):
            return np.asarray(self.x.toarray()).reshape(users, m, -1)
        return np.asarray(self.x).reshape(users, m, -1)

    def present(self, padded: Floats) -> Floats:
        """The part of ``padded`` (users × m × …) that belongs to samples, one row each."""
        m = padded.shape[1]
        if not self.padded:
            return padded.reshape(-1, *padded.shape[2:])
        is_sample = np.arange(m) < self.counts[:, None]
        return padded[is_sample]

    def gram(self) -> Floats:
        """X_i X_iᵀ of each user: users × m × m."""
        if not isinstance(self.x, sparse.csr_array):
            transposed = self.x.transpose(0, 2, 1)  # users × d × m
            return np.asarray(np.matmul(self.x, transposed))
        m = self.y.shape[1]
        blocks = []
        for start in range(0, self.x.shape[0], m):
            own = self.x[start : start + m]
            blocks.append((own @ own.T).toarray())
        return np.stack(blocks)


class Scratch:
    """Memory for one batch at a time, used again for the next.

    Fresh memory for every batch would cost more time than the copy into it.
    """

    def __init__(self) -> None:
        self._kept: dict[DType, Floats] = {}

    def __call__(self, rows: int, columns: int, dtype: DType) -> Floats:
        """rows × columns numbers; whatever was given before in this dtype is overwritten."""
        size = rows * columns
        if dtype not in self._kept or self._kept[dtype].size < size:
            self._kept[dtype] = np.empty(size, dtype)
        return self._kept[dtype][:size].reshape(rows, columns)


def drawn(
    cohort: Cohort,
    uniforms: Vector,
    visits: Indices,
    most_visits: Indices | None,
) -> Indices:
    """The members of a cohort. Users without visits left drop out, and others take their place.

    Who drops out depends on how many samples users have: for simulation only, as in the paper's
    experiments.

    Args:
        cohort: how users are drawn.
        uniforms: one number in [0, 1) for each user.
        visits: the number of visits of each user so far.
        most_visits: the number of visits after which each user drops out; None: never.
    """
    if most_visits is None:
        return cohort.members(uniforms)
    left = visits < most_visits
    chosen = cohort.members(np.where(left, uniforms, np.inf))
    return chosen[left[chosen]]


class Fitted(Protocol):
    """The parameters of many settings side by side: one column for each (setting, output)."""

    def shared(self) -> Floats:
        """w of every setting: d × columns."""
        ...

    def add_personal(self, user: int, out: Floats) -> None:
        """out += θ_i of every setting, d × columns."""
        ...

    def add_personal_scores(self, user: int, part: "MeasuredRows", out: Floats) -> None:
        """out += x θ_i of every setting, for the user's rows x of a part."""
        ...


class Population(Protocol):
    """What the cohort engine needs to know of everyone's data.

    ``features`` is d, ``outputs`` is K; ``batch_size`` is the number of samples in a minibatch, of
    a user who has that many. A user drops out after ``most_visits`` visits; None: never.
    """

    features: int
    outputs: int
    batch_size: int
    loss: Loss
    most_visits: Indices | None

    @property
    def bytes(self) -> int:
        """The memory that the data take."""
        ...

    def __len__(self) -> int:
        """The number of users."""
        ...

    def rows(self, users: Indices, visits: Indices) -> Indices | None:
        """Which rows these users draw at these visits; None if every sample is new."""
        ...

    def batch(
        self,
        users: Indices,
        visits: Indices,
        dtype: DType,
        scratch: Scratch | None = None,
        rows: Indices | None = None,
    ) -> Batch:
        """The minibatches of these users at these visits.

        If ``scratch`` is given, x may use that memory: it is valid until the next call. ``rows``
        are those of ``rows``, if they are known already.
        """
        ...

    def measures(self, fitted: Fitted, settings: int, *, final: bool = False) -> dict[str, Vector]:
        """Each measure of every setting over all measured rows; ``final`` as of an engine."""
        ...

    def by_user(self, fitted: Fitted, settings: int) -> dict[str, Floats]:
        """Each measure, measured users × settings; empty if users are not measured one by one."""
        ...


@dataclass(frozen=True, eq=False)
class MeasuredRows:
    """The rows on which users measure, sorted by user: user i has offsets[i] … offsets[i+1]−1.

    ``name`` tells the parts of one table apart.
    """

    name: str
    x: Features
    y: Floats
    offsets: Indices

    @classmethod
    def of(
        cls, name: str, part: tuple[Features, Floats, ArrayLike] | None
    ) -> "MeasuredRows | None":
        """From x, y and offsets."""
        if part is None:
            return None
        x, y, users = part
        return cls(name, x, y, np.asarray(users, dtype=np.intp))

    @property
    def bytes(self) -> int:
        """The memory it takes."""
        return _bytes(self.x) + _bytes(self.y)

    @property
    def sizes(self) -> Indices:
        """The number of rows of each user."""
        return np.diff(self.offsets)

    @property
    def measured(self) -> Indices:
        """The users who have rows here."""
        return np.flatnonzero(self.sizes)

    def own(self, user: int) -> Features:
        """x of one user."""
        return self.x[self._slice(user, user)]

    def targets(self, user: int) -> Matrix:
        """y of one user."""
        return self.y[self._slice(user, user)]

    def _slice(self, first: int, last: int) -> slice:
        """The rows of all users from the first to the last."""
        return slice(int(self.offsets[first]), int(self.offsets[last + 1]))

    def scores(self, w: Floats) -> Iterator[tuple[int, Floats]]:
        """(user, x w) of each measured user; several users share one product, which reads w
        once."""
        groups = 1 + int(self.offsets[-1]) // TEST_ROWS_AT_ONCE
        for group in np.array_split(self.measured, groups):
            users = group.tolist()
            if not users:
                continue
            x = self.x[self._slice(users[0], users[-1])]
            together = np.asarray(by_feature(x) @ w)
            ends = np.cumsum(self.sizes[group])
            yield from zip(users, np.split(together, ends[:-1]), strict=True)


class Epochs:
    """The shuffled rows of every user's current epoch, from which minibatches are slices.

    They are those of ``minibatch_rows``, for a whole cohort in a few calls.

    Args:
        offsets: of the users' rows, as for ``Table``.
        batch_size: the number of rows in a minibatch, of a user who has that many.
        seed: of the shuffling.
    """

    def __init__(self, offsets: Indices, batch_size: int, seed: int) -> None:
        self._starts = offsets[:-1]
        self._sizes = np.diff(offsets)
        self._batch_size = batch_size
        self._counts = np.minimum(batch_size, self._sizes)
        self._seed = seed
        self._source = generator("epochs")
        self._current = np.full(len(self._sizes), -1)  # the epoch of each user
        self._shuffled = np.zeros(int(offsets[-1]), dtype=np.intp)

    def rows(self, users: Indices, visits: Indices) -> Indices:
        """Which rows of the table each user draws: users × batch size, padded with the user's
        first row."""
        m = self._batch_size
        starts = self._starts[users]
        sizes = self._sizes[users]
        counts = self._counts[users]
        epochs, begins = np.divmod((visits - 1) * counts, sizes)
        for place in np.flatnonzero(epochs != self._current[users]).tolist():
            self._shuffle(int(users[place]), int(epochs[place]))
        wanted = (starts + begins)[:, None] + np.arange(m)
        rows = self._shuffled.take(wanted, mode="clip")
        no_slice = (begins + m > sizes) | (epochs != self._current[users])
        for place in np.flatnonzero(no_slice).tolist():
            self._put(rows[place], int(users[place]), int(visits[place]))
        return rows

    def _shuffle(self, user: int, epoch: int) -> None:
        start = int(self._starts[user])
        size = int(self._sizes[user])
        order = shuffled_by(self._source, self._seed, user, epoch, size)
        self._shuffled[start : start + size] = start + order
        self._current[user] = epoch

    def _put(self, row: Indices, user: int, visit: int) -> None:
        """A minibatch that is no slice of the user's current epoch: it is padded, it reaches into
        the next epoch, or it is from an earlier one than a later visit in the same call."""
        size = int(self._sizes[user])
        own = minibatch_rows(self._seed, user, visit, size, int(self._counts[user]))
        row[:] = self._starts[user]
        row[: len(own)] += own


class Table:
    """Finitely many samples, one row each, sorted by user.

    Args:
        x: rows × d, an array or a sparse matrix.
        y: rows × K, real targets or one-hot rows.
        users: N + 1 offsets; user i has the rows users[i] … users[i+1]−1.
        batch_size: the number of rows in a minibatch, of a user who has that many.
        seed: decides which rows each user draws at each visit.
        loss: what predictions are compared with targets by.
        test: x, y and offsets of the rows on which users measure; None if nobody measures.
        validation: the same of the rows on which settings are compared; None: on test rows.
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
        test: tuple[Features, Floats, ArrayLike] | None = None,
        validation: tuple[Features, Floats, ArrayLike] | None = None,
        task: Task | None = None,
        most_visits: Indices | None = None,
        units: Vector | None = None,
    ) -> None:
        self.x = sparse.csr_array(x) if sparse.issparse(x) else x
        self.y = y.reshape(len(y), -1)
        self.offsets: Indices = np.asarray(users, dtype=np.intp)
        self.sizes: Indices = np.diff(self.offsets)
        _check_offsets(self.offsets, len(self.y))
        self.features = int(self.x.shape[1])
        self.outputs = int(self.y.shape[1])
        self.batch_size = batch_size
        self.seed = seed
        self.loss = loss
        self.task = task
        self.most_visits = most_visits
        self.units = np.ones(len(self.sizes)) if units is None else units
        self._counts = np.minimum(batch_size, self.sizes)  # m_i
        self._even = bool(self.sizes.min() >= batch_size)  # no minibatch needs padding
        self._epochs = Epochs(self.offsets, batch_size, seed)
        self._products: dict[DType, OwnProducts] = {}
        self.test = MeasuredRows.of("test", test)
        self.validation = MeasuredRows.of("validation", validation)

    @property
    def bytes(self) -> int:
        parts = [part.bytes for part in (self.test, self.validation) if part is not None]
        return _bytes(self.x) + _bytes(self.y) + sum(parts)

    def __len__(self) -> int:
        return len(self.sizes)

    def own(self, user: int) -> Features:
        """All rows of one user."""
        return self.x[self.offsets[user] : self.offsets[user + 1]]

    def products(self, dtype: DType) -> OwnProducts:
        """Products of users' own rows, the same object for all engines on this table."""
        if dtype not in self._products:
            self._products[dtype] = OwnProducts(self.x, self.offsets, self.seed, dtype)
        return self._products[dtype]

    def rows(self, users: Indices, visits: Indices) -> Indices:
        """Users × batch size, padded with the user's first row."""
        return self._epochs.rows(users, visits)

    def batch(
        self,
        users: Indices,
        visits: Indices,
        dtype: DType,
        scratch: Scratch | None = None,
        rows: Indices | None = None,
    ) -> Batch:
        counts = self._counts[users]
        m = self.batch_size
        if not self._even:
            m = int(counts.max(initial=0))
        if rows is None:
            rows = self.rows(users, visits)
        rows = rows[:, :m]
        x = self._taken(rows.reshape(-1), dtype, scratch or Scratch())
        y = self.y.take(rows, axis=0).astype(dtype, copy=False)  # users × m × K
        padded = not self._even and int(counts.min(initial=m)) < m
        if padded:
            missing = np.arange(m) >= counts[:, None]
            x = _without(x, missing.reshape(-1))
            y[missing] = 0.0
        if not isinstance(x, sparse.csr_array):
            x = x.reshape(len(users), m, self.features)
        return Batch(users, x, y, counts, rows, padded)

    def _taken(self, rows: Indices, dtype: DType, scratch: Scratch) -> Features:
        """Rows of x in this dtype."""
        if isinstance(self.x, sparse.csr_array):
            return self.x[rows].astype(dtype)
        space = scratch(len(rows), self.features, self.x.dtype)
        taken = np.take(self.x, rows, axis=0, out=space, mode="clip")
        if taken.dtype == dtype:
            return taken
        converted = scratch(len(rows), self.features, dtype)
        np.copyto(converted, taken, casting="unsafe")
        return converted

    def measures(self, fitted: Fitted, settings: int, *, final: bool = False) -> dict[str, Vector]:
        """On the users' validation rows, or test rows: over all rows, and the spread over users."""
        found: dict[str, Vector] = {}
        if self.validation is not None:
            found = for_choosing(self._summary(fitted, settings, self.validation))
        if self.test is not None and (final or self.validation is None):
            found |= self._summary(fitted, settings, self.test)
        return found

    def _summary(self, fitted: Fitted, settings: int, part: MeasuredRows) -> dict[str, Vector]:
        weights = part.sizes[part.measured].astype(np.float64)
        return summary(self._by_user(fitted, settings, part), weights)

    def by_user(self, fitted: Fitted, settings: int) -> dict[str, Floats]:
        """Each measure on test rows, measured users × settings."""
        return {} if self.test is None else self._by_user(fitted, settings, self.test)

    def _by_user(self, fitted: Fitted, settings: int, part: MeasuredRows) -> dict[str, Floats]:
        found: dict[str, list[Vector]] = {}
        w = fitted.shared()
        for user, scores in part.scores(w):
            fitted.add_personal_scores(user, part, scores)
            by_setting = scores.reshape(len(scores), settings, -1)  # rows × settings × K
            for measure, values in self.user_measures(by_setting, part, user).items():
                found.setdefault(measure, []).append(values)
        return {measure: np.array(values) for measure, values in found.items()}

    def user_measures(self, scores: Floats, part: MeasuredRows, user: int) -> dict[str, Vector]:
        """What one user measures on a part: scores are rows × settings × K."""
        y = part.targets(user)
        if self.task is not None or y.shape[1] > 1:
            task = self.task or "classification"
            return user_measures(scores, y, self.loss, task, unit=float(self.units[user]))
        return {"loss": mean_losses(scores, y[:, None, :], self.loss)}


def _check_offsets(offsets: Indices, rows: int) -> None:
    """ValueError unless every user has at least one row, and every row belongs to a user."""
    sizes = np.diff(offsets)
    fewest = int(sizes.min()) if len(sizes) else 0
    require(
        fewest >= 1,
        "every user needs at least one row",
        fewest,
        "leave out users without rows",
    )
    ends = (int(offsets[0]), int(offsets[-1]))
    require(
        ends == (0, rows),
        f"the offsets of users must go from 0 to {rows}, the number of rows",
        ends,
        "give N + 1 offsets for N users",
    )


def stacked(parts: Sequence[Features]) -> Features:
    """The rows of all parts, one part after the other."""
    if sparse.issparse(parts[0]):
        return sparse.csr_array(sparse.vstack(parts, format="csr"))
    return np.concatenate(parts)


def by_feature(x: Features) -> ByFeature:
    """x such that products go through it feature by feature, if it is sparse.

    x w then reads each row of w once, and only if its feature occurs. Its sums are in the order of
    features, as they are if a sparse x has its entries in that order.
    """
    return x.tocsc() if isinstance(x, sparse.csr_array) else x


def _bytes(x: Features) -> int:
    if isinstance(x, sparse.csr_array):
        return int(x.data.nbytes + x.indices.nbytes + x.indptr.nbytes)
    return int(x.nbytes)


def _without(x: Features, missing: NDArray[np.bool_]) -> Features:
    """x with these rows set to zero."""
    if isinstance(x, sparse.csr_array):
        present = sparse.diags_array((~missing).astype(x.dtype))
        return sparse.csr_array(present @ x)
    x[missing] = 0.0
    return x


class Fresh:
    """The synthetic problem: every minibatch is new, and the excess risk has a closed form.

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

    @property
    def bytes(self) -> int:
        return int(self.problem.optima.nbytes)

    def __len__(self) -> int:
        return len(self.problem.optima)

    def rows(self, users: Indices, visits: Indices) -> None:  # noqa: ARG002
        """Every sample is new."""
        return None

    def batch(
        self,
        users: Indices,
        visits: Indices,
        dtype: DType,
        scratch: Scratch | None = None,  # noqa: ARG002
        rows: Indices | None = None,  # noqa: ARG002
    ) -> Batch:
        drawn_x, drawn_y = self.problem.batches(users, visits, self.batch_size)
        x = drawn_x.astype(dtype, copy=False)
        y = drawn_y.astype(dtype, copy=False)
        counts = np.full(len(users), self.batch_size)
        return Batch(users, x, y, counts)

    def measures(
        self,
        fitted: Fitted,
        settings: int,
        *,
        final: bool = False,  # noqa: ARG002
    ) -> dict[str, Vector]:
        """(1/N)·Σ_i ‖w + θ_i − θ_i*‖²_Σ."""
        w = fitted.shared()
        squares = np.zeros((self.features, settings))
        for user, optimum in enumerate(self.problem.optima):
            distance = w - optimum[:, None]
            fitted.add_personal(user, distance)
            distance *= distance
            squares += distance
        return {"excess_risk": self.problem.variances @ squares / len(self)}

    def by_user(self, fitted: Fitted, settings: int) -> dict[str, Floats]:  # noqa: ARG002
        """Nothing: here users differ by chance alone."""
        return {}
