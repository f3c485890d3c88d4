"""The base class of cohort engines, and the training loop around them.

A cohort engine trains many settings side by side, on the same cohorts and minibatches and with the
same standard normals, in one process and without Flower: ``linear_engine`` for linear models,
``network_engine`` for networks, ``baselines`` for private FedAvg. ``train`` runs the rounds of any
of them, reports measures, and stops settings that diverge.

A setting is named by its *place*: its index in the list that the engine was made with.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Release, Steps, Vector
from flwr_ppsgd.checks import require
from flwr_ppsgd.lab.measures import VALIDATION, as_validation_measures, over_users
from flwr_ppsgd.noise import random_stream

DIVERGED = 1e10  # a measure this many times its first value has diverged
LEAST_FIRST = 1e-300  # stands in for a first value of 0
ERRORS = ("excess_risk", f"{VALIDATION}loss", "loss")  # measures that grow if training fails
TEST = "test"

Indices: TypeAlias = NDArray[np.intp]


@dataclass(frozen=True)
class EngineSetting:
    """The release and the step sizes of one training."""

    release: Release
    steps: Steps


class Engine(ABC):
    """Many settings with the same cohorts, for any kind of model.

    Args:
        users: the number of users who have data.
        settings: all with the same cohort and M; clip norm, noise and steps may differ.
        seed: the insecure seed; None draws secret noise.
        most_visits: the number of visits after which each user drops out; None: never.
    """

    def __init__(
        self,
        users: int,
        settings: Sequence[EngineSetting],
        seed: int | None,
        most_visits: Indices | None,
    ) -> None:
        first = settings[0].release
        for release in (setting.release for setting in settings):
            same = release.cohort == first.cohort and release.total_batch == first.total_batch
            rule = "settings side by side must share the cohort and total_batch"
            require(same, rule, (first, release), "run settings with other cohorts separately")
        if first.cohort.population != users:
            raise ValueError(
                f"the cohort is drawn from population={first.cohort.population} users but the data "
                f"hold {users}: set population={users}"
            )
        self.settings = list(settings)
        self.places = list(range(len(settings)))  # the settings that are still trained
        self.round = 0  # the number of rounds done
        self.visits: Indices = np.zeros(users, dtype=np.intp)
        self.cohort = first.cohort
        self.reduction = first.reduction
        self._seed = seed
        self._most_visits = most_visits

    @abstractmethod
    def advance(self) -> None:
        """One round of every setting."""

    @abstractmethod
    def w(self, place: int) -> Vector:
        """w of one setting as a flat vector, or its average iterate if the engine keeps those."""

    @abstractmethod
    def measure_users(self, part: str) -> tuple[dict[str, NDArray[Any]], Vector]:
        """Each measure on "test" or "validation" rows, measured users × settings, and the number
        of rows of each of them; both are empty if nobody has such rows."""

    def measures(self, *, final: bool = False) -> dict[int, dict[str, float]]:
        """All measures of every setting that is still trained, by place.

        With validation rows, test rows are measured only at the ``final`` call.
        """
        with np.errstate(all="ignore"):
            by_user, weights = self.measure_users("validation")
            found = as_validation_measures(over_users(by_user, weights))
            if final or not found:
                by_user, weights = self.measure_users(TEST)
                found |= over_users(by_user, weights)
        by_place = {}
        for place in self.places:
            by_place[place] = {name: float(values[place]) for name, values in found.items()}
        return by_place

    def drop(self, places: Collection[int]) -> None:
        """Stop reporting the settings at these places."""
        self.places = [place for place in self.places if place not in places]

    def next_cohort(self) -> Indices:
        """Begin the next round: draw its users, and count the visit of each.

        Users without visits left drop out, and others take their place. Who drops out depends on
        the number of each user's samples, so this is for simulation only.
        """
        self.round += 1
        uniforms = random_stream(self._seed, "cohort", self.round).uniforms(len(self.visits))
        if self._most_visits is None:
            users = self.cohort.members(uniforms)
        else:
            left = self.visits < self._most_visits
            users = self.cohort.members(np.where(left, uniforms, np.inf))
            users = users[left[users]]
        self.visits[users] += 1
        return users

    def normals(self, size: int) -> Vector:
        """The standard normals of this round, the same for all settings."""
        return random_stream(self._seed, "noise", self.round).normals(size)


@dataclass(frozen=True)
class RoundReport:
    """What was measured after one round.

    Args:
        round: the number of rounds done.
        measures: all measures of each setting, by place.
        diverged: the places of settings that diverged and are stopped here.
    """

    round: int
    measures: dict[int, dict[str, float]]
    diverged: frozenset[int] = frozenset()


def train(
    engine: Engine, rounds: int, every: int, on_round: Callable[[int], None] | None = None
) -> Iterator[RoundReport]:
    """Run the rounds, and yield a report after each round of ``reported_rounds``.

    A setting whose measures grow without bound is reported as diverged and stopped; the others go
    on.

    Args:
        engine: what is trained.
        rounds: the number of rounds.
        every: the number of rounds between two reports; 0 reports never.
        on_round: called with the number of each round before the report of that round.
    """
    due = reported_rounds(rounds, every)
    first: dict[int, dict[str, float]] = {}
    for round_ in range(rounds + 1):
        if round_ and engine.places:
            engine.advance()
        if on_round:
            on_round(round_)
        if engine.places and round_ in due:
            measures = engine.measures(final=round_ == rounds)
            first = first or measures
            diverged = [place for place in measures if has_diverged(first[place], measures[place])]
            engine.drop(diverged)
            yield RoundReport(round_, measures, frozenset(diverged))


def reported_rounds(rounds: int, every: int) -> list[int]:
    """Round 0 (before training), every ``every``-th round, and the last; none if ``every`` is 0."""
    if not every:
        return []
    return sorted({*range(0, rounds + 1, every), rounds})


def has_diverged(first: Mapping[str, float], last: Mapping[str, float]) -> bool:
    """Whether the first of ``ERRORS`` that was measured grew beyond ``DIVERGED``, or is NaN."""
    for name in ERRORS:
        if name in first and name in last:
            limit = DIVERGED * max(first[name], LEAST_FIRST)
            return not last[name] <= limit  # true for NaN
    return False
