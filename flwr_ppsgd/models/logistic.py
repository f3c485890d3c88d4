"""The personal part of a linear model with softmax, solved around a published w.

As in ``ridge``, for a trust β in w and a penalty λ, with the cross-entropy ℓ:

    θ = (β − 1)·w + argmin_v Σ_j ℓ(y_j, (βw + v)ᵀx_j) + ½λ‖v‖².

Each candidate is fitted to all rows, and once more without each fifth of them, all side by side.
The user takes the average of all candidates, weighted by their errors on the rows left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.learner import Solution, generator
from flwr_ppsgd.models.ridge import Columns, Design, Features, Flags, Floats, Span, finite_rows

TRUSTS = np.array([0.0, 0.5, 1.0])  # β
PENALTIES = np.array([0.03, 0.2, 1.3, 10.0])  # λ, in units of trace(K)/n over the classes
FOLDS = 5
STEPS = 40
LARGEST_SCORE = 1e30  # a w with larger scores is not trusted
CURVATURE = 0.5  # no second derivative of the cross-entropy is larger


def log_softmax(scores: Floats) -> Floats:
    """The logarithms of the chances, along the last axis."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True)
    logs: Floats = shifted - np.log(total)
    return logs


def softmax(scores: NDArray[Any]) -> NDArray[Any]:
    """The chances, along the last axis, in the precision of the scores."""
    # for a few rows numpy's methods take longer to call these than they take
    largest = np.maximum.reduce(scores, axis=-1, keepdims=True)
    chances: NDArray[Any] = np.exp(scores - largest)
    chances /= np.add.reduce(chances, axis=-1, keepdims=True)
    return chances


@dataclass(frozen=True, eq=False)
class Fits:
    """Candidates on one span, around one head.

    Args:
        place: the number of the span.
        head: the number of the head.
        trusts: β of each candidate.
        penalties: λ of each, in units of trace(K)/n over the classes.
        coordinates: candidates × r × K.
        left_out: candidates × n × K: the scores of rows that were left out.
    """

    place: int
    head: int
    trusts: Vector
    penalties: Vector
    coordinates: Floats
    left_out: Floats


def folds(rows: int) -> Floats:
    """Which rows each fit sees, as 1 and 0: all of them, then all but each fold; fits × rows.

    A user with fewer than five rows leaves out one at a time; the only row of a user is left out
    too.
    """
    count = min(FOLDS, rows)
    fold = generator("folds", rows).permutation(rows) % count
    without = fold != np.arange(count)[:, None]
    return np.vstack([np.ones(rows), without])


def fitted(span: Span, y: Floats, offsets: Floats, penalties: Vector, seen: Floats) -> Floats:
    """The penalised fits by accelerated gradient steps: fits × candidates × r × K.

    In the basis of the span the bound on the second derivatives, ½s² + λ, is diagonal, and it
    holds for any part of the rows. Single precision is twice as fast, and far more than the data
    determine.

    Args:
        span: of the user's rows.
        y: n × K, one-hot.
        offsets: candidates × n × K, the scores without the own part.
        penalties: λ of each candidate.
        seen: as of ``folds``.
    """
    rows = (span.left * span.sizes).astype(np.float32)
    shape = (len(seen), len(penalties), y.shape[1])
    columns = math.prod(shape)
    strength = penalties[:, None].astype(np.float32)
    squares = span.sizes[:, None, None, None].astype(np.float32) ** 2
    steps = 1.0 / (CURVATURE * squares + strength)  # r × 1 × candidates × 1
    counts = seen.T[:, :, None, None].astype(np.float32)  # n × fits × 1 × 1
    fixed = offsets.swapaxes(0, 1)[:, None].astype(np.float32)  # n × 1 × candidates × K
    targets = y[:, None, None].astype(np.float32)  # n × 1 × 1 × K
    now = np.zeros((rows.shape[1], *shape), np.float32)
    ahead = now
    momentum = 1.0
    for _ in range(STEPS):
        own = rows @ ahead.reshape(len(ahead), columns)
        errors = counts * (softmax(fixed + own.reshape(len(rows), *shape)) - targets)
        pull = rows.T @ errors.reshape(len(errors), columns)
        following = ahead - steps * (pull.reshape(ahead.shape) + strength * ahead)
        grown = (1.0 + math.sqrt(1.0 + 4.0 * momentum**2)) / 2.0
        ahead = following + (momentum - 1.0) / grown * (following - now)
        now = following
        momentum = grown
    return np.moveaxis(now, 0, 2).astype(np.float64)


def left_out(span: Span, offsets: Floats, fits: Floats, seen: Floats) -> Floats:
    """The scores of each row by the fit that did not see it: candidates × n × K."""
    rows = span.left * span.sizes
    scores = offsets + rows @ fits[1:]  # folds × candidates × n × K
    fold: NDArray[np.intp] = seen[1:].argmin(axis=0)
    return np.asarray(scores[fold, :, np.arange(len(rows))].swapaxes(0, 1))


class Logistic:
    """One user's rows with softmax, ready to be solved for any w.

    Rows that hold NaN or infinity are left out, with a line in the log.

    Args:
        x: n × d, dense or sparse.
        y: n × K, one-hot.
        groups: as for ``ridge.Design``.
    """

    def __init__(self, x: Features, y: Floats, groups: Sequence[Columns] = ()) -> None:
        x, self._y = finite_rows(x, y)
        self._design = Design(x, groups)

    def solve(self, w: Vector) -> Solution:
        """θ for this w, and what was chosen: the errors are mean cross-entropies."""
        if not len(self._y):
            return Solution(0.0 * w)
        heads = self._design.heads(w)
        predictions, telling = self._design.predictions(heads, largest=LARGEST_SCORE)
        fits = self._fits(predictions, telling)
        weights = self._weights(fits, TRUSTS)
        trust = sum(float(own @ each.trusts) for each, own in zip(fits, weights, strict=True))
        penalties = [own @ np.log(each.penalties) for each, own in zip(fits, weights, strict=True)]
        chosen = {
            "beta": trust,
            "ridge": float(np.exp(sum(penalties))),
            "loo": self._blended_loss(fits, weights),
            "loo-local": self._blended_loss(fits, self._weights(fits, TRUSTS[:1])),
            "loo-shared": float(self._losses(predictions[:, 0])),
        }
        personal = self._blended(heads, fits, weights)
        return Solution((personal - heads[0]).reshape(-1), chosen)

    def own_size(self) -> float:
        """The root mean square of the local solution over the features that the user has."""
        nothing = np.zeros(self._design.x.shape[1] * self._y.shape[1])
        return self._design.size(self.solve(nothing).theta)

    def _fits(self, predictions: Floats, telling: Flags) -> list[Fits]:
        """For each span, around the whole w and around its part in the span's columns."""
        fits = []
        for place in range(len(self._design.spans)):
            for head in sorted({0, place}):
                trusts = TRUSTS if telling[head] else TRUSTS[:1]
                if head:
                    trusts = trusts[1:]  # β = 0 is the same for every head: it counts once
                fits.append(self._fitted(place, head, trusts, predictions[:, head]))
        return fits

    def _fitted(self, place: int, head: int, trusts: Vector, prediction: Floats) -> Fits:
        """Every pair of a trust and a penalty."""
        span = self._design.spans[place]
        betas = np.repeat(trusts, len(PENALTIES))
        penalties = np.tile(PENALTIES, len(trusts))
        strengths = penalties * (span.unit or 1.0) / self._y.shape[1]
        offsets = betas[:, None, None] * prediction
        seen = folds(len(self._y))
        fits = fitted(span, self._y, offsets, strengths, seen)
        scores = left_out(span, offsets, fits, seen)
        return Fits(place, head, betas, penalties, fits[0], scores)

    def _losses(self, scores: Floats) -> Floats:
        """The mean cross-entropy over rows; scores are … × n × K."""
        losses: Floats = -(self._y * log_softmax(scores)).sum(axis=-1).mean(axis=-1)
        return losses

    def _weights(self, fits: Sequence[Fits], trusts: Vector) -> list[Vector]:
        """∝ exp(−n·loss), the likelihood of the rows left out, for candidates of these trusts."""
        losses = np.concatenate([self._losses(each.left_out) for each in fits])
        betas = np.concatenate([each.trusts for each in fits])
        losses[~np.isin(betas, trusts)] = np.inf
        weights = np.exp(-len(self._y) * (losses - losses.min()))
        ends = np.cumsum([len(each.trusts) for each in fits])
        return np.split(weights / weights.sum(), ends[:-1])

    def _blended_loss(self, fits: Sequence[Fits], weights: Sequence[Vector]) -> float:
        scores = np.zeros_like(self._y)
        for each, own in zip(fits, weights, strict=True):
            scores += np.einsum("c,cnk->nk", own, each.left_out)
        return float(self._losses(scores))

    def _blended(
        self, heads: Sequence[Floats], fits: Sequence[Fits], weights: Sequence[Vector]
    ) -> Floats:
        """βw plus the own part, d × K."""
        personal = np.zeros_like(heads[0])
        for each, own in zip(fits, weights, strict=True):
            span = self._design.spans[each.place]
            coordinates = np.einsum("c,crk->rk", own, each.coordinates)
            personal[self._design.choices[each.place]] += span.lifted(coordinates)
            personal += float(own @ each.trusts) * heads[each.head]
        return personal
