"""The rows of runs and sweeps, one for each evaluated round, as values and as JSON."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from flwr_ppsgd.settings import AUTO, key_of
from flwr_ppsgd.statement import json_number

PPSGD = "ppsgd"
FINE_TUNED = "fine-tuned"
FEDAVG = "fedavg"
SOLVED = "solved"  # on the final w of global learning
FEDAVG_SOLVED = "fedavg-solved"  # on the final w of FedAvg
BASELINES = (FINE_TUNED, SOLVED, FEDAVG, FEDAVG_SOLVED)
SOLVED_BASELINES = (SOLVED, FEDAVG_SOLVED)
TRIVIAL = "trivial"  # everyone's mean, or most frequent class
OWN_TRIVIAL = "own-trivial"  # the user's own
GRID = ("step", "alpha-q", "noise-multiplier", "clip-norm", "insecure-seed")  # what may be a list
CAVEAT = (
    "ε is what a deployment of one setting would cost, as if it alone had been run; choosing among "
    "settings is not covered. Simulation noise: the sweep itself guarantees nothing."
)
INFINITE = "infinite"  # JSON has no infinity


@dataclass(frozen=True, order=True)
class GridPoint:
    """One setting of a grid. At α = 0 nothing is released: there is no noise and nothing to clip.

    Args:
        seed: the insecure seed.
        alpha_q: αQ = s_w/s_θ, the ratio of the two step sizes.
        step: the larger step size.
        noise_multiplier: z; None at α = 0.
        clip_norm: C; None at α = 0.
        method: the algorithm itself, a baseline, or "auto", the recipe: it has neither αQ nor step,
            and z is that of its rounds.
        target_epsilon: of "auto", the ε for which it was planned.
    """

    seed: int
    alpha_q: float
    step: float
    noise_multiplier: float | None
    clip_norm: float | None
    method: str = PPSGD
    target_epsilon: float | None = None

    def key(self) -> dict[str, Any]:
        """The keys of the setting in a row of JSON."""
        return {key_of(name): _to_json(value) for name, value in asdict(self).items()}

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> Self:
        """The setting of a row of JSON."""
        values = {}
        for field in fields(cls):
            value = flat[key_of(field.name)]
            values[field.name] = value if field.name == "method" else _from_json(value)
        return cls(**values)


@dataclass(frozen=True)
class SweepRow:
    """One setting after one round.

    Args:
        point: the setting.
        round: the number of rounds trained so far.
        measures: over all users; those that are not finite are left out.
        diverged: its measures grew without bound; it has no later row.
        deployed_epsilon: what the rounds would cost a deployment; None until it is computed. The
            sweep itself guarantees nothing: it has simulation noise.
        paper_epsilon: what the paper would print for cohorts of a fixed size. Not a guarantee.
    """

    point: GridPoint
    round: int
    measures: Mapping[str, float]
    diverged: bool = False
    deployed_epsilon: float | None = None
    paper_epsilon: float | None = None

    def is_last(self, rounds: int) -> bool:
        """Whether it is the last row of its setting, if ``rounds`` are planned."""
        only = self.point.method == AUTO  # it is measured once, after rounds of its own
        return only or self.round == rounds or self.diverged

    def shown_epsilon(self) -> float:
        """The paper's ε for cohorts of a fixed size, that of a deployment for all others."""
        if self.paper_epsilon is not None:
            return self.paper_epsilon
        return self.deployed_epsilon or 0.0

    def to_json(self) -> dict[str, Any]:
        """The row as JSON. ``epsilon`` is what is guaranteed: 0 if nothing was released, else
        infinite, as in any simulation."""
        guaranteed = 0.0 if self.deployed_epsilon == 0 else math.inf
        return {
            **self.point.key(),
            "round": self.round,
            **self.measures,
            "diverged": self.diverged,
            "epsilon": _to_json(guaranteed),
            "deployed_epsilon": _to_json(self.deployed_epsilon),
            "paper_epsilon": _to_json(self.paper_epsilon),
        }

    @classmethod
    def from_json(cls, flat: Mapping[str, Any]) -> Self:
        """From JSON; KeyError, TypeError or ValueError if it is not such a row."""
        return cls(
            point=GridPoint.of(flat),
            round=int(flat["round"]),
            measures=_measures(flat, SWEEP_ROW_KEYS),
            diverged=flat["diverged"],
            deployed_epsilon=_from_json(flat["deployed_epsilon"]),
            paper_epsilon=_from_json(flat["paper_epsilon"]),
        )


SWEEP_ROW_KEYS = {
    *(key_of(field.name) for field in fields(GridPoint)),
    *(field.name for field in fields(SweepRow)),
    "epsilon",
}


@dataclass(frozen=True)
class Selection:
    """What choosing among settings costs, if that is to be private too.

    Args:
        noise_multiplier: the noise level.
        epsilon: of one setting.
        settings: the mean number of settings that are tried.
        selected: ε of publishing the best of them alone.
    """

    noise_multiplier: float
    epsilon: float
    settings: int
    selected: float


@dataclass(frozen=True)
class RunRow:
    """A run after one round.

    Args:
        round: the number of rounds trained so far.
        epsilon: what they have cost; infinite if nothing is guaranteed.
        deployed_epsilon: what the same rounds would have cost with secret noise.
        measures: on the users' own data, outside the guarantee.
    """

    round: int
    epsilon: float
    deployed_epsilon: float
    measures: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """The row as JSON, with the names of measures outside the guarantee."""
        named = [name for name in self.measures if name not in RUN_ROW_KEYS]
        return {
            "round": self.round,
            "epsilon": _to_json(self.epsilon),
            "deployed_epsilon": _to_json(self.deployed_epsilon),
            **{name: _to_json(self.measures[name]) for name in named},
            "outside_the_guarantee": named,
        }

    @classmethod
    def from_json(cls, flat: Mapping[str, Any]) -> Self:
        """From JSON; KeyError, TypeError or ValueError if it is not such a row."""
        epsilon = float(_from_json(flat["epsilon"]))
        deployed = float(_from_json(flat["deployed_epsilon"]))
        return cls(int(flat["round"]), epsilon, deployed, _measures(flat, RUN_ROW_KEYS))


RUN_ROW_KEYS = {"round", "epsilon", "deployed_epsilon", "outside_the_guarantee"}


def _measures(flat: Mapping[str, Any], others: Collection[str]) -> dict[str, float]:
    """The values of all keys but ``others``."""
    return {name: _from_json(value) for name, value in flat.items() if name not in others}


def _to_json(value: Any) -> Any:
    return json_number(value) if isinstance(value, float) else value


def _from_json(value: Any) -> Any:
    """A number, or None."""
    if value == INFINITE:
        return math.inf
    return float(value) if isinstance(value, str) else value
