"""Where the cohort engine keeps every θ_i of every setting, and which of two ways is the cheaper.

``Direct`` keeps θ_i itself, d × columns a user. ``Span`` uses that with finitely many samples θ_i stays in the span of
the user's own n_i rows: θ_i = −X_iᵀA_i. It keeps A_i, n_i × columns, and the Gram matrix X_i X_iᵀ, so that a step of
θ_i is a write of m rows and nothing of size d is touched. Both give the same numbers, to rounding.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.linalg import get_blas_funcs
from scipy.sparse._sparsetools import csc_matvecs, csr_matvecs  # private; nothing public adds in place

from flwr_ppsgd.simulation.batches import Batch, Features, Indices, Population, Table

Kind: TypeAlias = Literal["direct", "span"]
Columns: TypeAlias = NDArray[Any]


class Thetas(Protocol):
    """θ of every user for the settings that have one; one column for each (setting, output)."""

    def scores(self, batch: Batch) -> Columns:
        """X_i θ_i: users × m × columns."""
        ...

    def gram(self, batch: Batch) -> NDArray[Any]:
        """X_i X_iᵀ of the minibatches: users × m × m."""
        ...

    def step(self, batch: Batch, residual: Columns) -> None:
        """θ_i ← θ_i − X_iᵀ residual_i; every user at most once in a batch."""
        ...

    def stand(self, users: Indices, rounds: Indices) -> None:
        """Count the present θ_i of some users for so many more rounds, for their average iterate."""
        ...

    def theta(self, user: int, average_over: int = 0) -> Columns:
        """θ_i, or where a number of rounds is given the sum of what stood divided by it: d × columns."""
        ...

    def test_scores(self, user: int, x: Features, average_over: int = 0) -> Columns:
        """x θ_i for the user's test rows, the same ones in every call."""
        ...

    def keep(self, columns: Indices) -> None:
        """Forget all other columns."""
        ...

    def state(self) -> dict[str, NDArray[Any]]:
        """All that steps have changed."""
        ...

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None: ...


class _Columns:
    """One array with a column for each (setting, output), and the sum of what stood in it where averages are wanted."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], average: bool) -> None:
        self._kept: Columns = np.zeros(shape, dtype)
        self._stood: Columns | None = np.zeros(shape, dtype) if average else None

    def keep(self, columns: Indices) -> None:
        self._kept = kept_columns(self._kept, columns)
        self._stood = None if self._stood is None else kept_columns(self._stood, columns)

    def state(self) -> dict[str, NDArray[Any]]:
        return {"thetas": self._kept} | ({} if self._stood is None else {"stood": self._stood})

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._kept[...] = state["thetas"]
        if self._stood is not None:
            self._stood[...] = state["stood"]


class Direct(_Columns):
    """θ_i itself: users × d × columns."""

    def __init__(self, population: Population, columns: int, dtype: np.dtype[Any], average: bool) -> None:
        super().__init__((len(population), population.features, columns), dtype, average)

    def scores(self, batch: Batch) -> Columns:
        x = batch.dense()
        out = np.empty((*x.shape[:2], self._kept.shape[2]), self._kept.dtype)
        for place, user in enumerate(batch.users.tolist()):
            np.matmul(x[place], self._kept[user], out=out[place])
        return out

    def gram(self, batch: Batch) -> NDArray[Any]:
        return batch.gram()

    def step(self, batch: Batch, residual: Columns) -> None:
        x = batch.dense()
        for place, user in enumerate(batch.users.tolist()):
            subtract_product(self._kept[user], x[place], residual[place])

    def stand(self, users: Indices, rounds: Indices) -> None:
        assert self._stood is not None
        for user, count in zip(users.tolist(), rounds.tolist(), strict=True):
            self._stood[user] += count * self._kept[user]

    def theta(self, user: int, average_over: int = 0) -> Columns:
        if not average_over:
            return np.asarray(self._kept[user])
        assert self._stood is not None
        return np.asarray(self._stood[user] / average_over)

    def test_scores(self, user: int, x: Features, average_over: int = 0) -> Columns:
        return np.asarray(x @ self.theta(user, average_over))


class Span(_Columns):
    """A_i with θ_i = −X_iᵀA_i: all rows × columns. Gram matrices are worked out when a user first needs them."""

    def __init__(self, table: Table, columns: int, dtype: np.dtype[Any], average: bool) -> None:
        super().__init__((int(table.offsets[-1]), columns), dtype, average)
        self._table = table
        self._grams: dict[int, NDArray[Any]] = {}
        self._crosses: dict[int, NDArray[Any]] = {}
        self._latest: Batch | None = None
        self._products = (self._kept[:0], self._kept[:0])

    def _own(self, user: int) -> slice:
        return slice(int(self._table.offsets[user]), int(self._table.offsets[user + 1]))

    def _gram(self, user: int) -> NDArray[Any]:
        """X_i X_iᵀ, kept."""
        if user not in self._grams:
            self._grams[user] = _product(self._table.own(user), self._table.own(user), self._kept.dtype)
        return self._grams[user]

    def _against_own(self, batch: Batch) -> tuple[Columns, NDArray[Any]]:
        """(X_i θ_i, X_i X_iᵀ) of the minibatches, both from the same rows of the users' Gram matrices; kept."""
        if self._latest is not batch:
            assert batch.rows is not None
            users, m = batch.rows.shape
            scores = np.zeros((users, m, self._kept.shape[1]), self._kept.dtype)
            blocks = np.zeros((users, m, m), self._kept.dtype)
            starts = self._table.offsets[batch.users]
            within = batch.rows - starts[:, None]
            each = (a.tolist() for a in (batch.users, starts, self._table.offsets[1:][batch.users], batch.counts))
            for place, (user, start, end, count) in enumerate(zip(*each, strict=True)):
                drawn = within[place, :count]
                products = self._gram(user).take(drawn, axis=0)
                np.dot(products, self._kept[start:end], out=scores[place, :count])
                blocks[place, :count, :count] = products.take(drawn, axis=1)
            self._latest, self._products = batch, (np.negative(scores, out=scores), blocks)
        return self._products

    def scores(self, batch: Batch) -> Columns:
        return self._against_own(batch)[0]

    def gram(self, batch: Batch) -> NDArray[Any]:
        return self._against_own(batch)[1]

    def step(self, batch: Batch, residual: Columns) -> None:
        assert batch.rows is not None
        rows, moved = batch.present(batch.rows), batch.present(residual)
        self._latest = None  # its scores are those before this step
        # the end of one epoch and the start of the next can hold the same row: both count
        once = np.arange(len(rows) + 1), rows, np.ones(len(rows), self._kept.dtype)
        csc_matvecs(len(self._kept), len(rows), moved.shape[1], *once, _flat(moved), _flat(self._kept))

    def stand(self, users: Indices, rounds: Indices) -> None:
        assert self._stood is not None
        for user, count in zip(users.tolist(), rounds.tolist(), strict=True):
            self._stood[self._own(user)] += count * self._kept[self._own(user)]

    def _coefficients(self, user: int, average_over: int) -> Columns:
        if not average_over:
            return self._kept[self._own(user)]
        assert self._stood is not None
        return self._stood[self._own(user)] / average_over

    def theta(self, user: int, average_over: int = 0) -> Columns:
        own = self._table.own(user).astype(self._kept.dtype)
        return np.asarray(-(own.T @ self._coefficients(user, average_over)))

    def test_scores(self, user: int, x: Features, average_over: int = 0) -> Columns:
        if user not in self._crosses:
            self._crosses[user] = _product(x, self._table.own(user), self._kept.dtype)
        return -(self._crosses[user] @ self._coefficients(user, average_over))


@dataclass(frozen=True)
class Cost:
    """What one way to keep θ takes.

    work: multiplications over the whole training. numbers: floating-point numbers kept for each column. fixed: kept
    whatever the number of columns.
    """

    work: float
    numbers: int
    fixed: int


def costs(population: Population, columns: int, visits: float) -> dict[Kind, Cost]:
    """Of every way that can be used, for so many columns and so many visits of all users together."""
    users, m, d = len(population), population.batch_size, population.features
    ways: dict[Kind, Cost] = {"direct": Cost(2.0 * visits * m * d * columns, users * d, 0)}
    if isinstance(population, Table):
        n, squares = int(population.offsets[-1]), int((population.sizes.astype(float) ** 2).sum())
        stored = population.x.nnz / n if isinstance(population.x, sparse.csr_array) else d
        used = min(1.0, visits / users)  # Gram matrices of users who never take part are never made
        work = visits * m * (n / users + 1) * columns + used * squares * stored
        ways["span"] = Cost(work, n, squares)
    return ways


def cheapest(population: Population, columns: int, visits: float) -> Kind:
    """The way with the least work. Results do not depend on it."""
    ways = costs(population, columns, visits)
    return min(ways, key=lambda kind: ways[kind].work)


def thetas(kind: Kind, population: Population, columns: int, dtype: np.dtype[Any], average: bool) -> Thetas:
    if kind == "direct":
        return Direct(population, columns, dtype, average)
    if not isinstance(population, Table):
        raise ValueError("the span of a user's rows needs finitely many of them: keep θ itself where samples are fresh")
    return Span(population, columns, dtype, average)


def subtract_product(target: Columns, x: Features, residual: Columns) -> None:
    """target −= xᵀ residual, in one pass over ``target``; of a sparse x only the rows of words that occur are touched.

    A product of sparse matrices by ``@`` would be a new array, most of it zero.
    """
    if isinstance(x, sparse.csr_array):
        words = x.T.tocsr()
        size = (*words.shape, residual.shape[1])
        csr_matvecs(*size, words.indptr, words.indices, -words.data, _flat(residual), _flat(target))
    elif target.size and x.size:
        rows = _flat(target).reshape(target.shape)
        _gemm(target.dtype)(-1.0, residual.T, x.T, 1.0, rows.T, trans_b=True, overwrite_c=True)


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    """Its numbers in one row, in the same memory: a copy would be changed in its place."""
    if not array.flags.c_contiguous:
        raise ValueError("only contiguous arrays can be changed in place")
    return array.reshape(-1)


@functools.cache
def _gemm(dtype: np.dtype[Any]) -> Any:
    return get_blas_funcs("gemm", dtype=dtype)


def kept_columns(array: Columns, columns: Indices) -> Columns:
    """``array[..., columns]`` in the memory of ``array``: columns are increasing, so nothing is overwritten unread."""
    flat, rows = array.reshape(-1), array.reshape(math.prod(array.shape[:-1]), array.shape[-1])
    step = max(1, (1 << 20) // max(1, array.shape[-1]))
    for start in range(0, len(rows), step):
        block = rows[start : start + step, columns]
        flat[start * len(columns) : start * len(columns) + block.size] = block.reshape(-1)
    return flat[: len(rows) * len(columns)].reshape(*array.shape[:-1], len(columns))


def _product(left: Features, right: Features, dtype: np.dtype[Any]) -> NDArray[Any]:
    """left rightᵀ, dense."""
    product = left.astype(dtype) @ right.astype(dtype).T
    return product.toarray() if sparse.issparse(product) else np.asarray(product)
