"""The numbers of the recipe: rounds, shares of the budget, scalars and gains, from public values.

Pure functions. The server calls all of them; a device calls ``scalar_pair`` alone, so importing
this module loads numpy and nothing heavier. Under secure sums pass the largest noise multiplier
that there can be, z·√(N/h): the number of survivors is not published.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Poisson, Release, SecureSum, Steps, Vector
from flwr_ppsgd.checks import count, one_of, require

Task: TypeAlias = Literal["regression", "classification"]
Matrix: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]

LEAST_ROUNDS = 2  # one round is .4 % worse
LEAST_BODY_ROUNDS = 4  # of a network whose body is shared
MOST_ROUNDS = 8  # later rounds change nothing that the personal part does not
USERS_PER_ROUND = 100  # per unit of noise: T rounds then add noise of at most C/100 to a prediction
SCALAR_SHARE = 0.05  # of the budget, for each scalar
COLUMNS_SHARE = 0.10  # for the count of users that have each sparse column
OCTAVES = 8.0  # a scalar is log2(value)/8, which covers 2^-8 to 2^8
ANSWER = 0.5  # what a user who answers adds to the count beside the scalar
SCALAR_BOUND = math.sqrt(1 + ANSWER**2)  # the norm of the longest pair (±1, ½)
VALUE_PRIOR = (3 / OCTAVES) ** 2  # variance: three octaves around the value 1
MISSING_PRIOR = 0.3**2  # variance of the share of users that do not answer
MOST_MISSING = 0.75  # a larger share would be noise
SAMPLED_ROUNDS = 40  # of Poisson cohorts; w is the mean over the second half
DROWNED = 0.5  # of the noise's length, below which nothing was seen to learn
ROUNDING = 1e-9  # more noise, so that the ledger's sum of all shares stays within ε


def noise_alone(epsilon: float, delta: float) -> float:
    """σ₁: the noise multiplier of the one release that (ε, δ) pays for, everyone in it."""
    import dp_accounting

    return float(dp_accounting.get_sigma_gaussian(epsilon, delta))


def rounds_for(population: int, sigma: float, body: bool = False) -> int:
    """T = clip(round(N/(100·σ₁)), 2, 8); 8 without noise, at least 4 if a body is shared."""
    if sigma == 0:
        return MOST_ROUNDS
    wanted = round(population / (USERS_PER_ROUND * sigma))
    return min(MOST_ROUNDS, max(LEAST_BODY_ROUNDS if body else LEAST_ROUNDS, wanted))


def shares(task: Task, sparse: bool, rounds: int, body: bool = False) -> dict[str, float]:
    """The share a of the budget of each release, in their order: its z is σ₁/√a.

    "mean" is one of the T rounds; all the shares, with "mean" T times, add up to 1.

    Args:
        task: regression releases the unit of the targets; classification has none.
        sparse: whether there are sparse columns. Without them regression needs no size: C = 1.
        rounds: T.
        body: whether w holds a network's body: then no unit is needed, and a size always.
    """
    budget: dict[str, float] = {}
    if task == "regression" and not body:
        budget["unit"] = SCALAR_SHARE
    if task == "classification" or sparse or body:
        budget["size"] = SCALAR_SHARE
    if sparse:
        budget["count"] = SCALAR_SHARE
        budget["columns"] = COLUMNS_SHARE
    budget["mean"] = (1 - sum(budget.values())) / rounds
    return budget


def scalar_pair(value: float) -> Vector:
    """A user's answer: (log2(value)/8 cut to [−1, 1], ½), or (0, 0) if there is no logarithm."""
    if not 0 < value < math.inf:
        return np.zeros(2)
    octaves = math.log2(value) / OCTAVES
    return np.array([min(1.0, max(-1.0, octaves)), ANSWER])


def scalar_value(noisy_sum: Vector, population: int, z: float) -> float:
    """2^(8q·p/(p + σ_q²)): the geometric mean of the answers, drawn to 1 as far as it is noise.

    q = Σ̃v/B with B = N·(1 − d) the estimated number of answers, where κ is how far the noisy share
    d of missing users is believed; σ_q = (√1.25·z/B)·√(1 + (2κq)²).

    Args:
        noisy_sum: the noisy sum of ``scalar_pair`` over all users.
        population: N.
        z: the noise multiplier, in units of the bound √1.25.
    """
    noise = SCALAR_BOUND * z / (ANSWER * population)
    belief = MISSING_PRIOR / (MISSING_PRIOR + noise**2)
    missing = belief * (1 - float(noisy_sum[1]) / (ANSWER * population))
    answers = population * (1 - min(MOST_MISSING, max(0.0, missing)))
    q = float(noisy_sum[0]) / answers
    from_value = SCALAR_BOUND * z / answers
    sigma = from_value * math.sqrt(1 + (belief * q / ANSWER) ** 2)
    kept = VALUE_PRIOR / (VALUE_PRIOR + sigma**2)
    return float(2.0 ** (OCTAVES * q * kept))


@dataclass(frozen=True, eq=False)
class ColumnShares:
    """How many users have each column of w.

    Args:
        shares: f, the noisy share of users per column; 1 for columns that are not sparse.
        known: whether f is above its floor, or the column is not sparse.
    """

    shares: Vector
    known: Flags


def column_shares(
    noisy_sum: Vector, size: float, population: int, z: float, sparse: Flags
) -> ColumnShares:
    """f = k·noisy sum/N, at least max(2σ_f, 1/N) with σ_f = z·k/N, at most 1.

    Args:
        noisy_sum: over users, of their 0/1 vectors of own sparse columns divided by k. A release
            that failed counts as zeros: every share is at its floor.
        size: k, the released typical root of a user's number of sparse columns.
        population: N.
        z: the noise multiplier of that release.
        sparse: per column of w, whether it is sparse.
    """
    floor = max(2 * z * size, 1.0) / population
    counted = size * noisy_sum / population
    found = np.ones(len(sparse))
    found[sparse] = np.clip(counted, floor, 1.0)
    known = np.ones(len(sparse), dtype=np.bool_)
    known[sparse] = counted > floor
    return ColumnShares(found, known)


def server_gain(mean: Matrix, sigma: float, columns: ColumnShares | None) -> Vector:
    """g: the server adds g_j·m_j to w_j. One 1 for dense columns, else a number per column.

    g = f/(f² + σ²/τ²): 1/f is the largest safe step, the rest a Wiener filter. τ² is the mean of
    (m² − σ²)/f² over the outputs of known columns; without any, or if it is not positive, g = 0.

    Args:
        mean: m = C·noisy sum/N of this round, columns × outputs.
        sigma: σ = z·C/N, the noise in each of its numbers.
        columns: the shares of users, or None if no column is sparse.
    """
    if columns is None:
        return np.ones(1)
    known = columns.known
    signal = (mean[known] ** 2 - sigma**2) / columns.shares[known, None] ** 2
    tau2 = float(signal.mean()) if signal.size else 0.0
    if tau2 <= 0:
        return np.zeros(len(mean))
    return np.asarray(columns.shares / (columns.shares**2 + sigma**2 / tau2))


def published_variance(so_far: Vector, gain: Vector, sigma: float) -> Vector:
    """ν = the largest (g·σ)² of the rounds: the noise of one, since later ones contract it.

    Args:
        so_far: ν of the rounds before; 0 before the first.
        gain: g of this round, from ``server_gain``.
        sigma: σ of this round.
    """
    return np.maximum(so_far, (gain * sigma) ** 2)


@dataclass(frozen=True)
class Recipe:
    """What ``PPSGD.auto`` releases: a few numbers before the first round, then T noisy means.

    Args:
        task: "regression" or "classification".
        release: of a round: solutions divided by C, clipped to 1.
        before: the releases before the first round, by what they ask for, in their order.
        rounds: T.
        epsilon: what all of it costs, at most; infinite without noise.
        delta: δ at which that is stated.
        sparse: the places of sparse columns among those of w.
        body: whether w holds a network's body.
    """

    task: Task
    release: Release
    before: Mapping[str, Release]
    rounds: int
    epsilon: float
    delta: float
    sparse: tuple[int, ...] = ()
    body: bool = False

    def arguments(self) -> dict[str, Any]:
        """The arguments of both strategies."""
        return {
            "release": self,
            "steps": Steps(shared=1.0, personal=0.0),
            "delta": self.delta,
            "max_epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
        }

    def with_rounds(self, rounds: int) -> "Recipe":
        """The same budget spent in another number of rounds."""
        cohort = self.release.cohort
        return recipe(
            population=cohort.population,
            epsilon=self.epsilon,
            delta=self.delta,
            task=self.task,
            sparse=self.sparse,
            rounds=rounds,
            rate=cohort.rate if cohort.rate < 1 else None,
            body=self.body,
            aggregation=self.release.aggregation,
        )

    @property
    def noise_in_prediction(self) -> float:
        """About how much of C the noise is in the prediction for a row of unit length, at most.

        σ·T: each round adds zC/(qN), and z of a round is about σ₁·√T.
        """
        noise = self.release.usual_noise_std / self.release.denominator
        return noise * math.sqrt(self.rounds)

    def length(self, name: str) -> int:
        """Of the vector that a release before the first round sums."""
        return len(self.sparse) if name == "columns" else 2


@dataclass(frozen=True)
class RecipeValues:
    """What follows from the releases before the first round; 1 is the prior of each.

    Args:
        unit: u.
        size: C.
        count: k.
        columns: the noisy sum of own columns divided by k; None if it was not released.
    """

    unit: float = 1.0
    size: float = 1.0
    count: float = 1.0
    columns: Vector | None = field(default=None, compare=False)


def values_of(recipe: Recipe, sums: Mapping[str, Vector]) -> RecipeValues:
    """u, C and k from the noisy sums that were released."""
    found: dict[str, float] = {}
    for name in ("unit", "size", "count"):
        if name in sums:
            release = recipe.before[name]
            z = release.usual_noise_std / release.clip_norm
            found[name] = scalar_value(sums[name], release.cohort.population, z)
    return RecipeValues(**found, columns=sums.get("columns"))


def shares_of_columns(recipe: Recipe, values: RecipeValues, columns: int) -> ColumnShares | None:
    """How many users have each column of w; None if none is sparse."""
    if not recipe.sparse:
        return None
    release = recipe.before["columns"]
    noisy = np.zeros(len(recipe.sparse)) if values.columns is None else values.columns
    z = release.usual_noise_std / release.clip_norm
    sparse = np.zeros(columns, dtype=np.bool_)
    sparse[list(recipe.sparse)] = True
    return column_shares(noisy, values.count, release.cohort.population, z, sparse)


def recipe(
    *,
    population: int,
    epsilon: float,
    delta: float,
    task: Task,
    sparse: Sequence[int] = (),
    rounds: int | None = None,
    rate: float | None = None,
    body: bool = False,
    aggregation: SecureSum | None = None,
) -> Recipe:
    """The recipe for a population and a budget; every z and T is fixed here.

    Args:
        population: N, the number of enrolled users.
        epsilon: ε of everything together, under zero-out neighbours; infinite is no noise.
        delta: δ, well below 1/N.
        task: "regression" or "classification".
        sparse: the places of columns of w that most users lack.
        rounds: T; by the rule of ``rounds_for`` unless given.
        rate: the share of users per round, for very many of them; None is everyone.
        body: whether w holds a network's body: at least 4 rounds, and the size is released always.
        aggregation: ``SecureSum`` if clients add the noise and the server sees sums only.
    """
    one_of("task", task, get_args(Task))
    require(epsilon > 0, "epsilon must be positive", epsilon, "inf trains without noise")
    if rate is not None and aggregation is not None:
        raise ValueError(f"rate={rate} with secure sums: leave it out, everyone takes part in them")
    places = tuple(sorted(set(sparse)))
    everyone = Poisson(population, 1.0)
    cohort = everyone if rate is None else Poisson(population, rate)
    sampled = cohort.rate < 1
    sigma = _noise_for(epsilon, delta, everyone, len(places), aggregation)
    wanted = SAMPLED_ROUNDS if sampled else rounds_for(population, sigma, body)
    planned = wanted if rounds is None else count("rounds", rounds)
    budget = shares(task, bool(places), planned, body)
    share = budget.pop("mean")
    before = {}
    for name, own in budget.items():
        bound = 1.0 if name == "columns" else SCALAR_BOUND
        before[name] = Release(everyone, bound, sigma / math.sqrt(own), aggregation=aggregation)
    z = sigma / math.sqrt(share)
    if sampled and math.isfinite(epsilon):
        from flwr_ppsgd.ledger import calibrate_noise

        also = [(asked, 1) for asked in before.values()]
        z = calibrate_noise(epsilon=epsilon, delta=delta, cohort=cohort, rounds=planned, also=also)
    release = Release(cohort, 1.0, z, aggregation=aggregation)
    return Recipe(task, release, before, planned, epsilon, delta, places, body)


def _noise_for(
    epsilon: float, delta: float, everyone: Poisson, sparse: int, aggregation: SecureSum | None
) -> float:
    """σ₁; with secure sums at δ less what their neighbours may take from it."""
    if math.isinf(epsilon):
        return 0.0
    if aggregation is None:
        return noise_alone(epsilon, delta) * (1 + ROUNDING)
    most = MOST_ROUNDS + (4 if sparse else 2)
    failure = Release(everyone, 1.0, 1.0, aggregation=aggregation).failure
    left = delta - most * failure
    require(left > 0, "delta must be above what random neighbours take", delta, "raise delta")
    return noise_alone(epsilon, left) * (1 + ROUNDING)
