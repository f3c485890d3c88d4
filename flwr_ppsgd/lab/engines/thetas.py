"""Where the cohort engine keeps every θ_i of every setting, and which of two ways costs less.

``Direct`` keeps θ_i itself: d × columns per user. ``Span`` uses that with finitely many samples θ_i
stays in the span of the user's own n_i rows: θ_i = −X_iᵀA_i. It keeps A_i (n_i × columns) and uses
the Gram matrix X_i X_iᵀ, so that a step of θ_i writes m rows and touches nothing of size d. Both
give the same numbers, up to rounding.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from scipy import sparse
from scipy.linalg import get_blas_funcs

# private, but nothing public adds a product to an array in place
from scipy.sparse._sparsetools import csc_matvecs, csr_matvecs

from flwr_ppsgd.lab.engines.batches import (
    Batch,
    ByFeature,
    DType,
    Floats,
    Indices,
    MeasuredRows,
    Population,
    Table,
)

Kind: TypeAlias = Literal["direct", "span"]
Columns: TypeAlias = Floats  # the last axis has one entry for each (setting, output)

NUMBERS_MOVED_AT_ONCE = 1 << 20
NUMBERS_COPIED = (
    1 << 13
)  # up to here a copy of a user's A_i costs less than a call of BLAS by itself
NUMBERS_IN_CACHE = 1 << 14  # up to here a second pass costs less than BLAS on narrow columns


class Thetas(Protocol):
    """θ of every user for the settings that have one; one column for each (setting, output)."""

    def scores(self, batch: Batch) -> Columns:
        """X_i θ_i: users × m × columns."""
        ...

    def gram(self, batch: Batch) -> Floats:
        """X_i X_iᵀ of the minibatches: users × m × m."""
        ...

    def step(self, batch: Batch, residual: Columns) -> None:
        """θ_i ← θ_i − X_iᵀ residual_i; a batch holds every user at most once."""
        ...

    def stand(self, users: Indices, rounds: Indices) -> None:
        """Add rounds_i · θ_i, as it is now, to the sum behind the average iterate of each user."""
        ...

    def theta(self, user: int, average_over: int = 0) -> Columns:
        """θ_i: d × columns. If ``average_over`` is given, the sum that ``stand`` made, divided by
        that number of rounds."""
        ...

    def part_scores(self, user: int, part: MeasuredRows, average_over: int = 0) -> Columns:
        """x θ_i for the user's rows x of a part."""
        ...

    def keep(self, columns: Indices) -> None:
        """Forget all other columns."""
        ...

    def state(self) -> dict[str, Floats]:
        """Everything that steps have changed."""
        ...

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Continue from ``state``."""
        ...


class _Columns:
    """One array with a column for each (setting, output), and its sum over rounds if averages are
    wanted."""

    def __init__(self, shape: tuple[int, ...], dtype: DType, average: bool) -> None:
        self._kept: Columns = np.zeros(shape, dtype)
        self._stood: Columns | None = None
        if average:
            self._stood = np.zeros(shape, dtype)

    def keep(self, columns: Indices) -> None:
        self._kept = kept_columns(self._kept, columns)
        if self._stood is not None:
            self._stood = kept_columns(self._stood, columns)

    def state(self) -> dict[str, Floats]:
        if self._stood is None:
            return {"thetas": self._kept}
        return {"thetas": self._kept, "stood": self._stood}

    def restore(self, state: Mapping[str, Floats]) -> None:
        self._kept[...] = state["thetas"]
        if self._stood is not None:
            self._stood[...] = state["stood"]


class Direct(_Columns):
    """θ_i itself: users × d × columns."""

    def __init__(
        self,
        population: Population,
        columns: int,
        dtype: DType,
        average: bool,
    ) -> None:
        shape = (len(population), population.features, columns)
        super().__init__(shape, dtype, average)

    def scores(self, batch: Batch) -> Columns:
        x = batch.dense()
        users, m, _ = x.shape
        columns = self._kept.shape[2]
        shape = (users, m, columns)
        out = np.empty(shape, self._kept.dtype)
        for place, user in enumerate(batch.users.tolist()):
            theta = self._kept[user]
            np.matmul(x[place], theta, out=out[place])
        return out

    def gram(self, batch: Batch) -> Floats:
        return batch.gram()

    def step(self, batch: Batch, residual: Columns) -> None:
        x = batch.dense()
        for place, user in enumerate(batch.users.tolist()):
            theta = self._kept[user]
            subtract_product(theta, x[place], residual[place])

    def stand(self, users: Indices, rounds: Indices) -> None:
        assert self._stood is not None
        for user, count in zip(users.tolist(), rounds.tolist(), strict=True):
            self._stood[user] += count * self._kept[user]

    def theta(self, user: int, average_over: int = 0) -> Columns:
        if not average_over:
            return np.asarray(self._kept[user])
        assert self._stood is not None
        return np.asarray(self._stood[user] / average_over)

    def part_scores(self, user: int, part: MeasuredRows, average_over: int = 0) -> Columns:
        return np.asarray(part.own(user) @ self.theta(user, average_over))


class Span(_Columns):
    """A_i with θ_i = −X_iᵀA_i: all rows × columns.

    Each user's rows are in the order of ``OwnProducts``. The rows of A_i after the last one that a
    minibatch has held are 0: products leave them out.
    """

    def __init__(self, table: Table, columns: int, dtype: DType, average: bool) -> None:
        rows = int(table.offsets[-1])
        super().__init__((rows, columns), dtype, average)
        self._table = table
        self._own = table.products(np.dtype(dtype))
        self._moved = np.zeros(rows, dtype=bool)  # which rows of A_i have been moved
        # the number of rows of each user, if that is the same for all and minibatches are, too
        largest = int(table.sizes.max())
        self._alike = 0
        if largest == table.sizes.min() and largest >= table.batch_size:
            self._alike = largest
        self._latest: Batch | None = None
        nothing = self._kept[:0]
        self._products = (nothing, nothing)  # of the latest batch
        self._positions = np.zeros((0, 0), dtype=np.intp)  # of its samples, in A_i of all users

    def _moved_rows(self, user: int) -> slice:
        """The user's rows up to the last one that has been moved."""
        start = int(self._table.offsets[user])
        end = int(self._table.offsets[user + 1])
        if not self._moved[end - 1]:
            end = start + int(np.flatnonzero(self._moved[start:end]).max(initial=-1)) + 1
        return slice(start, end)

    def _latest_products(self, batch: Batch) -> tuple[Columns, Floats]:
        """``_against_own``, kept until the next step or batch."""
        if self._latest is not batch:
            self._products = self._against_own(batch)
            self._latest = batch
        return self._products

    def _against_own(self, batch: Batch) -> tuple[Columns, Floats]:
        """(X_i θ_i, X_i X_iᵀ) of the minibatches, both from the same rows of the users' Gram
        matrices."""
        assert batch.rows is not None
        positions = self._own.positions(batch.users, batch.rows)
        self._positions = positions
        places = positions - self._table.offsets[batch.users][:, None]
        if self._alike and self._kept[: self._alike].size <= NUMBERS_COPIED:
            scores = self._alike_scores(batch, positions)
        else:
            scores = self._own_scores(batch, places)
        return scores, self._blocks(batch, places)

    def _alike_scores(self, batch: Batch, positions: Indices) -> Columns:
        """``_own_scores`` of users who all have the same number of rows, in one product."""
        products = self._own.gram_rows(positions, self._alike)
        by_user = self._kept.reshape(len(self._table), self._alike, -1)
        coefficients = by_user.take(batch.users, axis=0)  # users × rows × columns
        scores = np.matmul(products, coefficients)
        return np.asarray(np.negative(scores, out=scores))

    def _own_scores(self, batch: Batch, places: Indices) -> Columns:
        """Minus the minibatch's rows of X_i X_iᵀ, times A_i: users × m × columns."""
        users, m = places.shape
        scores = np.zeros((users, m, self._kept.shape[1]), self._kept.dtype)
        members = zip(
            batch.users.tolist(),
            batch.counts.tolist(),
            places,
            scores,
            strict=True,
        )
        for user, count, own, out in members:
            moved = self._moved_rows(user)
            coefficients = self._kept[moved]
            products = self._own.gram(user).take(own[:count], axis=0)
            np.negative(products, out=products)
            np.dot(products[:, : len(coefficients)], coefficients, out=out[:count])
        return scores

    def _blocks(self, batch: Batch, places: Indices) -> Floats:
        """X_i X_iᵀ of the minibatches, from the users' Gram matrices: users × m × m."""
        blocks = self._own.blocks(batch.users, places)
        if batch.padded:
            missing = np.arange(places.shape[1]) >= batch.counts[:, None]
            blocks[missing] = 0.0
            blocks.transpose(0, 2, 1)[missing] = 0.0
        return blocks

    def scores(self, batch: Batch) -> Columns:
        scores, _ = self._latest_products(batch)
        return scores

    def gram(self, batch: Batch) -> Floats:
        _, blocks = self._latest_products(batch)
        return blocks

    def step(self, batch: Batch, residual: Columns) -> None:
        """A_i += residual_i, in the rows of the minibatch."""
        self._latest_products(batch)  # so that the positions are those of this batch
        rows = batch.present(self._positions)
        moved = batch.present(residual)
        self._latest = None  # its scores are those before this step
        self._moved[rows] = True
        # a sparse matrix with a single 1 in each column adds row k of ``moved`` to row rows[k];
        # the end of one epoch and the start of the next can hold the same row: both count
        csc_matvecs(
            len(self._kept),
            len(rows),
            moved.shape[1],
            np.arange(len(rows) + 1),
            rows,
            np.ones(len(rows), self._kept.dtype),
            _flat(moved),
            _flat(self._kept),
        )

    def state(self) -> dict[str, Floats]:
        return {**super().state(), "moved": self._moved}

    def restore(self, state: Mapping[str, Floats]) -> None:
        super().restore(state)
        self._moved[...] = state["moved"]

    def stand(self, users: Indices, rounds: Indices) -> None:
        assert self._stood is not None
        for user, count in zip(users.tolist(), rounds.tolist(), strict=True):
            moved = self._moved_rows(user)
            self._stood[moved] += count * self._kept[moved]

    def _coefficients(self, user: int, average_over: int) -> Columns:
        """The rows of A_i that have been moved, or of its average over that number of rounds."""
        moved = self._moved_rows(user)
        if not average_over:
            return self._kept[moved]
        assert self._stood is not None
        return self._stood[moved] / average_over

    def theta(self, user: int, average_over: int = 0) -> Columns:
        coefficients = self._coefficients(user, average_over)
        rows = self._own.order(user)[: len(coefficients)]
        own = self._table.x[rows].astype(self._kept.dtype)
        return np.asarray(-(own.T @ coefficients))

    def part_scores(self, user: int, part: MeasuredRows, average_over: int = 0) -> Columns:
        coefficients = self._coefficients(user, average_over)
        cross = self._own.cross(user, part)
        return cross[:, : len(coefficients)] @ coefficients


@dataclass(frozen=True)
class Cost:
    """The cost of one way to keep θ.

    Args:
        work: the number of multiplications over the whole training.
        numbers: the number of floating-point numbers kept for each column.
        fixed: the number of those kept whatever the number of columns.
    """

    work: float
    numbers: int
    fixed: int


def costs(population: Population, columns: int, visits: float) -> dict[Kind, Cost]:
    """The cost of each way that can be used for these data.

    Args:
        population: everyone's data.
        columns: the number of settings that have a θ, times the number of outputs.
        visits: the expected number of visits of all users together.
    """
    users = len(population)
    numbers = users * population.features
    samples = visits * population.batch_size
    work = 2.0 * samples * population.features * columns
    direct = Cost(work, numbers, fixed=0)
    ways: dict[Kind, Cost] = {"direct": direct}
    if isinstance(population, Table):
        ways["span"] = _span_cost(population, columns, visits)
    return ways


def _span_cost(table: Table, columns: int, visits: float) -> Cost:
    users = len(table)
    rows = int(table.offsets[-1])
    squares = table.sizes.astype(float) ** 2
    gram_numbers = int(squares.sum())
    numbers_per_row = float(table.features)
    if isinstance(table.x, sparse.csr_array):
        numbers_per_row = table.x.nnz / rows
    share_of_grams = min(1.0, visits / users)  # users who never take part need none
    gram_work = share_of_grams * gram_numbers * numbers_per_row
    samples = visits * table.batch_size
    step_work = samples * (rows / users + 1) * columns
    return Cost(step_work + gram_work, rows, fixed=gram_numbers)


def cheapest(population: Population, columns: int, visits: float) -> Kind:
    """The way with the least work; the arguments are those of ``costs``. Results do not depend on
    it."""
    ways = costs(population, columns, visits)
    return min(ways, key=lambda kind: ways[kind].work)


def thetas(
    kind: Kind,
    population: Population,
    columns: int,
    dtype: DType,
    average: bool,
) -> Thetas:
    """θ = 0 for every user, kept in the given way.

    Args:
        kind: the way to keep θ.
        population: everyone's data.
        columns: the number of settings that have a θ, times the number of outputs.
        dtype: the precision of θ.
        average: whether to keep what the average iterates need, too.
    """
    if kind == "direct":
        return Direct(population, columns, dtype, average)
    if not isinstance(population, Table):
        raise ValueError(
            f"kind={kind!r} needs finitely many rows per user and here every sample is new: use "
            "kind='direct'"
        )
    return Span(population, columns, dtype, average)


def subtract_product(target: Columns, x: ByFeature, residual: Columns) -> None:
    """target −= xᵀ residual, in one pass over ``target`` if it is large.

    If x is sparse, only the rows of ``target`` that belong to columns with an entry are touched;
    the product by ``@`` would be a new array, most of it zero.
    """
    if isinstance(x, sparse.csc_array):
        _subtract_sparse(target, x, residual)
    elif target.size <= NUMBERS_IN_CACHE:
        target -= x.T @ residual
    elif x.size:
        in_place = _flat(target).reshape(target.shape)
        gemm = _gemm(target.dtype)
        gemm(
            -1.0,
            residual.T,
            x.T,
            1.0,
            in_place.T,
            trans_b=True,
            overwrite_c=True,
        )


def _subtract_sparse(target: Columns, x: sparse.csc_array, residual: Columns) -> None:
    turned = x.T  # in the same memory
    rows, samples = turned.shape
    csr_matvecs(
        rows,
        samples,
        residual.shape[1],
        turned.indptr,
        turned.indices,
        -turned.data,
        _flat(residual),
        _flat(target),
    )


def _flat(array: Floats) -> Floats:
    """Its numbers in one row, in the same memory: a copy would be changed instead of the array."""
    if not array.flags.c_contiguous:
        raise ValueError(
            f"only contiguous arrays can be changed in place, got strides {array.strides}: copy "
            "the array first"
        )
    return array.reshape(-1)


@functools.cache
def _gemm(dtype: DType) -> Any:
    return get_blas_funcs("gemm", dtype=dtype)


def kept_columns(array: Columns, columns: Indices) -> Columns:
    """``array[..., columns]`` in the memory of ``array``.

    Columns must be increasing, so that nothing is overwritten before it is read.
    """
    *leading, width = array.shape
    rows = array.reshape(math.prod(leading), width)
    flat = array.reshape(-1)
    kept = len(columns)
    step = max(1, NUMBERS_MOVED_AT_ONCE // max(1, width))
    for start in range(0, len(rows), step):
        block = rows[start : start + step, columns]
        begin = start * kept
        end = begin + block.size
        flat[begin:end] = block.reshape(-1)
    size = len(rows) * kept
    return flat[:size].reshape(*leading, kept)
