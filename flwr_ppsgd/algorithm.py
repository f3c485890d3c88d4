"""Personalized-Private-SGD (Bietti et al., ICML 2022) as values and pure functions.

A cohort says who takes part, a :class:`Release` what the server publishes about them,
:class:`Steps` how far both blocks of parameters move. Algorithms 1, 2 and 3 of the paper are
different values of these, never different code. Inside this module a model is one flat float64
vector, as in the paper.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.checks import count, is_whole, require

Vector: TypeAlias = NDArray[np.float64]
Reduction: TypeAlias = Literal["mean", "sum"]

FLOAT_INTEGER_BITS = 53  # float64 holds every integer up to 2^53
WORD_BITS = 63  # sums modulo 2^64 hold every integer of this size, with its sign
FINEST_GRID_BITS = 32
COARSEST_GRID_BITS = 20
LEAST_SHARE_BITS = 20  # of a client's share of the noise, in steps of the grid
NOISE_BITS = 26  # a finer grid would show how many floats of noise each of its steps holds
LARGEST_NORMAL = 14.0  # standard deviations, where the sampler in `noise` is cut off
LEAST_NOISE = 1e-6  # a smaller z protects nobody, and no accountant can tell it from 0
BLOCK = 1 << 15  # coordinates handled at once: the working set stays in the cache
CLIP_MARGIN = 2.0**-40  # relative; the rounding of a norm and of a product stays far below it
LEAST_SCALE = 1e-280  # a smaller factor has too few digits left
STANDARD_ERROR = "-standard-error"
ALWAYS_COMPLETE = 200  # up to this many clients of a secure sum are all neighbours
MOST_COMPLETE = 400  # up to this many on request
MOST_CLIENTS = 1 << 20  # of a secure sum
LARGEST_FAILURE = 1e-6


@dataclass(frozen=True)
class Poisson:
    """Every enrolled user takes part with probability ``rate``, independently.

    This is the sampling of Algorithms 1–3.

    Args:
        population: N, the number of enrolled users; public. A user who is offline still counts.
        rate: q in (0, 1]. 1 is everyone in every round: Algorithm 1.
    """

    population: int
    rate: float

    def __post_init__(self) -> None:
        _store_fields(self, population=count("population", self.population))
        remedy = "it is the chance to be drawn in a round"
        require(0 < self.rate <= 1, "rate must be in (0, 1]", self.rate, remedy)
        _store_fields(self, rate=float(self.rate))

    @property
    def amplifies(self) -> bool:
        """Whether secret sampling lowers ε: it does if some may be left out by chance."""
        return self.rate < 1

    @property
    def most_users(self) -> int:
        """The most users that a round may have."""
        return self.population

    @property
    def expected_users(self) -> float:
        """q·N, the mean size of a cohort."""
        return self.rate * self.population

    def members(self, uniforms: Vector) -> NDArray[np.intp]:
        """{i : u_i < q}, from one uniform in [0, 1) for each enrolled user."""
        return np.flatnonzero(uniforms < self.rate)


@dataclass(frozen=True)
class FixedSize:
    """Exactly ``size`` users per round, without replacement: the paper's experiments.

    No amplification theorem covers it with clients that keep state, so its guarantee is that of no
    sampling at all.

    Args:
        population: N, the number of enrolled users; public.
        size: Q, the number of users in a round.
    """

    population: int
    size: int

    def __post_init__(self) -> None:
        _store_fields(self, population=count("population", self.population))
        _store_fields(self, size=count("size", self.size))
        rule = f"size must be at most population={self.population}"
        require(self.size <= self.population, rule, self.size, "draw fewer or enrol more users")

    @property
    def rate(self) -> float:
        return self.size / self.population

    @property
    def amplifies(self) -> bool:
        return False

    @property
    def most_users(self) -> int:
        return self.size

    @property
    def expected_users(self) -> float:
        return float(self.size)

    def members(self, uniforms: Vector) -> NDArray[np.intp]:
        """The users with the ``size`` smallest uniforms; of equal ones the first."""
        largest = np.partition(uniforms, self.size - 1)[self.size - 1]
        candidates = np.flatnonzero(uniforms <= largest)
        order = np.argsort(uniforms[candidates], kind="stable")
        return np.sort(candidates[order[: self.size]])


Cohort: TypeAlias = Poisson | FixedSize


@dataclass(frozen=True)
class SecureSum:
    """Secure aggregation: the server learns the noisy sum of a round and no single vector.

    Each client adds its share of the noise, of variance (z·C)²/h, before it masks its vector. What
    is promised holds against the server together with at most t clients. A round has a sum if at
    least h + t clients stay to its end.

    Args:
        honest: h, the number of honest clients that stay in a round on which the guarantee counts.
            Beyond h the noise is more than what is charged for.
        colluding: t, the largest number of clients that may tell the server all they know, or leave
            out their noise.
        failure: η, the largest chance per round that neighbours chosen at random do not protect
            somebody. δ pays for it; not needed for up to 200 clients, all of whom are neighbours.
        neighbours: the least number of neighbours of a client, at most 399; n − 1 makes all of up
            to 400 clients neighbours. More are used if ``failure`` needs them.
    """

    honest: int
    colluding: int
    failure: float = 2.0**-40
    neighbours: int = 0

    def __post_init__(self) -> None:
        _store_fields(self, honest=count("honest", self.honest))
        rule = "honest must be at least 2"
        require(self.honest > 1, rule, self.honest, "a sum of one vector hides nothing")
        for name, most in (("colluding", MOST_CLIENTS), ("neighbours", MOST_COMPLETE - 1)):
            value = getattr(self, name)
            rule = f"{name} must be a whole number from 0 to {most}"
            require(is_whole(value) and 0 <= value <= most, rule, value, f"set {name}")
            _store_fields(self, **{name: int(value)})
        rule = "failure must be in (0, 1e-6]"
        remedy = "it is paid from δ in every round; 2**-40 is the default"
        require(0 < self.failure <= LARGEST_FAILURE, rule, self.failure, remedy)
        _store_fields(self, failure=float(self.failure))

    @property
    def least(self) -> int:
        """h + t, the fewest clients whose sum is unmasked."""
        return self.honest + self.colluding

    def is_complete(self, participants: int) -> bool:
        """Whether all of this many clients are neighbours of each other."""
        return participants <= ALWAYS_COMPLETE or self.neighbours >= participants - 1


@dataclass(frozen=True)
class Release:
    """One publication of the server: (Σ_i clip(g_i, C) + N(0, z²C² I)) / D.

    The noise that is added and the noise that is charged both come from this object, so they cannot
    drift apart.

    Args:
        cohort: who takes part.
        clip_norm: C, the largest Euclidean norm with which one user enters the sum.
        noise_multiplier: z, the standard deviation of the noise on the *sum*, in units of C.
            0 gives no privacy.
        total_batch: M = Σ_i m_i for Algorithm 2, where users send sums over their minibatches;
            public. None is Algorithm 3 (and 1), where they send means.
        aggregation: ``SecureSum`` if clients add the noise and the server sees the sum only. None:
            the server adds it, and is trusted.
    """

    cohort: Cohort
    clip_norm: float
    noise_multiplier: float
    total_batch: int | None = None
    aggregation: SecureSum | None = None

    def __post_init__(self) -> None:
        rule = "clip_norm must be positive and finite (1e-100 to 1e100)"
        require(1e-100 <= self.clip_norm <= 1e100, rule, self.clip_norm, "set the clip norm C")
        z = self.noise_multiplier
        rule = f"noise_multiplier must be finite and at least {LEAST_NOISE:g}, or 0"
        require(z == 0 or LEAST_NOISE <= z < math.inf, rule, z, "0 adds no noise: ε is infinite")
        _store_fields(self, clip_norm=float(self.clip_norm), noise_multiplier=float(z))
        if self.total_batch is not None:
            _store_fields(self, total_batch=count("total_batch", self.total_batch))
        rule = (
            f"a sum over population={self.cohort.population} with this noise_multiplier could "
            f"leave the whole numbers that float64 holds (2^{FLOAT_INTEGER_BITS})"
        )
        most = FLOAT_INTEGER_BITS - 1 - COARSEST_GRID_BITS
        remedy = f"keep population + {LARGEST_NORMAL:g}·z below 2^{most}"
        require(self._exact_bits >= COARSEST_GRID_BITS, rule, z, remedy)
        if self.aggregation is not None:
            self._check_share(self.aggregation)

    def _check_share(self, rules: SecureSum) -> None:
        """Enough clients to form a sum, and a share of the noise that the grid can show."""
        clients = self.cohort.most_users
        rule = f"honest + colluding must be at most the {clients} clients that a round may have"
        require(rules.least <= clients, rule, rules.least, "lower honest, or draw more clients")
        rule = f"a share of the noise, z/√honest = {self._share_multiplier:g}, is too small for the"
        fits = self.noise_multiplier == 0 or self.share_std >= 2**LEAST_SHARE_BITS * self.grid
        require(fits, f"{rule} grid", self.noise_multiplier, "raise noise_multiplier")

    @property
    def amplifies(self) -> bool:
        """Whether sampling lowers ε. It never does with ``SecureSum``: neighbours see each other's
        keys, so who takes part is no secret."""
        return self.aggregation is None and self.cohort.amplifies

    @property
    def failure(self) -> float:
        """The part of δ that each round's random neighbours take; 0 if there are none."""
        if self.aggregation is None or self.aggregation.is_complete(self.cohort.most_users):
            return 0.0
        return self.aggregation.failure

    @property
    def noise_shares(self) -> int:
        """How many independent noises make up what is charged: h, or the server's one."""
        return 1 if self.aggregation is None else self.aggregation.honest

    @property
    def _share_multiplier(self) -> float:
        """z/√h: the standard deviation of one share of the noise, in units of C."""
        return self.noise_multiplier / math.sqrt(self.noise_shares)

    @property
    def share_std(self) -> float:
        """z·C/√h, the standard deviation of the noise that one client adds."""
        return self._share_multiplier * self.clip_norm

    @property
    def denominator(self) -> float:
        """D, the *expected* weight of a cohort: q·N, or q·M if minibatches are summed.

        Fixed and public.
        """
        if self.total_batch is not None:
            return self.cohort.rate * self.total_batch
        return self.expected_users

    @property
    def expected_users(self) -> float:
        """q·N, the mean size of a cohort."""
        return self.cohort.expected_users

    @property
    def reduction(self) -> Reduction:
        """How a client reduces its minibatch."""
        return "mean" if self.total_batch is None else "sum"

    @property
    def noise_std(self) -> float:
        """z·C, on the scale of the sum."""
        return self.noise_multiplier * self.clip_norm

    @property
    def usual_noise_std(self) -> float:
        """The noise on the sum if nobody drops out: z·C, or z·C·√(qN/h) if each client adds some.

        The guarantee counts on h clients, and more of them take part.
        """
        if self.aggregation is None:
            return self.noise_std
        return self.noise_std * math.sqrt(max(1.0, self.expected_users / self.noise_shares))

    def signal_to_noise(self, size: int) -> float:
        """qN/(z·√d) in one round: at best, if all users send the same vector of norm C.

        Over T rounds that agree it grows by √T.

        Args:
            size: d, the number of shared parameters.
        """
        if self.noise_multiplier == 0:
            return math.inf
        noise = self.usual_noise_std / self.clip_norm
        return self.expected_users / (noise * math.sqrt(size))

    @property
    def _exact_bits(self) -> int:
        """The most bits with which every reachable noisy sum is below 2⁵³ steps of the grid.

        Below 2⁶³ if it is a secure sum, which is taken in whole numbers of 64 bits: each client
        then adds a noise of its own.
        """
        population = self.cohort.population
        if self.aggregation is None:
            reach = population + LARGEST_NORMAL * self.noise_multiplier
            return FLOAT_INTEGER_BITS - 1 - math.ceil(math.log2(reach + 1))
        reach = population * (1 + LARGEST_NORMAL * self._share_multiplier)
        return WORD_BITS - 1 - math.ceil(math.log2(reach + 1))

    @functools.cached_property
    def grid_bits(self) -> int:
        """b, so that sums are exact in whole multiples of C·2⁻ᵇ and the noise, or one client's
        share of it, is at most 2²⁶ of them."""
        finest = min(FINEST_GRID_BITS, self._exact_bits)
        if self.noise_multiplier == 0:
            return finest
        return min(finest, NOISE_BITS - math.ceil(math.log2(self._share_multiplier)))

    @property
    def grid(self) -> float:
        """g = C·2⁻ᵇ, the spacing of released sums."""
        return math.ldexp(self.clip_norm, -self.grid_bits)


@dataclass(frozen=True)
class Steps:
    """s_w for the shared block and s_θ for the personal one.

    Args:
        shared: s_w. 0 is α = 0, local learning: nothing is released.
        personal: s_θ. 0 is α = ∞, global learning: θ is frozen.
    """

    shared: float
    personal: float

    def __post_init__(self) -> None:
        for name, value in (("shared", self.shared), ("personal", self.personal)):
            rule = f"Steps.{name} must be finite and not negative"
            require(0 <= value < math.inf, rule, value, "0 freezes that block")

    @classmethod
    def from_paper(cls, eta: float, alpha: float, denominator: float) -> Self:
        """s_w = αη, s_θ = η/D (Algorithms 1–3).

        Args:
            eta: η, the step size of the paper.
            alpha: α, finite; α = ∞ is ``from_ratio(step, float("inf"))``.
            denominator: D; see ``Release.denominator``.
        """
        rule = "denominator must be positive and finite"
        require(0 < denominator < math.inf, rule, denominator, "use release.denominator")
        rule = "eta must be finite and not negative"
        require(0 <= eta < math.inf, rule, eta, "set the step size η")
        require(alpha >= 0, "alpha must be in [0, inf)", alpha, "0 is local learning")
        rule = "alpha must be finite here, where η and α enter separately"
        require(alpha < math.inf, rule, alpha, "use Steps.from_ratio")
        return cls(shared=alpha * eta, personal=eta / denominator)

    @classmethod
    def from_ratio(cls, step: float, alpha_q: float) -> Self:
        """The larger of the two steps is ``step``, and s_w / s_θ = αQ (the figures' grid).

        Args:
            step: max(s_w, s_θ).
            alpha_q: αQ, any number in [0, ∞].
        """
        remedy = "0 is local learning, inf is global learning"
        require(alpha_q >= 0, "alpha_q must be in [0, inf]", alpha_q, remedy)
        rule = "step must be finite and not negative"
        require(0 <= step < math.inf, rule, step, "set the step size")
        if alpha_q <= 1:
            return cls(shared=alpha_q * step, personal=step)
        return cls(shared=step, personal=step / alpha_q)

    @property
    def alpha_q(self) -> float:
        """αQ = s_w / s_θ."""
        if self.personal > 0:
            return self.shared / self.personal
        return math.inf if self.shared > 0 else math.nan

    @property
    def publishes(self) -> bool:
        """Whether w moves at all; if not, no gradient is asked for and ε is 0."""
        return self.shared > 0


# --- the steps of a round


def clip(g: Vector, norm: float) -> Vector:
    """g / max(1, ‖g‖/C)   (Algorithm 1, line 8).

    The result's norm is at most C, never a rounding above it.
    """
    scale = clip_scale(g, norm)
    return g if scale == 1.0 else g * scale


def client_step(
    theta: Vector,
    g_w: Vector,
    g_theta: Vector,
    clip_norm: float,
    step: float,
) -> tuple[Vector, Vector]:
    """(clip(g_w, C), θ − s_θ·g_θ)   (Algorithm 1, lines 7–9).

    θ's own gradient is not clipped: it goes nowhere.
    """
    return clip(g_w, clip_norm), theta - step * g_theta


def server_step(
    w: Vector, noisy_sum: Vector | float, release: Release, step: float | Vector
) -> Vector:
    """w − s_w·(Σ_i clip(g_i, C) + noise) / D   (Algorithms 1–3, last line).

    D is the *expected* weight of a cohort: it is public, and a client that drops out shrinks the
    sum but not the noise. The sum was clipped where it was taken, on the server: the guarantee must
    not rest on the client's word.

    Args:
        w: the shared parameters.
        noisy_sum: from the grid, from a secure sum, or from an engine.
        release: C and D.
        step: s_w, one number or one for each coordinate.
    """
    # a step that is too large ends in infinity, not in a warning
    with np.errstate(over="ignore", invalid="ignore"):
        moved: NDArray[Any] = np.multiply(noisy_sum, -step / release.denominator)
        moved += w
    return moved


# --- norms, of one vector and of many


def length(g: Vector) -> float:
    """‖g‖₂ in double precision, safe from overflow and underflow of the squares."""
    # unlike dot, vdot does not warn of an overflow
    square = np.vdot(g, g) if g.dtype == np.float64 else _square_by_blocks(g)
    plain = math.sqrt(square)
    if 1e-140 < plain < 1e140 or not g.size:
        return plain
    largest = float(np.max(np.abs(g)))
    if not 0 < largest < math.inf:
        return largest
    scaled = g / largest
    return largest * math.sqrt(np.dot(scaled, scaled))


def _square_by_blocks(g: Vector) -> float:
    """g·g of a vector in another precision, without a copy of all of it."""
    total = 0.0
    space = np.empty(min(BLOCK, len(g)))
    for start in range(0, len(g), BLOCK):
        part = g[start : start + BLOCK]
        block = space[: len(part)]
        block[...] = part
        total += float(np.vdot(block, block))
    return total


def clip_scale(g: Vector, limit: float, margin: float = CLIP_MARGIN) -> float:
    """The factor, at most 1, that brings ‖g‖ to at most ``limit``.

    A vector 10²⁸⁰ times too long becomes zero: so small a factor has too few digits left to keep
    the promise.

    Args:
        g: the vector.
        limit: the largest norm.
        margin: relative, below the limit, for the rounding of the product.
    """
    actual = length(g)
    within = limit * (1 - margin)
    if actual <= within:
        return 1.0
    scale = within / actual
    return scale if scale > LEAST_SCALE else 0.0


def clip_scales(lengths: Vector, limits: Vector | float, margin: float = CLIP_MARGIN) -> Vector:
    """``clip_scale`` of many vectors at once, from their lengths; limits broadcast to these."""
    within = limits * (1 - margin)
    longer = ~(lengths <= within)  # true for NaN
    scales = np.divide(within, lengths, out=np.ones_like(lengths), where=longer)
    scales *= ~(scales <= LEAST_SCALE)
    return scales


# --- measures inside the guarantee


@dataclass(frozen=True)
class PrivateMetrics:
    """Training measures inside the guarantee: their share of the clip norm is the gradient's loss.

    The gradient is clipped to C·√(1−ρ), the k measures together to C·√ρ, each in units of √k times
    its bound, so that all of them at their bounds still count in full.

    Args:
        bounds: the largest value of each measure that counts in full, by name; public. Larger
            values are clipped.
        share: ρ, the share of the squared clip norm that the measures take.
    """

    bounds: Mapping[str, float]
    share: float = 0.1

    def __post_init__(self) -> None:
        remedy = "it is taken from the gradient's clip norm"
        require(0 < self.share < 1, "share must be in (0, 1)", self.share, remedy)
        if not self.bounds:
            raise ValueError("bounds names no measure: give at least one, as in {'loss': 10.0}")
        for name, bound in self.bounds.items():
            rule = f"the bound of {name!r} must be positive and finite"
            require(0 < bound < math.inf, rule, bound, "give the largest value that counts in full")
            reserved = name in ("epsilon", "round") or name.endswith(STANDARD_ERROR)
            if reserved or "," in name:
                raise ValueError(
                    f"{name!r} cannot name a measure: leave out commas, 'epsilon', 'round' and "
                    f"{STANDARD_ERROR!r}"
                )

    @property
    def _units(self) -> Vector:
        """√k·b of each measure: what is worth C·√ρ in the sum."""
        return math.sqrt(len(self.bounds)) * np.array(list(self.bounds.values()))

    def encode(self, measures: Mapping[str, float], clip_norm: float) -> Vector:
        """One user's measures on the scale of the sum; one that is missing counts as 0."""
        values = np.array([measures.get(name, 0.0) for name in self.bounds])
        return clip_norm * math.sqrt(self.share) * values / self._units

    def decode(self, noisy: Vector, release: Release) -> dict[str, float]:
        """Each measure's mean over qN users, and the standard error that the noise gives it.

        The standard error is √k·b·z/(√ρ·qN).
        """
        root = math.sqrt(self.share)
        users = release.expected_users
        measures = {}
        for name, unit, value in zip(self.bounds, self._units, noisy, strict=True):
            mean = float(value) * unit / (release.clip_norm * root) / users
            error = unit * release.noise_multiplier / root / users
            measures[name] = float(mean)
            measures[name + STANDARD_ERROR] = float(error)
        return measures


def _store_fields(value: object, **fields: object) -> None:
    """Replace a frozen value's numbers by Python's own: numpy's are no JSON."""
    for name, plain in fields.items():
        object.__setattr__(value, name, plain)
