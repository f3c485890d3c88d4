"""What a cohort engine is, and the training loop around it.

An engine trains many settings side by side, on the same cohorts and minibatches and with the same
standard normals, in one process and without Flower. There is one for linear models (``linear``),
one for networks (``networks``) and one for private FedAvg (``baselines``). ``train`` runs the
rounds of any of them, reports measures when they are due, and stops settings that diverge.

A setting is known by its *place*: its index in the list that the engine was made with. Places stay
as they are when other settings are dropped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Release, Steps, Vector
from flwr_ppsgd.checks import require
from flwr_ppsgd.lab.engines.measures import VALIDATION, measure_of

# a measure has diverged if it is this many times its first value
DIVERGED = 1e10
SMALLEST_ERROR = 1e-300  # stands in for a first value of 0
ERRORS = ("excess_risk", "loss")  # measures that grow if training fails

State: TypeAlias = Mapping[str, NDArray[Any]]


class Engine(Protocol):
    """Many settings of one cohort, for any kind of model."""

    @property
    def round(self) -> int:
        """The number of rounds done."""
        ...

    @property
    def places(self) -> list[int]:
        """The settings that are still trained."""
        ...

    def advance(self) -> None:
        """One round of every setting."""
        ...

    def w(self, place: int) -> Vector:
        """w of one setting as a flat vector, or its average iterate if the engine keeps those."""
        ...

    def measures(self, *, final: bool = False) -> dict[int, dict[str, float]]:
        """All measures of every setting, by place.

        If there are validation rows, they are measured on those, by names that begin with
        "validation_", and only if this is the ``final`` time on test rows too.
        """
        ...

    def by_user(self) -> dict[int, Vector]:
        """The main measure of each measured user for every setting, by place."""
        ...

    def drop(self, gone: set[int]) -> None:
        """Stop training the settings at these places."""
        ...

    def state(self) -> State:
        """Everything that training has changed."""
        ...

    def restore(self, state: State) -> None:
        """Continue from ``state``, which comes from an engine made with the same arguments."""
        ...


@dataclass(frozen=True)
class Setting:
    """One training: what is released, and how far both blocks of parameters move."""

    release: Release
    steps: Steps


def check_alike(users: int, settings: Sequence[Setting]) -> None:
    """ValueError unless settings share their cohort and M, and the cohort is drawn from ``users``.

    Args:
        users: the number of users who have data.
        settings: the settings that are to be trained side by side.
    """
    first = settings[0].release
    for setting in settings:
        release = setting.release
        same_cohort = release.cohort == first.cohort
        same_batch = release.total_batch == first.total_batch
        require(
            same_cohort and same_batch,
            "settings side by side must share the cohort and total_batch",
            (first, release),
            "run settings with other cohorts separately",
        )
    population = first.cohort.population
    if population != users:
        raise ValueError(
            f"the cohort is drawn from population={population} users but the data hold {users}: "
            f"set population={users}"
        )


@dataclass(frozen=True)
class Report:
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
    engine: Engine,
    rounds: int,
    every: int,
    on_round: Callable[[int], None] | None = None,
    first: dict[int, float] | None = None,
) -> Iterator[Report]:
    """Run the rounds, and yield a report after each round of ``reported_rounds``.

    A setting whose measures grow without bound is reported as diverged and stopped; the others go
    on. If the engine has already done some rounds, training continues from there.

    Args:
        engine: what is trained.
        rounds: the number of rounds, those already done included.
        every: the number of rounds between two reports; 0 reports never.
        on_round: called with the number of each round before the report of that round.
        first: the first error of each setting, against which divergence is judged. It is filled
            here; pass it again when training is resumed.
    """
    first = {} if first is None else first
    due = set(reported_rounds(rounds, every))
    begun = engine.round
    for round_ in range(begun, rounds + 1):
        if round_ > begun and engine.places:
            engine.advance()
        if on_round:
            on_round(round_)
        if engine.places and round_ in due:
            measures = engine.measures(final=round_ == rounds)
            report = _report(round_, measures, first)
            if report.diverged:
                engine.drop(set(report.diverged))
            yield report


def reported_rounds(rounds: int, every: int) -> list[int]:
    """Round 0 (before training), every ``every``-th round, and the last; none if ``every`` is 0."""
    if not every:
        return []
    regular = range(0, rounds + 1, every)
    return sorted({*regular, rounds})


def _report(round_: int, measures: dict[int, dict[str, float]], first: dict[int, float]) -> Report:
    diverged = set()
    for place, row in measures.items():
        error = _error(row)
        first.setdefault(place, error)
        if _has_diverged(first[place], error):
            diverged.add(place)
    return Report(round_, measures, frozenset(diverged))


def left_for_infinity(first: Mapping[str, float], last: Mapping[str, float]) -> bool:
    """Whether the error in the row ``last`` has grown without bound since the row ``first``."""
    return _has_diverged(_error(first), _error(last))


def _has_diverged(first: float, error: float) -> bool:
    limit = DIVERGED * max(first, SMALLEST_ERROR)
    return not error <= limit  # true for NaN


def _error(row: Mapping[str, float]) -> float:
    """The measure that grows if training fails; 0 if it was not measured."""
    for name in ERRORS:
        for known in (VALIDATION + name, name):
            if known in row:
                return row[known]
    return 0.0


def rows_by_place(
    places: Sequence[int],
    measures: Mapping[str, Vector],
) -> dict[int, dict[str, float]]:
    """``Engine.measures`` from each measure as one array over the settings, in the order of
    ``places``."""
    rows: dict[int, dict[str, float]] = {}
    for at, place in enumerate(places):
        rows[place] = {name: float(values[at]) for name, values in measures.items()}
    return rows


def users_by_place(
    places: Sequence[int],
    measures: Mapping[str, NDArray[Any]],
) -> dict[int, Vector]:
    """``Engine.by_user`` from each measure as users × settings, settings in the order of
    ``places``."""
    if not measures:
        return {}
    main = measures[measure_of(measures)]
    return {place: main[:, at] for at, place in enumerate(places)}


def progress(engine: Engine) -> dict[str, NDArray[Any]]:
    """The part of ``Engine.state`` that all engines share."""
    return {"round": np.array(engine.round), "places": np.array(engine.places)}


def dropped_since(engine: Engine, state: State) -> set[int]:
    """The places that ``engine`` still trains and that were already dropped in ``state``."""
    kept = state["places"].tolist()
    return set(engine.places).difference(kept)
