"""What a run or a sweep measured: one row for each evaluated round, as a value and as JSON."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from flwr_ppsgd.settings import AUTO, key_of, name_of
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
TARGET = "target-epsilon"
INFINITE = "infinite"  # JSON has no infinity


@dataclass(frozen=True, order=True)
class Point:
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
        """What names the setting in a row of JSON."""
        flat = {key_of(name): _for_json(value) for name, value in asdict(self).items()}
        if self.target_epsilon is None:
            del flat[TARGET]
        return flat

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> Self:
        """The setting that a row of JSON is about."""
        values: dict[str, Any] = {
            "method": flat["method"],
            name_of(TARGET): _from_json_number(flat.get(TARGET)),
        }
        for field in fields(cls):
            if field.name not in values:
                values[field.name] = _from_json_number(flat[key_of(field.name)])
        return cls(**values)


POINT_KEYS = frozenset(key_of(field.name) for field in fields(Point))


@dataclass(frozen=True)
class SweepRow:
    """One setting after one round.

    Args:
        point: the setting.
        round: the number of rounds trained so far.
        measures: over all users; what is not finite is left out.
        diverged: its parameters left for infinity here; it has no later row.
        personal_step: of a fine-tuned θ, the best step.
        by_user: at the end, the main measure of each user; None if users are not told apart.
        deployed_epsilon: what the rounds would cost a deployment; None until it is worked out. The
            sweep itself guarantees nothing: it has simulation noise.
        paper_epsilon: what the paper would print for cohorts of a fixed size. Not a guarantee.
    """

    point: Point
    round: int
    measures: Mapping[str, float]
    diverged: bool = False
    personal_step: float | None = None
    by_user: tuple[float, ...] | None = None
    deployed_epsilon: float | None = None
    paper_epsilon: float | None = None

    def is_last(self, rounds: int) -> bool:
        """Whether it is the last row of its setting, if ``rounds`` are planned."""
        only = self.point.method == AUTO  # it is measured once, after rounds of its own
        return only or self.round == rounds or self.diverged

    def shown_epsilon(self) -> float:
        """The paper's ε for cohorts of a fixed size, that of a deployment for all others."""
        spent = self.deployed_epsilon if self.paper_epsilon is None else self.paper_epsilon
        return 0.0 if spent is None else spent

    def epsilon(self) -> float | None:
        """ε that is guaranteed: 0 if nothing was released, else infinite, as in any simulation."""
        if self.deployed_epsilon is None:
            return None
        return 0.0 if self.deployed_epsilon == 0 else math.inf

    def to_json(self) -> dict[str, Any]:
        """The row as it stands in a file."""
        flat = {**self.point.key(), "round": self.round, **self.measures}
        if self.diverged:
            flat["diverged"] = True
        optional = {
            "personal-step": self.personal_step,
            "by_user": None if self.by_user is None else list(self.by_user),
            "epsilon": _for_json(self.epsilon()),
            "deployed_epsilon": _for_json(self.deployed_epsilon),
            "paper_epsilon": _for_json(self.paper_epsilon),
        }
        given = {key: value for key, value in optional.items() if value is not None}
        return {**flat, **given}

    @classmethod
    def from_json(cls, flat: Mapping[str, Any]) -> Self:
        """The row that stands in a file; KeyError, TypeError or ValueError if it is none."""
        by_user = flat.get("by_user")
        return cls(
            point=Point.of(flat),
            round=int(flat["round"]),
            measures=_measures(flat, POINT_KEYS | SWEEP_KEYS),
            diverged=bool(flat.get("diverged", False)),
            personal_step=_from_json_number(flat.get("personal-step")),
            by_user=None if by_user is None else tuple(by_user),
            deployed_epsilon=_from_json_number(flat.get("deployed_epsilon")),
            paper_epsilon=_from_json_number(flat.get("paper_epsilon")),
        )


SWEEP_KEYS = frozenset(
    {
        "round",
        "diverged",
        "personal-step",
        "by_user",
        "epsilon",
        "deployed_epsilon",
        "paper_epsilon",
    }
)


@dataclass(frozen=True)
class GridEdge:
    """The best setting lies at the end of a list of the grid.

    Args:
        key: which list.
        value: its end.
        beyond: the next value in that direction.
    """

    key: str
    value: float
    beyond: float


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
        """The row as it stands in a file. It says what is outside the guarantee."""
        named = [name for name in self.measures if name not in RUN_KEYS]
        measures = {name: _for_json(self.measures[name]) for name in named}
        return {
            "round": self.round,
            "epsilon": _for_json(self.epsilon),
            "deployed_epsilon": _for_json(self.deployed_epsilon),
            **measures,
            "outside_the_guarantee": list(measures),
        }

    @classmethod
    def from_json(cls, flat: Mapping[str, Any]) -> Self:
        """The row that stands in a file; KeyError, TypeError or ValueError if it is none."""
        epsilon = _from_json_number(flat["epsilon"])
        if epsilon is None:
            raise ValueError("epsilon is missing")
        deployed = _from_json_number(flat["deployed_epsilon"])
        return cls(int(flat["round"]), epsilon, deployed, _measures(flat, RUN_KEYS))


RUN_KEYS = frozenset({"round", "epsilon", "deployed_epsilon", "outside_the_guarantee"})


def _measures(flat: Mapping[str, Any], others: frozenset[str]) -> dict[str, float]:
    """What stands in a row besides the keys that are known."""
    found = {}
    for name, value in flat.items():
        number = None if name in others else _from_json_number(value)
        if number is not None:
            found[name] = number
    return found


def _from_json_number(value: Any) -> Any:
    """A number of JSON, with its infinity; None stays None."""
    if value == INFINITE:
        return math.inf
    if isinstance(value, str):
        return float(value)
    if value is None or isinstance(value, int | float):
        return value
    raise TypeError(f"{value!r} is not a number")


def _for_json(value: Any) -> Any:
    return json_number(value) if isinstance(value, float) else value
