"""Products of each user's own rows, worked out once for all settings and engines on a table.

If the table is sparse, a user's rows are in the order of the first epoch here, the order in which
they are first drawn. So the rows that were drawn at least once come first, and in the first pass
over the data a product with them is a product with a part of a matrix. Dense rows stay in the order
of the table: there users pass over their few rows many times.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from flwr_ppsgd.learner import generator, shuffled_by

if TYPE_CHECKING:
    from flwr_ppsgd.lab.engines.batches import DType, Features, Floats, Indices, MeasuredRows


class OwnProducts:
    """X_i X_iᵀ of every user, and −x X_iᵀ for the rows x on which they measure.

    The matrices X_i X_iᵀ lie one after the other in one array. Each is computed when its user first
    takes part; until then its memory is not touched.

    Args:
        x: everyone's rows.
        offsets: of the users' rows, as for ``Table``.
        seed: of the shuffling, as for ``Table``.
        dtype: of the products.
    """

    def __init__(self, x: "Features", offsets: "Indices", seed: int, dtype: "DType") -> None:
        self._x = x
        self._offsets = offsets
        self._sizes = np.diff(offsets)
        self._seed = seed
        self._dtype = dtype
        self._source = generator("products")
        ends = np.cumsum(self._sizes**2)
        self._starts = ends - self._sizes**2
        self._numbers = np.empty(int(ends[-1]), dtype)  # of X_i X_iᵀ, by rows
        self._grams: dict[int, Floats] = {}  # X_i X_iᵀ, in the same memory
        self._reordered = sparse.issparse(x)
        self._positions = np.zeros(int(offsets[-1]), dtype=np.intp)
        self._crosses: dict[tuple[int, str], Floats] = {}

    def order(self, user: int) -> "Indices":
        """The user's rows of the table, in the order of the first epoch if they are sparse."""
        size = int(self._sizes[user])
        order = np.arange(size)
        if self._reordered:
            order = shuffled_by(self._source, self._seed, user, 0, size)
        return np.asarray(self._offsets[user] + order)

    def positions(self, users: "Indices", rows: "Indices") -> "Indices":
        """Where these rows of the table (users × any number) are if each user's are in ``order``:
        from offsets[i] to offsets[i+1]−1."""
        for user in users.tolist():
            self.gram(user)
        if not self._reordered:
            return rows
        return self._positions.take(rows)

    def gram(self, user: int) -> "Floats":
        """X_i X_iᵀ."""
        if user not in self._grams:
            self._grams[user] = self._new_gram(user)
        return self._grams[user]

    def _new_gram(self, user: int) -> "Floats":
        order = self.order(user)
        size = len(order)
        self._positions[order] = np.sort(order)
        start = int(self._starts[user])
        gram = self._numbers[start : start + size**2].reshape(size, size)
        own = self._x[order]
        gram[...] = _product(own, own, self._dtype)
        return gram

    def gram_rows(self, positions: "Indices", size: int) -> "Floats":
        """The rows of X_i X_iᵀ at these positions, if every user has ``size`` rows."""
        return np.asarray(self._numbers.reshape(-1, size).take(positions, axis=0))

    def blocks(self, users: "Indices", places: "Indices") -> "Floats":
        """X_i X_iᵀ between the rows at these places of each user's own: users × places × places."""
        sizes = self._sizes[users]
        row_starts = self._starts[users][:, None] + places * sizes[:, None]
        numbers = row_starts[:, :, None] + places[:, None, :]
        return np.asarray(self._numbers.take(numbers))

    def cross(self, user: int, part: "MeasuredRows") -> "Floats":
        """−x X_iᵀ for the user's rows x of a part of this table."""
        key = (user, part.name)
        if key not in self._crosses:
            own = self._x[self.order(user)]
            self._crosses[key] = -_product(part.own(user), own, self._dtype)
        return self._crosses[key]


def _product(left: "Features", right: "Features", dtype: "DType") -> "Floats":
    """left rightᵀ, dense."""
    turned = right.astype(dtype).T
    product: Any = left.astype(dtype) @ turned
    if sparse.issparse(product):
        return np.asarray(product.toarray())
    return np.asarray(product)
