"""The recipe: everything about a training that nobody has to tune, from public numbers alone.

Few rounds with everyone, full-batch gradients of norm C, an Adam that knows its noise, a rate in
units of users' own solutions, and personal parts that are solved. Whoever names ε, δ and the
population gets all the rest.
"""

import math
from dataclasses import dataclass
from typing import Any

import dp_accounting

from flwr_ppsgd.algorithm import Poisson, Release, SecureSum, Steps
from flwr_ppsgd.checks import count, require
from flwr_ppsgd.optimizers import Adam
from flwr_ppsgd.privacy import calibrate_noise
from flwr_ppsgd.tuning import ROUNDS, SizeVote

RATE = 0.15  # of the typical size of a user's own solution, per round
QUIET_RATE = 0.3  # the same without noise, where nothing is lost by travelling farther
DEFAULT_SIZE = 0.05  # of a user's own solution, where there is no vote
CLIP_NORM = 1.0  # of no consequence: Adam cancels it
PEOPLE_PER_NOISE = 16  # a vote's noise may be a sixteenth of the population at most
LEAST_VOTE_SHARE = 0.01  # of the privacy budget, in units of 1/z²: half a percent more noise
MOST_VOTE_SHARE = 0.05


@dataclass(frozen=True)
class Recipe:
    """What ``PPSGD.auto`` and ``method = "auto"`` run.

    Args:
        release: what is published in a round.
        vote: on the rate, before the first round; None if the population is too small for one.
        rounds: the number of rounds.
        epsilon: what all of it costs, at most; infinite without noise.
        delta: δ at which that is stated.
    """

    release: Release
    vote: SizeVote | None
    rounds: int
    epsilon: float
    delta: float

    @property
    def rate(self) -> float:
        """Of the server's steps, in units of the typical size of a user's own solution."""
        return QUIET_RATE if self.release.noise_multiplier == 0 else RATE

    @property
    def rate_from(self) -> str:
        """In words, where the rate of the server's steps comes from."""
        if self.vote is None:
            return (
                f"a default, {self.rate:g} × {DEFAULT_SIZE:g} (a population of "
                f"{self.release.cohort.population} is too small for a private vote on it)"
            )
        return (
            f"{self.rate:g} × the typical size of users' own solutions, by a private vote before "
            "round 1"
        )

    def arguments(self) -> dict[str, Any]:
        """The arguments of both strategies."""
        return {
            "release": self.release,
            "steps": Steps(shared=self.rate, personal=0.0),
            "delta": self.delta,
            "max_epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "optimizer": Adam(),
            "personal": "solve",
            "full_batch": True,
            "vote": self.vote,
            "default_size": DEFAULT_SIZE,
        }


def recipe(
    *,
    population: int,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    rounds: int | None = None,
    rate: float = 1.0,
    aggregation: SecureSum | None = None,
) -> Recipe:
    """The recipe for a population and a budget.

    Args:
        population: N, the number of enrolled users.
        delta: δ, well below 1/N.
        epsilon: ε of everything together, under zero-out neighbours; infinite is no noise.
        noise_multiplier: z of the rounds, in place of ``epsilon``. The vote then has the same.
        rounds: the number of rounds; 50 unless given.
        rate: the share of users per round. 1 is everyone; a tenth loses little, and serves very
            large populations.
        aggregation: ``SecureSum`` if clients add the noise and the server sees sums only.
    """
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError("give either epsilon or noise_multiplier: it decides how much noise")
    planned = ROUNDS if rounds is None else count("rounds", rounds)
    cohort = Poisson(population, rate)
    if epsilon is None:
        assert noise_multiplier is not None
        vote = _vote(population, noise_multiplier, aggregation)
        release = _release(cohort, noise_multiplier, aggregation)
        return Recipe(release, vote, planned, math.inf, delta)
    require(epsilon > 0, "epsilon must be positive", epsilon, "inf trains without noise")
    noise = vote_noise(population, epsilon, delta)
    vote = None if noise is None else _vote(population, noise, aggregation)
    z = 0.0
    if math.isfinite(epsilon):
        z = calibrate_noise(
            epsilon=epsilon,
            delta=delta,
            cohort=cohort,
            rounds=planned,
            also=[] if vote is None else [(vote.release, 1)],
            aggregation=aggregation,
        )
    release = _release(cohort, z, aggregation)
    return Recipe(release, vote, planned, epsilon, delta)


def _release(cohort: Poisson, z: float, aggregation: SecureSum | None) -> Release:
    return Release(cohort, CLIP_NORM, z, normalise=True, aggregation=aggregation)


def _vote(population: int, noise: float, aggregation: SecureSum | None) -> SizeVote | None:
    """A vote with this noise; None if it would tell too little."""
    if population < least_voters_for(noise):
        return None
    everyone = Poisson(population, 1.0)
    return SizeVote(Release(everyone, CLIP_NORM, noise, aggregation=aggregation))


def vote_noise(population: int, epsilon: float, delta: float) -> float | None:
    """The noise multiplier of a vote, or None if it would cost too much or tell too little.

    A vote takes 1 % of the budget (in units of 1/z²) if the population is large, and up to 5 % so
    that its noise stays below a sixteenth of the population.
    """
    if math.isinf(epsilon):
        return 0.0
    if population < least_voters(epsilon, delta):
        return None
    cheapest = noise_alone(epsilon, delta) / math.sqrt(LEAST_VOTE_SHARE)
    return min(cheapest, population / PEOPLE_PER_NOISE)


def least_voters(epsilon: float, delta: float) -> int:
    """The smallest population that holds a vote within its share of a budget."""
    return least_voters_for(noise_alone(epsilon, delta) / math.sqrt(MOST_VOTE_SHARE))


def least_voters_for(noise: float) -> int:
    """The smallest population that can read a vote with this noise multiplier."""
    return math.ceil(PEOPLE_PER_NOISE * noise)


def noise_alone(epsilon: float, delta: float) -> float:
    """The noise multiplier of the one release that a budget pays for, everyone in it."""
    return float(dp_accounting.get_sigma_gaussian(epsilon, delta))
