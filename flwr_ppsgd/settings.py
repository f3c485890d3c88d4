"""Flat settings, as Flower's users write them: ``clip-norm = 10.0``. One line each, no nesting.

Whoever reads settings (a run config, an experiment file, ``--set``) gets the same keys, defaults and errors.
"""

import difflib
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Self, get_args, get_origin, get_type_hints

from flwr_ppsgd.algorithm import Cohort, FixedSize, Poisson, Release, Steps
from flwr_ppsgd.privacy import Ledger, calibrate_noise

PREFIXED: tuple[str, ...] = ("ppsgd-run",)  # run-config keys of this package that are not settings of a training


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What makes up a training: population, release, steps, budget.

    Give ``rate`` (Poisson cohorts) or ``cohort-size`` (fixed size); ``noise-multiplier``, or ``epsilon``, which
    calibrates it for the planned ``rounds`` and is the budget too, unless ``max-epsilon`` is given. There is no default
    for noise, δ or a seed. ``alpha-q = "theory"`` becomes a number when an experiment is read. ``enrolled``
    lists the names of the registered nodes, with commas.
    """

    population: int
    rate: float | None = None
    cohort_size: int | None = None
    cap: int | None = None
    clip_norm: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    total_batch: int | None = None
    step: float
    alpha_q: float
    delta: float
    rounds: int
    max_epsilon: float | None = None
    evaluate_every: int = 0
    min_online: float = 0.5
    enrolled: str = ""
    round_timeout: float = 3600.0
    replies: str = "gradient"
    average: bool = False
    checkpoint_dir: str = ""
    checkpoint_every: int = 1
    tensorboard_dir: str = ""
    insecure_seed: int | None = None

    def __post_init__(self) -> None:
        """Whatever a constructor would refuse is refused here, before any work."""
        _exactly_one(self, "rate", "cohort_size")
        _exactly_one(self, "noise_multiplier", "epsilon")
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds!r}: plan at least one round")
        for name in ("epsilon", "max_epsilon"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value!r}: leave it out for no budget")
        if self.evaluate_every < 0 or self.checkpoint_every < 1:
            raise ValueError(
                f"evaluate_every must be 0 (0 is never) or more and checkpoint_every at least 1, got "
                f"{self.evaluate_every!r} and {self.checkpoint_every!r}"
            )
        if not 0 <= self.min_online <= 1:
            raise ValueError(f"min_online must be in [0, 1], got {self.min_online!r}: it is a share of the population")
        if not self.round_timeout > 0:
            raise ValueError(f"round_timeout must be positive, got {self.round_timeout!r}: it is in seconds")
        if self.replies not in ("gradient", "parameters"):
            raise ValueError(f"replies must be 'gradient' or 'parameters', got {self.replies!r}")
        Release(self.cohort(), self.clip_norm, self.noise_multiplier or 0.0, self.total_batch)
        Ledger(self.delta)
        self.steps()

    @classmethod
    def read(cls, flat: Mapping[str, Any], where: str) -> Self:
        """From ``{"clip-norm": 10.0, …}``; an unknown key or a value of the wrong type is refused, naming ``where``."""
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for key, value in flat.items():
            name = field_of(key, cls, where)
            if name in values:
                raise ValueError(f"{where}: {key_of(name)!r} is there twice: keep one")
            values[name] = value
        missing = [key_of(f.name) for f in fields(cls) if f.default is MISSING and f.name not in values]
        if missing:
            raise ValueError(f"{where}: {missing[0]!r} is missing: add it, as in {missing[0]} = …")
        by_theory = values.get("alpha_q") == "theory"
        if by_theory:
            values["alpha_q"] = 0.0  # until everything else is known
        try:
            settings = cls(**{name: typed(key_of(name), value, hints[name]) for name, value in values.items()})
            return replace(settings, alpha_q=settings.theory_alpha_q()) if by_theory else settings
        except ValueError as error:
            raise ValueError(f"{where}: {_in_keys(str(error), cls)}") from None

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> Self:
        """From a Flower run config, which holds other keys too; one that begins with ``ppsgd-`` must be known."""
        own = {key_of(f.name) for f in fields(cls)}
        run_config = {key.replace("_", "-"): value for key, value in run_config.items()}
        for key in run_config:
            if key.startswith("ppsgd-") and key not in PREFIXED:
                nearest = difflib.get_close_matches(key, [*PREFIXED, *own], n=1, cutoff=0.0)[0]
                raise ValueError(f"run config: unknown key {key!r}: did you mean {nearest!r}?")
        return cls.read({key: value for key, value in run_config.items() if key in own}, where="run config")

    def to_flat(self) -> dict[str, Any]:
        return {key_of(f.name): value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    def cohort(self) -> Cohort:
        if self.cohort_size is not None and self.cap is not None:
            raise ValueError("cap is for Poisson cohorts: leave it out where cohort_size fixes the number of users")
        if self.cohort_size is not None:
            return FixedSize(self.population, self.cohort_size)
        assert self.rate is not None
        return Poisson(self.population, self.rate, self.cap)

    def release(self) -> Release:
        """The release, with its noise calibrated for the planned rounds where ``epsilon`` is given."""
        noise, cohort = self.noise_multiplier, self.cohort()
        if noise is None:
            assert self.epsilon is not None
            noise = calibrate_noise(epsilon=self.epsilon, delta=self.delta, cohort=cohort, rounds=self.rounds)
        return Release(cohort, self.clip_norm, noise, self.total_batch)

    def steps(self) -> Steps:
        return Steps.from_ratio(self.step, self.alpha_q)

    def theory_alpha_q(self) -> float:
        """What ``alpha-q = "theory"`` stands for. The bound asks about the problem, of which settings know nothing."""
        raise ValueError(
            "alpha_q 'theory' is known to experiments only: let `ppsgd plan` work it out and write the number here"
        )

    def arguments(self) -> dict[str, Any]:
        """The arguments that the strategies of both APIs have in common."""
        return {
            "release": self.release(),
            "steps": self.steps(),
            "delta": self.delta,
            "max_epsilon": self.epsilon if self.max_epsilon is None else self.max_epsilon,
            "evaluate_every": self.evaluate_every,
            "min_online": self.min_online,
            "enrolled": [name.strip() for name in self.enrolled.split(",")] if self.enrolled else None,
            "round_timeout": self.round_timeout,
            "average": self.average,
            "checkpoint_dir": self.checkpoint_dir or None,
            "checkpoint_every": self.checkpoint_every,
            "tensorboard_dir": self.tensorboard_dir or None,
            "insecure_seed": self.insecure_seed,
        }


ALTERNATIVES = (
    ("rate", "cohort-size"), ("rate", "cohort-mean"), ("cohort-size", "cohort-mean"), ("noise-multiplier", "epsilon"),
    ("rounds", "passes"), ("evaluate-every", "evaluations"),
)  # fmt: skip


def override(flat: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``flat`` with ``changes``; a change to one of two alternatives takes the other one out."""
    given = {key.replace("_", "-") for key in changes}
    gone = {other for pair in ALTERNATIVES for key, other in (pair, pair[::-1]) if key in given and other not in given}
    kept = {key: value for key, value in flat.items() if key.replace("_", "-") not in gone | given}
    return {**kept, **changes}


def key_of(name: str) -> str:
    """The flat key of a field."""
    return name.replace("_", "-")


def _in_keys(message: str, cls: type[Settings]) -> str:
    """A constructor's message in the words of the file: ``clip-norm`` for ``clip_norm``."""
    for field in fields(cls):
        message = message.replace(field.name, key_of(field.name))
    return message


def _exactly_one(settings: Settings, first: str, second: str) -> None:
    given = [key_of(name) for name in (first, second) if getattr(settings, name) is not None]
    if len(given) != 1:
        found = "both are set" if given else "neither is set"
        raise ValueError(f"give either {key_of(first)} or {key_of(second)}: {found}")


def field_of(key: str, cls: type[Settings], where: str) -> str:
    """The field that a flat key names; ValueError with the nearest one where there is none."""
    names = [f.name for f in fields(cls)]
    name = key.replace("-", "_")
    if name in names:
        return name
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    raise ValueError(f"{where}: unknown key {key!r}: did you mean {key_of(nearest)!r}?")


def typed(key: str, value: Any, hint: Any) -> Any:
    """``value`` as the field's type: whole numbers may stand for floats, nothing else is converted."""
    allowed = get_args(hint) if get_origin(hint) in (types.UnionType,) else (hint,)
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return math.inf if abs(value) > 10**300 else float(value)
    if any(type(value) is kind for kind in allowed):
        return value
    wanted = " or ".join(kind.__name__ for kind in allowed if kind is not types.NoneType)
    raise ValueError(f"{key} must be of type {wanted}, got {value!r}")
