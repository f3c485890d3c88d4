"""Numbers that users' data decide instead of somebody who tunes, paid for inside ε.

:class:`SizeVote` asks once, before the first round, how large users' own solutions typically are:
the rate of the server's steps follows from it. :class:`AdaptiveClip` lets the clip norm follow a
quantile of the users' norms, round by round.
"""

import math
from dataclasses import dataclass

import numpy as np

from flwr_ppsgd.algorithm import FixedSize, PrivateMetrics, Release, Vector
from flwr_ppsgd.checks import is_whole, require

ROUNDS = 50  # of the recipe; 20 and 100 do as well: only the distance that w travels counts
LOWEST_POWER = -24
POWERS = 48  # 2⁻²⁴ … 2²³
WINDOW = 4  # bins that are looked at together: sizes within a factor of 16
MOST_POWERS = 1000  # a float64 has about 2000
STANDARD_ERRORS = 3.5  # by which the votes must stand out from the noise
LEAST_SHARE = 0.25  # of the population, that must agree within a window
BELOW = "below-clip-norm"  # the private measure that adaptive clipping follows
LARGEST_CHANGE = 1e6  # by which the clip norm may leave its first value


@dataclass(frozen=True)
class SizeVote:
    """A vote on the typical size of users' own solutions: one-hot over powers of two, once.

    Everybody is asked, whatever the cohorts of the training. The noisy counts are published. The
    typical size lies where the most votes are within a window of four bins: that stands out from
    the noise long before a median does.

    Args:
        release: of the counts: everyone in the population, C, and the noise of the vote.
        lowest: the exponent of the first bin; public. Smaller sizes are counted there.
        powers: the number of bins; public. Larger sizes are counted in the last.
    """

    release: Release
    lowest: int = LOWEST_POWER
    powers: int = POWERS

    def __post_init__(self) -> None:
        cohort = self.release.cohort
        if isinstance(cohort, FixedSize) or cohort.rate < 1:
            raise ValueError(
                f"a vote asks everybody, got {cohort}: use Poisson(population, rate=1.0)"
            )
        if self.release.normalise or self.release.total_batch is not None:
            raise ValueError(
                "a vote counts users: leave normalise and total_batch out of its release"
            )
        whole = is_whole(self.lowest) and abs(self.lowest) <= MOST_POWERS
        rule = f"lowest must be a whole number from {-MOST_POWERS} to {MOST_POWERS}"
        require(whole, rule, self.lowest, "it is the exponent of the first bin")
        whole = is_whole(self.powers) and WINDOW <= self.powers <= MOST_POWERS
        rule = f"powers must be a whole number from {WINDOW} to {MOST_POWERS}"
        require(whole, rule, self.powers, "it is the number of bins")

    def typical(self, noisy: Vector) -> float | None:
        """The size that most users agree on, or None if nothing stands out from the noise.

        Args:
            noisy: the released sum, one number per bin.
        """
        counts = noisy / self.release.clip_norm
        windows = np.convolve(counts, np.ones(WINDOW), mode="valid")
        best = int(windows.argmax())
        noise = self.release.noise_multiplier * math.sqrt(WINDOW)
        needed = max(LEAST_SHARE * self.release.cohort.population, STANDARD_ERRORS * noise)
        if not windows[best] >= needed:
            return None
        votes = np.maximum(counts[best : best + WINDOW], 0.0)
        middle = float(votes @ np.arange(WINDOW)) / float(votes.sum())
        return float(2.0 ** (self.lowest + best + middle + 0.5))


def encode_size(size: float, lowest: int, powers: int, clip_norm: float) -> Vector:
    """One user's vote: C in the bin of ``size``, or zeros if it is not a positive number."""
    vote = np.zeros(powers)
    if 0 < size < math.inf:
        place = math.floor(math.log2(size)) - lowest
        vote[min(max(place, 0), powers - 1)] = clip_norm
    return vote


@dataclass(frozen=True)
class AdaptiveClip:
    """C_{t+1} = C_t·exp(−η(b̄_t − γ)), b̄_t the noisy share of users whose norm is at most C_t.

    The share is a private measure that is released along with the gradient: it takes its part of
    the clip norm, and ε stays what it is. Andrew et al., *Differentially Private Learning with
    Adaptive Clipping* (2021), with the bit inside the same Gaussian. Gradients are scaled to the
    release's C before they are summed and back afterwards, so the release is the same in every
    round.

    Args:
        quantile: γ, the share of users whose norm should be at most C.
        rate: η.
        share: of the squared clip norm, which the bit takes.
    """

    quantile: float = 0.5
    rate: float = 0.2
    share: float = 0.05

    def __post_init__(self) -> None:
        remedy = "0.5 is the median"
        require(0 < self.quantile < 1, "quantile must be in (0, 1)", self.quantile, remedy)
        require(0 < self.rate <= 2, "rate must be in (0, 2]", self.rate, "0.2 is usual")
        remedy = "it is taken from the gradient's clip norm"
        require(0 < self.share < 1, "share must be in (0, 1)", self.share, remedy)

    def measures(self, metrics: PrivateMetrics | None) -> PrivateMetrics:
        """The bit, encoded as −½ or ½, beside the measures that are released anyway."""
        if metrics is None:
            return PrivateMetrics({BELOW: 0.5}, self.share)
        share = metrics.share + self.share
        require(share < 1, "the shares of metrics and clip must be below 1", share, "lower one")
        return PrivateMetrics({**metrics.bounds, BELOW: 0.5}, share)

    def after(self, clip_norm: float, bit: float, first: float) -> float:
        """The next clip norm.

        Args:
            clip_norm: C of this round.
            bit: the released mean of the bits.
            first: C of the first round, from which it may move by a factor of a million.
        """
        below = min(max(bit + 0.5, 0.0), 1.0)
        moved = clip_norm * math.exp(-self.rate * (below - self.quantile))
        return min(max(moved, first / LARGEST_CHANGE), first * LARGEST_CHANGE)
