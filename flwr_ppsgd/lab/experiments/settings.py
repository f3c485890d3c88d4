"""The settings of an experiment: a training, the problem it is about, and how it is simulated."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, get_type_hints

from flwr_ppsgd.algorithm import Release
from flwr_ppsgd.checks import require
from flwr_ppsgd.lab.experiments.problem import DEVICE, SYNTHETIC, Problem, place_of
from flwr_ppsgd.lab.experiments.rows import BASELINES, FEDAVG_SOLVED, SOLVED
from flwr_ppsgd.lab.experiments.shipped import preset
from flwr_ppsgd.lab.experiments.tasks import Conditions, Task, check_squared, task_of
from flwr_ppsgd.lab.theory import Bound, Constants, theorem_b_4
from flwr_ppsgd.server.rounds import DROWNED
from flwr_ppsgd.server.training import Training
from flwr_ppsgd.settings import (
    AUTO,
    PAPER,
    THEORY,
    Settings,
    build,
    check_known,
    check_run_config,
    in_keys,
    keys_of,
    listed,
    name_of,
    override,
    part_of,
    read_toml,
    to_flat,
    typed,
    with_keys,
)

log = logging.getLogger("flwr.ppsgd")

OWN_DATA = "own-data"
OWN_DATA_PAPER = "own-data-paper"
# any of these, where the recipe is the default, asks for the paper's method instead
ASKS_FOR_PAPER = ("step", "alpha-q", "clip-norm", "cohort-size", "passes")
DEFAULT = "synthetic"
NOISE_WORDS = "noise in a prediction by w: at most about {:.2g} of the size of users' own models"
DROWNED_WORDS = ", so that users will mostly keep to their own: more users or a larger ε would help"
PRECISIONS = ("float64", "float32")
PARTS = ("training", "problem")  # the fields of an experiment that hold settings of their own
NEEDS = {"passes": (), "cohort-mean": ("population",), "evaluations": ("rounds",)}
THEORY_ASSUMES = (
    "a convex additive model, samples that are fresh in every round, a clip norm that clips "
    "nothing, features within three standard deviations, and the average over rounds as the result"
)
CHOSEN_BY_LOOKING = (
    "columns, categories, scales and task: no epsilon pays for choosing them by looking at the data"
)
EXHAUSTED = (
    "Users who have used up their samples drop out of the draw, as in the paper's experiments: "
    "simulation only, since who is left depends on how many samples users have, and no epsilon "
    "covers that."
)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Settings of a training together with the data and the model it is about.

    ``passes``, ``cohort_mean`` and ``evaluations`` stand beside what was worked out from them.

    Args:
        training: population, release, steps and budget.
        problem: data and model.
        passes: over everyone's samples, instead of ``rounds``.
        cohort_mean: the number of users per round on average, instead of ``rate``.
        evaluations: the number of evaluations, instead of ``evaluate_every``.
        precision: of the cohort engine, float64 or float32.
        drop_exhausted: a user who has drawn all samples ``passes`` times drops out, as in the
            paper's experiments.
        baselines: of a sweep, separated by commas: "fine-tuned" (θ trained on top of the final w of
            global learning) and "fedavg" (local steps).
        fine_tune_passes: of "fine-tuned", passes over the user's own samples.
        fine_tune_steps: of "fine-tuned", the step sizes to choose from, separated by commas.
        local_steps: of "fedavg", the number of local steps per round.
    """

    training: Settings
    problem: Problem
    passes: float | None = None
    cohort_mean: float | None = None
    evaluations: float | None = None
    precision: str = "float64"
    drop_exhausted: bool = False
    baselines: str = ""
    fine_tune_passes: float = 5.0
    fine_tune_steps: str = ""
    local_steps: int = 5

    def __post_init__(self) -> None:
        Training.of(**self.training.arguments(self.training.uncalibrated()))
        replies = self.training.replies
        remedy = "the clients of experiments send gradients"
        require(replies == "gradient", "replies must be 'gradient' here", replies, remedy)
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be 'float64' or 'float32', got {self.precision!r}")
        if self.drop_exhausted and self.passes is None:
            raise ValueError("drop_exhausted needs passes: that is when a user drops out")
        self._check_baselines()

    def _check_baselines(self) -> None:
        for name in self.methods():
            if name not in BASELINES:
                raise ValueError(f"baselines must be of {', '.join(BASELINES)}, got {name!r}")
            if name not in self.task.baselines:
                raise ValueError(
                    f"the baseline {name} is for linear models on data of one's own: leave it out "
                    "here"
                )
            if name in (SOLVED, FEDAVG_SOLVED):
                check_squared(self.problem)
        tuned = 0 < self.fine_tune_passes < math.inf
        rule = "fine_tune_passes must be positive and finite"
        require(tuned, rule, self.fine_tune_passes, "5 is the default")
        rule = "local_steps must be at least 1"
        require(self.local_steps >= 1, rule, self.local_steps, "1 is global learning")

    @property
    def task(self) -> Task:
        """What is learnt."""
        return task_of(self.problem, self.training.population)

    def methods(self) -> list[str]:
        """The baselines, as a list."""
        return listed(self.baselines)

    def conditions(self) -> Conditions:
        """What all settings side by side have in common on the cohort engine."""
        return Conditions(
            rounds=self.training.rounds,
            rate=self.training.cohort().rate,
            average=self.training.average,
            precision=self.precision,
            dropped_after=self.passes if self.drop_exhausted else None,
        )

    def assumed_public(self) -> list[str]:
        """What the settings give away about the data without a charge."""
        known = [] if self.problem.data == SYNTHETIC else [CHOSEN_BY_LOOKING]
        if self.passes is not None:
            known += self.task.assumed_public()
        return known

    def describe(self) -> str:
        """What the data are, and what was worked out from them, in lines to print."""
        lines = [self.task.describe()]
        if self.passes is not None:
            public = "; ".join(self.task.assumed_public())
            rounds = f"{self.passes:g} passes are {self.training.rounds:,} rounds"
            lines.append(f"{rounds}; taken to be public: {public}")
        if self.drop_exhausted:
            lines.append(EXHAUSTED)
        if self.training.automatic:
            noise = self.training.recipe().noise_in_prediction
            small = DROWNED_WORDS if noise > DROWNED else ""
            lines.append(f"{self.training.rounds} rounds; {NOISE_WORDS.format(noise)}{small}")
        return "\n".join(lines)

    def to_flat(self) -> dict[str, Any]:
        """All settings that are given, by their flat keys."""
        own = to_flat(self)
        for part in PARTS:
            del own[part]
        # the problem's task has more words: several labels count as classes in training
        return {**self.training.to_flat(), **self.problem.to_flat(), **own}

    @classmethod
    def load(
        cls, path: Path | None = None, overrides: Mapping[str, Any] | None = None
    ) -> "Experiment":
        """From a TOML file, changed by ``overrides``.

        Args:
            path: a file, or the name of an experiment that ships. None: the synthetic problem, or
                one for own data if ``overrides`` name any.
            overrides: flat keys and values.
        """
        changes = overrides or {}
        default = _default_for(with_keys(changes))
        source = source_of(path, default)
        flat = override(read_toml(source), changes)
        return cls.read(flat, where=shown(source, path))

    @classmethod
    def read(cls, flat: Mapping[str, Any], where: str) -> "Experiment":
        """From flat keys, with what follows from the data filled in; errors name ``where``."""
        for key, value in flat.items():
            if isinstance(value, list):
                raise ValueError(
                    f"{where}: {key} is a list: that is for ppsgd sweep, give one value here"
                )
        flat = resolved(flat, where)
        for key in flat:
            check_known(key, experiment_keys(), where)
        by_theory = flat.get("alpha-q") == THEORY
        if by_theory:
            flat = {**flat, "alpha-q": 0.0}  # until everything else is known
        experiment = _built(flat, where)
        return experiment._by_theory(where) if by_theory else experiment

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> "Experiment":
        """From a Flower run config. It may hold keys of the app, but no misspelt ones of ours."""
        flat = with_keys(run_config)
        known = experiment_keys()
        check_run_config(flat, known)
        own = {key: value for key, value in flat.items() if key in known}
        return cls.read(own, where="run config")

    def _by_theory(self, where: str) -> "Experiment":
        """With the αQ of the smallest bound: a starting point, logged with what it assumes."""
        training = self.training
        try:
            constants = self.task.constants()
        except ValueError as error:
            raise ValueError(f"{where}: {in_keys(str(error), Settings)}") from None
        batch_size = self.problem.batch_size
        chosen = theory_choice(training.release(), training.rounds, batch_size, constants)
        alpha_q = chosen.steps.alpha_q
        step = max(chosen.steps.shared, chosen.steps.personal)
        log.warning(
            "alpha-q = 'theory': %.3g, where the bound on f - f* is smallest (%.3g; it would take "
            "step = %.3g, yours is %g). It assumes %s.",
            alpha_q,
            chosen.total,
            step,
            training.step,
            THEORY_ASSUMES,
        )
        return replace(self, training=replace(training, alpha_q=alpha_q))


def _default_for(changes: Mapping[str, Any]) -> str:
    """The experiment to start from if none is named."""
    if "data" not in changes:
        return DEFAULT
    paper = changes.get("method") == PAPER or any(key in changes for key in ASKS_FOR_PAPER)
    return OWN_DATA_PAPER if paper else OWN_DATA


def experiment_keys() -> list[str]:
    """All flat keys of an experiment."""
    own = [key for key in keys_of(Experiment) if key not in PARTS]
    return [*keys_of(Problem, Settings), *own]


def _built(flat: Mapping[str, Any], where: str) -> Experiment:
    """The parts, then the whole."""
    own_settings = part_of(flat, Settings)
    if flat.get("method") == AUTO:
        own_settings |= _from_columns(flat, where)
    training = build(Settings, own_settings, where)
    problem = build(Problem, part_of(flat, Problem), where)
    hints = get_type_hints(Experiment)
    try:
        own = {
            name_of(key): typed(key, value, hints[name_of(key)])
            for key, value in part_of(flat, Experiment).items()
        }
        return Experiment(training=training, problem=problem, **own)
    except ValueError as error:
        raise ValueError(f"{where}: {in_keys(str(error), Experiment)}") from None


def _from_columns(flat: Mapping[str, Any], where: str) -> dict[str, str]:
    """The recipe's task and sparse columns, which the data decide."""
    try:
        found = _task_of(flat).public()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if flat.get("sparse") not in (None, "", found["sparse"]):
        raise ValueError(f"{where}: sparse follows from the columns of the data: leave it out")
    return found


def source_of(path: Path | None, default: str) -> Path | Traversable:
    """The file to read: the given one, or one that ships, by its name."""
    if path is None:
        return preset(default)
    if path.suffix or path.exists():
        return path
    return preset(str(path))


def shown(source: Path | Traversable, path: Path | None) -> str:
    """How errors name a source."""
    return source.name if path is None else str(path)


def resolved(flat: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``flat`` with all that follows from the data: place, checksum, population, rounds, rate."""
    found = with_keys(flat)
    try:
        return _with_derived(_with_recipe(_with_known(found)))
    except ValueError as error:
        message = str(error)
        named = message.startswith(place_of(str(found.get("data"))))
        raise ValueError(message if named else f"{where}: {message}") from None


def _task_of(flat: Mapping[str, Any]) -> Task:
    """The task, before the training is known."""
    return task_of(Problem.of(flat), 1)


def _with_known(flat: dict[str, Any]) -> dict[str, Any]:
    """With the keys that the data decide."""
    known = _task_of(flat).known()
    users = known.get("population")
    given = flat.get("population", users)
    if users is not None and given != users:
        raise ValueError(
            f"population is {given} and {known['data']} has {users} users: leave population out"
        )
    return {**flat, **known}


def _with_recipe(flat: dict[str, Any]) -> dict[str, Any]:
    """With what ``method = "auto"`` leaves to the data and to public numbers."""
    if flat.get("method") != AUTO:
        return flat
    _refuse_without_budget(flat)
    flat = {"scale": DEVICE, **flat}
    if flat["scale"] not in (DEVICE, "none"):
        raise ValueError(
            f"scale = {flat['scale']!r} is for method = {PAPER!r}, and {AUTO!r} scales rows on "
            "each device: leave scale out, or give 'none'"
        )
    shift = _task_of(flat).centre()
    if shift:
        flat = {"target-shift": shift, "bias": True, **flat}
    return flat


def _refuse_without_budget(flat: Mapping[str, Any]) -> None:
    """There is no default for ε or δ."""
    missing = [key for key in ("epsilon", "delta") if key not in flat]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} must be given, there is no default: say what you can afford, "
            "as in --set epsilon=2.0 --set delta=1e-5 (delta well below 1 over the number of users)"
        )


def _with_derived(flat: dict[str, Any]) -> dict[str, Any]:
    """With rate from the mean size of a cohort, rounds from passes, and how often to evaluate."""
    mean = _positive(flat, "cohort-mean")
    if mean is not None:
        flat = _put(flat, "cohort-mean", "rate", mean / flat["population"])
    passes = _positive(flat, "passes")
    if passes is not None:
        exhausts = bool(flat.get("drop-exhausted"))
        rounds = _task_of(flat).rounds_in(passes, _rate(flat), exhausts=exhausts)
        flat = _put(flat, "passes", "rounds", rounds)
    times = _positive(flat, "evaluations")
    if times is not None:
        flat = _put(flat, "evaluations", "evaluate-every", math.ceil(flat["rounds"] / times))
    return flat


def _positive(flat: Mapping[str, Any], key: str) -> float | None:
    """The value of ``key``; None if it is not given."""
    if key not in flat:
        return None
    value: float = typed(key, flat[key], float)
    if not 0 < value < math.inf:
        raise ValueError(f"{key} must be positive and finite, got {value!r}")
    for other in NEEDS[key]:
        if other not in flat:
            raise ValueError(f"{other!r} is missing: {key} needs it")
    return value


def _rate(flat: Mapping[str, Any]) -> float:
    """The share of users that takes part in a round, on average."""
    if "rate" in flat:
        return float(typed("rate", flat["rate"], float))
    if "cohort-size" not in flat:
        raise ValueError("give either rate or cohort-size: neither is set")
    size: int = typed("cohort-size", flat["cohort-size"], int)
    return float(size / flat["population"])


def _put(flat: dict[str, Any], key: str, other: str, value: float) -> dict[str, Any]:
    """With ``other`` worked out from ``key``; if it is there already it must agree."""
    given = flat.get(other, value)
    if given != value:
        raise ValueError(
            f"{key} = {flat[key]:g} makes {other} {value:g} and it is given as {given}: keep one "
            "of them"
        )
    return {**flat, other: value}


def theory_choice(release: Release, rounds: int, batch_size: int, constants: Constants) -> Bound:
    """The smallest bound of Theorem B.4 over αQ, for means over ``batch_size`` samples."""
    theorem = theorem_b_4(
        population=release.cohort.population,
        rate=release.cohort.rate,
        rounds=rounds,
        dimension=constants.dimension,
        smoothness=constants.smoothness,
        variance_w=constants.variance_w / batch_size,
        variance_theta=constants.variance_theta / batch_size,
        noise_std=release.usual_noise_std / release.denominator,
    )
    return theorem.best(constants.minimiser)
