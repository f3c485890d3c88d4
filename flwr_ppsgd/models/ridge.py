"""The personal part of a linear model, solved: ridge regression around a published w.

For a user with rows X and targets Y, for a trust β in w and a penalty λ,

    θ = (β − 1)·w + Xᵀ(K + λI)⁻¹(Y − βXw),    K = XXᵀ,

so that (w + θ)ᵀx = βwᵀx plus the user's own part. β = 0 is local learning. The error of every
candidate (β, λ) on a row that is left out has a closed form, r_j / [(K + λI)⁻¹]_jj with
r = (K + λI)⁻¹(Y − βXw), and one eigendecomposition serves all of them. The user takes the average
of all candidates, weighted by that error. Predictions are linear, so θ is one vector.

Everything is computed from the user's own rows and the published w, and stays with the user.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.arrays import DOUBLE
from flwr_ppsgd.learner import Solution

log = logging.getLogger("flwr.ppsgd")

Features: TypeAlias = Any  # an array or a scipy.sparse.csr_array, which has no types
Columns: TypeAlias = NDArray[np.intp]
Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]

TRUSTS = np.array([0.0, 0.25, 0.5, 0.75, 1.0])  # β
# λ, in units of trace(K)/n; the largest leave next to nothing but w
PENALTIES = np.array([0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0])
SMALLEST_ERROR = 1e-12  # of the targets' mean square: below it is round-off
SMALLEST_EIGENVALUE = 1e-13  # of the largest one, for each row: below it is round-off
LARGEST_PREDICTION = 1e100  # of the largest target: a w that predicts more is not trusted


@dataclass(frozen=True, eq=False)
class Span:
    """A user's rows in an orthonormal basis of their span: X = scale·U diag(s) Vᵀ.

    Args:
        rows: X / scale, n × the chosen columns, dense or sparse.
        scale: the largest entry of X, so that no square overflows.
        left: U, n × r.
        sizes: s, r numbers above 0.
    """

    rows: Features
    scale: float
    left: Floats
    sizes: Vector

    @classmethod
    def of(cls, x: Features) -> "Span":
        """From n rows, by the smaller of their two Gram matrices."""
        length, width = x.shape
        scale = float(abs(x).max()) if length * width else 0.0
        if scale == 0.0:
            return cls(x, 1.0, np.zeros((length, 0)), np.zeros(0))
        rows = x / scale
        if length <= width:
            left, sizes = _factors(dense(rows @ rows.T))
        else:
            right, sizes = _factors(dense(rows.T @ rows))
            left = dense(rows @ right) / sizes
        return cls(rows, scale, left, sizes)

    @property
    def unit(self) -> float:
        """trace(K)/n of the scaled rows: the mean square length of a row."""
        return float((self.sizes**2).sum()) / max(1, len(self.left))

    def lifted(self, coordinates: Floats) -> Floats:
        """V·coordinates / scale: r × m coordinates as parameters of the chosen columns."""
        dual = self.left @ (coordinates / self.sizes[:, None])
        return dense(self.rows.T @ dual) / self.scale


def dense(values: Features) -> Floats:
    """An array of what may be sparse."""
    if type(values) is np.ndarray and values.dtype == DOUBLE:
        return values
    if hasattr(values, "toarray"):
        values = values.toarray()
    return np.asarray(values, dtype=np.float64)


def _factors(gram: Floats) -> tuple[Floats, Vector]:
    """Eigenvectors, and square roots of the eigenvalues, without those that are round-off."""
    values, vectors = np.linalg.eigh(gram)
    kept = values > len(gram) * SMALLEST_EIGENVALUE * values[-1]
    return vectors[:, kept], np.sqrt(values[kept])


@dataclass(frozen=True, eq=False)
class Path:
    """The ridge regressions of some targets on one span, for every penalty.

    Args:
        errors: penalties × n × …: on rows that were left out.
        coordinates: penalties × r × …: the solutions with all rows.
    """

    errors: Floats
    coordinates: Floats

    @classmethod
    def of(cls, span: Span, targets: Floats) -> "Path":
        """U diag(s²/(s² + λ)) Uᵀ is the hat matrix; targets are n × …"""
        length, *shape = targets.shape
        flat = targets.reshape(length, math.prod(shape))
        along = span.left.T @ flat  # r × m
        squares = span.sizes**2
        penalties = PENALTIES[:, None] * span.unit
        kept = squares / (squares + penalties)  # penalties × r
        fitted = span.left @ (kept[:, :, None] * along)  # penalties × n × m
        leverage = kept @ (span.left**2).T  # penalties × n
        errors = (flat - fitted) / (1.0 - leverage)[:, :, None]
        coordinates = (kept / span.sizes)[:, :, None] * along
        return cls(
            errors.reshape(len(PENALTIES), length, *shape),
            coordinates.reshape(len(PENALTIES), len(squares), *shape),
        )


class Design:
    """A user's rows, and which of their columns a candidate may use.

    Args:
        x: n × d, dense or sparse, finite.
        groups: the columns of several representations that stand side by side in x. The user's own
            part then lives on all columns or on those of one group, and w is trusted as a whole
            or in one group alone, whichever errs less. Without groups there is one.
    """

    def __init__(self, x: Features, groups: Sequence[Columns] = ()) -> None:
        self.x = x
        self.choices = [np.arange(x.shape[1])]
        if len(groups) > 1:
            self.choices += groups
        parts = [x[:, columns] for columns in self.choices[1:]]
        self.spans = [Span.of(part) for part in (x, *parts)]

    def heads(self, w: Vector) -> list[Floats]:
        """w as d × K for each choice of columns; zero elsewhere."""
        shared = w.reshape(self.x.shape[1], -1)
        heads = []
        for columns in self.choices:
            head = np.zeros_like(shared)
            head[columns] = shared[columns]
            heads.append(head)
        return heads

    def predictions(
        self,
        heads: Sequence[Floats],
        unit: float = 1.0,
        largest: float = LARGEST_PREDICTION,
    ) -> tuple[Floats, Flags]:
        """X w / unit of each head, n × heads × K, and which of them say anything.

        Those that are zero, or too large to be trusted, do not, and are zero.
        """
        predictions = []
        telling = []
        for head in heads:
            with np.errstate(over="ignore", invalid="ignore"):
                prediction = dense(self.x @ head) / unit
                usable = bool(np.all(abs(prediction) < largest))
            predictions.append(prediction if usable else np.zeros_like(prediction))
            telling.append(usable and bool(prediction.any()))
        return np.stack(predictions, axis=1), np.array(telling)

    def size(self, parameters: Vector) -> float:
        """The root mean square of d × K parameters over the features that the user has."""
        if not self.x.shape[0]:
            return 0.0
        present = dense(abs(self.x).max(axis=0)).reshape(-1) > 0
        outputs = len(parameters) // max(1, len(present))
        return root_mean_square(parameters.reshape(len(present), outputs)[present])


class Ridge:
    """One user's rows with the squared loss, ready to be solved for any w.

    Rows that hold NaN or infinity are left out, with a line in the log.

    Args:
        x: n × d, dense or sparse.
        y: n × K.
        groups: as for ``Design``.
    """

    def __init__(self, x: Features, y: Floats, groups: Sequence[Columns] = ()) -> None:
        x, y = finite_rows(x, y)
        self._design = Design(x, groups)
        self._unit = float(abs(y).max(initial=0.0)) or 1.0
        self._y = y / self._unit
        self._mean_square = root_mean_square(self._y) ** 2
        self._own = [Path.of(span, self._y) for span in self._design.spans]

    def solve(self, w: Vector) -> Solution:
        """θ for this w, and what was chosen: the errors are root mean squares."""
        if not len(self._y):
            return Solution(0.0 * w)
        heads = self._design.heads(w)
        predictions, telling = self._design.predictions(heads, self._unit)
        given = [Path.of(span, predictions) for span in self._design.spans]
        losses = self._losses(given, telling)
        blend = self._weighted(losses)
        chosen = {
            "beta": float(blend.trusts.sum()),
            "ridge": blend.penalty,
            "loo": self._error(given, blend),
            "loo-local": self._error(given, self._weighted(_local(losses))),
            "loo-shared": self._unit * root_mean_square(self._y - predictions[:, 0]),
        }
        personal = self._own_part(given, blend)
        for trust, head in zip(blend.trusts, heads, strict=True):
            personal += trust * head
        return Solution((personal - heads[0]).reshape(-1), chosen)

    def own_size(self) -> float:
        """The root mean square of the local solution over the features that the user has."""
        nothing = np.zeros(self._design.x.shape[1] * self._y.shape[1])
        return self._design.size(self.solve(nothing).theta)

    def _weighted(self, losses: Floats) -> "_Blend":
        return _Blend(blending_weights(losses, len(self._y), self._mean_square))

    def _losses(self, given: Sequence[Path], telling: Flags) -> Floats:
        """Mean squares of leave-one-out errors: spans × penalties × heads × trusts.

        The error of a trust β is e_Y − β·e_Xw: three products serve all trusts.
        """
        found = []
        for own, path in zip(self._own, given, strict=True):
            of_y = np.einsum("lnk,lnk->l", own.errors, own.errors)
            mixed = np.einsum("lnk,lnqk->lq", own.errors, path.errors)
            of_w = np.einsum("lnqk,lnqk->lq", path.errors, path.errors)
            by_trust = of_y[:, None, None] - 2 * TRUSTS * mixed[:, :, None]
            found.append(by_trust + TRUSTS**2 * of_w[:, :, None])
        losses: Floats = np.maximum(np.array(found), 0.0) / self._y.size
        losses[:, :, ~telling, 1:] = math.inf
        losses[:, :, 1:, 0] = math.inf  # β = 0 is the same for every head: it counts once
        return losses

    def _own_part(self, given: Sequence[Path], blend: "_Blend") -> Floats:
        """The blend of all solutions of Y − βXw, d × K, without βw itself."""
        total = np.zeros((self._design.x.shape[1], self._y.shape[1]))
        for place, span in enumerate(self._design.spans):
            paths = self._own[place].coordinates, given[place].coordinates
            coordinates = self._unit * blend.of(place, *paths)
            total[self._design.choices[place]] += span.lifted(coordinates)
        return total

    def _error(self, given: Sequence[Path], blend: "_Blend") -> float:
        """The root mean square of the blend's own leave-one-out errors."""
        errors = 0.0 * self._y
        for place, own in enumerate(self._own):
            errors += blend.of(place, own.errors, given[place].errors)
        return self._unit * root_mean_square(errors)


@dataclass(frozen=True, eq=False)
class _Blend:
    """How much each candidate counts: spans × penalties × heads × trusts, together 1."""

    weights: Floats

    @property
    def trusts(self) -> Vector:
        """The mean β of each head."""
        return np.asarray(np.einsum("glqb,b->q", self.weights, TRUSTS))

    @property
    def penalty(self) -> float:
        """The geometric mean of λ, in units of trace(K)/n."""
        return math.exp(np.einsum("glqb,l->", self.weights, np.log(PENALTIES)))

    def of(self, place: int, of_y: Floats, of_w: Floats) -> Floats:
        """Σ weight·(of_y − β·of_w) over the candidates of one span.

        Args:
            place: which span.
            of_y: penalties × rows × K.
            of_w: penalties × rows × heads × K.
        """
        own = self.weights[place].sum(axis=(1, 2))
        trust = np.einsum("lqb,b->lq", self.weights[place], TRUSTS)
        mean_y: Floats = np.einsum("l,lnk->nk", own, of_y)
        mean_w: Floats = np.einsum("lq,lnqk->nk", trust, of_w)
        return mean_y - mean_w


def blending_weights(losses: Floats, rows: int, mean_square: float) -> Floats:
    """∝ exp(−½·n·(loss/least − 1)): the likelihood of n errors with the least loss as variance.

    Args:
        losses: of all candidates, mean squares; infinite for those that are out of the question.
        rows: n.
        mean_square: of the targets: a loss below 1e-12 of it is round-off.
    """
    least = max(float(losses.min()), SMALLEST_ERROR * mean_square)
    if least == 0.0:
        perfect = losses == 0.0
        return np.asarray(perfect / perfect.sum())
    weights = np.exp(-0.5 * rows * (np.maximum(losses / least, 1.0) - 1.0))
    return np.asarray(weights / weights.sum())


def _local(losses: Floats) -> Floats:
    """With β = 0 alone."""
    alone = np.full_like(losses, math.inf)
    alone[..., 0] = losses[..., 0]
    return alone


def root_mean_square(values: Floats) -> float:
    """√mean(values²), 0 for nothing, without overflow."""
    largest = float(abs(values).max(initial=0.0))
    if largest == 0.0:
        return 0.0
    return largest * math.sqrt(np.mean((values / largest) ** 2))


def finite_rows(x: Features, y: Floats) -> tuple[Features, Floats]:
    """Without rows that hold NaN or infinity; the log says how many these are."""
    sums = dense(x.sum(axis=1)).reshape(-1) + y.sum(axis=1)
    if np.isfinite(sums).all():
        return x, y
    # a sum that overflows is looked at closely
    finite = np.array([np.isfinite(dense(x[[row]])).all() for row in range(x.shape[0])])
    finite &= np.isfinite(y).all(axis=1)
    if not finite.all():
        log.warning(
            "%d of this user's %d rows hold NaN or infinity and are left out: clean the data",
            int((~finite).sum()),
            len(y),
        )
    return x[finite], y[finite]
