"""The settings of an experiment: a training, the problem it is about, and how it is simulated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flwr_ppsgd.checks import nearest, require
from flwr_ppsgd.lab.measures import VALIDATION
from flwr_ppsgd.lab.presets import PRESETS, SUFFIX, presets
from flwr_ppsgd.lab.problem import DEVICE, LINEAR, SYNTHETIC, Problem, place_of
from flwr_ppsgd.lab.rows import BASELINES, FEDAVG, OWN_TRIVIAL, SOLVED_BASELINES, TRIVIAL
from flwr_ppsgd.lab.tasks import AnyTask, task_of
from flwr_ppsgd.recipe import DROWNED
from flwr_ppsgd.settings import (
    AUTO,
    PAPER,
    Settings,
    build,
    check_known,
    check_run_config,
    keys_of,
    override,
    part_of,
    read_toml,
    spans_of,
    split_names,
    to_flat,
    typed_value,
    with_keys,
)

DEFAULT = "synthetic"
OWN_DATA = "own-data"
OWN_DATA_PAPER = "own-data-paper"
# any of these, where the recipe is the default, asks for the paper's method instead
ASKS_FOR_PAPER = ("step", "alpha-q", "clip-norm", "cohort-size", "passes")
NOISE_WORDS = "noise in a prediction by w: at most about {:.2g} of the size of users' own models"
DROWNED_WORDS = ", so that users will mostly keep to their own: more users or a larger ε would help"
PRECISIONS = ("float64", "float32")
PARTS = ("training", "problem")  # the fields of an experiment that hold settings of their own
FOUND_IN_DATA = (  # keys of a problem that are known once its data are found
    "data",
    "data-checksum",
    "schema",
    "schema-checksum",
    "representation-features",
    "representation-seed",
)
ROUNDS_ARE_PUBLIC = (
    "provided that the total number of samples, {:,}, is public: the number of rounds follows "
    "from it"
)
CHOSEN_BY_LOOKING = (
    "provided that {} are public: they were chosen by looking at everybody's rows, and no epsilon "
    "covers that; ppsgd look --write and --schema declare them"
)
DECLARED = "provided that {} (sha256 {}) is public knowledge, as its author declares"
EXHAUSTED = (
    "Users who have used up their samples drop out of the draw, as in the paper's experiments: "
    "simulation only, since who is left depends on how many samples users have, and no epsilon "
    "covers that."
)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Settings of a training, its data and its model.

    ``passes``, ``cohort_mean`` and ``evaluations`` are kept beside the settings derived from them.

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
        fine_tune_steps: of "fine-tuned", the step sizes to choose from, separated by commas.
    """

    training: Settings
    problem: Problem
    passes: float | None = None
    cohort_mean: float | None = None
    evaluations: float | None = None
    precision: str = "float64"
    drop_exhausted: bool = False
    baselines: str = ""
    fine_tune_steps: str = "0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0"

    def __post_init__(self) -> None:
        replies = self.training.replies
        remedy = "the clients of experiments send gradients"
        require(replies == "gradient", "replies must be 'gradient' here", replies, remedy)
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be 'float64' or 'float32', got {self.precision!r}")
        if self.drop_exhausted and self.passes is None:
            raise ValueError("drop_exhausted needs passes: that is when a user drops out")
        linear = self.problem.model == LINEAR
        for name in self.baseline_names():
            if name not in BASELINES:
                raise ValueError(f"baselines must be of {', '.join(BASELINES)}, got {name!r}")
            if not linear or (self.problem.data == SYNTHETIC and name != FEDAVG):
                raise ValueError(
                    f"the baseline {name} is for linear models on data of one's own: leave it out "
                    "here"
                )
            if name in SOLVED_BASELINES:
                self.problem.check_squared()

    @property
    def task(self) -> AnyTask:
        """What is learnt."""
        return task_of(
            self.problem,
            self.training.population,
            average=self.training.average,
            precision=self.precision,
            dropped_after=self.passes if self.drop_exhausted else None,
        )

    def baseline_names(self) -> list[str]:
        """The baselines, as a list."""
        return split_names(self.baselines)

    def conditions(self) -> list[str]:
        """What must be public for the promise to hold, each as "provided that …"."""
        if self.problem.data == SYNTHETIC:
            return []
        data = self.problem.per_user()
        if self.problem.schema:
            found = [DECLARED.format(Path(self.problem.schema).name, data.schema.sha256)]
        else:
            looked = [*data.looked]
            if data.representation is not None:
                looked.append("the representation")
            found = [CHOSEN_BY_LOOKING.format(", ".join(looked))]
        if self.passes is not None:
            found.append(ROUNDS_ARE_PUBLIC.format(int(data.train_sizes.sum())))
        return found

    def trivial(self) -> dict[str, dict[str, float]]:
        """The measures without features, by method: with everyone's mean or most frequent class,
        and with each user's own. Empty for the synthetic problem or without test rows."""
        from flwr_ppsgd.lab.inspect import trivial_answer

        if self.problem.data == SYNTHETIC:
            return {}
        data = self.problem.per_user()
        found: dict[str, dict[str, float]] = {TRIVIAL: {}, OWN_TRIVIAL: {}}
        parts = (
            {"": data}
            if data.validation is None
            else {"": data, VALIDATION: data.validation_as_test()}
        )
        for prefix, part in parts.items():
            answer = trivial_answer(part)
            if answer is not None:
                measure, pooled, own = answer
                found[TRIVIAL][prefix + measure] = pooled
                found[OWN_TRIVIAL][prefix + measure] = own
        return {method: measures for method, measures in found.items() if measures}

    def describe(self) -> str:
        """The data and what was derived from them, in lines to print."""
        from flwr_ppsgd.lab.inspect import brief_report

        lines = []
        if self.problem.data != SYNTHETIC:
            data = self.problem.per_user()
            if self.problem.schema:
                rows = (
                    f"{data.source}: {len(data):,} users, as {self.problem.schema} describes them"
                )
                lines.append(rows)
            else:
                minibatch = 1 if self.problem.scale == DEVICE else self.problem.batch_size
                lines += [data.describe(minibatch), *brief_report(data)]
        return "\n".join([*lines, *self.training_notes()])

    def training_notes(self) -> list[str]:
        """What the settings lead to, in lines to print before a training."""
        lines = []
        if self.passes is not None:
            rounds = f"{self.passes:g} passes are {self.training.rounds:,} rounds"
            lines.append(f"{rounds}, {self.conditions()[-1]}")
        if self.drop_exhausted:
            lines.append(EXHAUSTED)
        if self.training.automatic:
            noise = self.training.recipe().noise_in_prediction
            small = DROWNED_WORDS if noise > DROWNED else ""
            lines.append(f"{self.training.rounds} rounds; {NOISE_WORDS.format(noise)}{small}")
        return lines

    def to_flat(self) -> dict[str, Any]:
        """All settings that are given, by their flat keys."""
        own = to_flat(self)
        for part in PARTS:
            del own[part]
        return {**self.training.to_flat(), **self.problem.to_flat(), **own}

    @classmethod
    def load(
        cls, path: Path | None = None, overrides: Mapping[str, Any] | None = None
    ) -> "Experiment":
        """From a TOML file, changed by ``overrides``.

        Args:
            path: a file, or the name of an experiment of this package. None: the synthetic
                problem, or one for own data if ``overrides`` name any.
            overrides: flat keys and values.
        """
        changes = with_keys(overrides or {})
        default = DEFAULT
        if "data" in changes:
            paper = changes.get("method") == PAPER or any(key in changes for key in ASKS_FOR_PAPER)
            default = OWN_DATA_PAPER if paper else OWN_DATA
        flat, where = read_experiment(path, default)
        return cls.read(override(flat, changes), where)

    @classmethod
    def read(cls, flat: Mapping[str, Any], where: str) -> "Experiment":
        """From flat keys, with those derived from the data filled in; errors name ``where``."""
        for key, value in flat.items():
            check_known(key, experiment_keys(), where)
            if isinstance(value, list):
                raise ValueError(
                    f"{where}: {key} is a list: that is for ppsgd sweep, give one value here"
                )
        try:
            found = _with_data(with_keys(flat))
            found = _with_recipe(found)
            found = _with_derived(found)
            columns = _recipe_columns(found)
        except ValueError as error:
            message = str(error)
            names_data = message.startswith(place_of(str(flat.get("data"))))
            raise ValueError(message if names_data else f"{where}: {message}") from None
        # the problem's task has more words: several labels count as classes in training
        training = build(Settings, {**part_of(found, Settings), **columns}, where)
        problem = build(Problem, part_of(found, Problem), where)
        parts = {"training": training, "problem": problem}
        return build(cls, {**part_of(found, cls), **parts}, where)

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> "Experiment":
        """From a Flower run config, which may hold other keys; one that is nearly a key of an
        experiment is refused."""
        flat = with_keys(run_config)
        known = experiment_keys()
        check_run_config(flat, known)
        own = {key: value for key, value in flat.items() if key in known}
        return cls.read(own, where="run config")


def read_experiment(path: Path | None, default: str) -> tuple[dict[str, Any], str]:
    """The flat keys of a file or of an experiment of this package, and its name in errors."""
    if path is not None and (path.suffix or path.exists()):
        return read_toml(path), str(path)
    name = default if path is None else str(path)
    known = presets()
    if name not in known:
        raise ValueError(
            f"{name}: there is no such file and no experiment of that name: did you mean "
            f"{nearest(name, known)!r}? `ppsgd experiments` lists them"
        )
    source = PRESETS / f"{name}{SUFFIX}"
    return read_toml(source), source.name if path is None else str(path)


def experiment_keys() -> list[str]:
    """All flat keys of an experiment."""
    own = [key for key in keys_of(Experiment) if key not in PARTS]
    return [*keys_of(Problem, Settings), *own]


def _with_data(flat: dict[str, Any]) -> dict[str, Any]:
    """With the keys that own data decide: the absolute path, the checksum, the population."""
    problem = Problem.of(flat)
    task_of(problem, 1)  # whether its keys go together
    if problem.data == SYNTHETIC:
        return flat
    found = problem.with_checksums()
    users = len(found.per_user())
    given = flat.get("population", users)
    if given != users:
        raise ValueError(
            f"population is {given} and {found.data} has {users} users: leave population out"
        )
    known = {key: value for key, value in found.to_flat().items() if key in FOUND_IN_DATA}
    known["representation"] = found.chosen_representation()
    return {**flat, **known, "population": users}


def _with_recipe(flat: dict[str, Any]) -> dict[str, Any]:
    """With the keys that ``method = "auto"`` derives from the data and from public numbers."""
    automatic = flat.get("method") == AUTO
    _refuse_without(flat, ["epsilon", "delta"] if automatic else ["delta"])
    if not automatic:
        return flat
    flat = {"scale": DEVICE, **flat}
    if flat["scale"] not in (DEVICE, "none"):
        raise ValueError(
            f"scale = {flat['scale']!r} is for method = {PAPER!r}, and {AUTO!r} scales rows on "
            "each device: leave scale out, or give 'none'"
        )
    problem = Problem.of(flat)
    if problem.data == SYNTHETIC:
        raise ValueError(
            "method = 'auto' is for users with rows of their own, and samples of the synthetic "
            "problem are always fresh: give data = FILE, or method = 'paper'"
        )
    data = problem.per_user()
    squared = problem.model == LINEAR and problem.loss == "squared"
    if squared and data.task != "regression":  # classes are around 1/K
        flat = {"target-shift": 1 / data.outputs, "bias": True, **flat}
    return flat


def _recipe_columns(flat: Mapping[str, Any]) -> dict[str, str]:
    """The recipe's ``task`` and ``sparse``, which the data decide: several labels count as classes,
    and only columns of a sparse table are sparse. Empty if the method is another."""
    if flat.get("method") != AUTO:
        return {}
    data = Problem.of(flat).per_user()
    if data.task == "regression" and data.outputs > 1:
        raise ValueError(
            f"{data.source}: method = 'auto' learns one amount and this has {data.outputs}: "
            "give one target column, or method = 'paper'"
        )
    sparse = spans_of([at for at, kind in enumerate(data.kinds) if kind == "sparse"])
    if flat.get("sparse") not in (None, "", sparse):
        raise ValueError("sparse follows from the columns of the data: leave it out")
    task = "regression" if data.task == "regression" else "classification"
    return {"task": task, "sparse": sparse}


def _refuse_without(flat: Mapping[str, Any], keys: list[str]) -> None:
    """ValueError unless these keys are given: there is no default for ε or δ."""
    missing = [key for key in keys if key not in flat]
    if missing:
        examples = {"epsilon": "--epsilon 2", "delta": "--delta 1e-5"}
        options = " ".join(examples[key] for key in missing)
        raise ValueError(
            f"{' and '.join(missing)} must be given, there is no default: say what you can afford, "
            f"delta well below 1 over the number of users, as in: ppsgd … {options}"
        )


def _with_derived(flat: dict[str, Any]) -> dict[str, Any]:
    """With rate from cohort-mean, rounds from passes, and evaluate-every from evaluations."""
    if "cohort-mean" in flat:
        mean = _positive_value(flat, "cohort-mean", needs="population")
        flat = _with_value(flat, "cohort-mean", "rate", mean / flat["population"])
    if "passes" in flat:
        rounds = _rounds_in(_positive_value(flat, "passes"), flat)
        flat = _with_value(flat, "passes", "rounds", rounds)
    if "evaluations" in flat:
        times = _positive_value(flat, "evaluations", needs="rounds")
        every = math.ceil(flat["rounds"] / times)
        flat = _with_value(flat, "evaluations", "evaluate-every", every)
    return flat


def _positive_value(flat: Mapping[str, Any], key: str, needs: str | None = None) -> float:
    """The value of ``key``; ValueError unless it is positive and finite and ``needs`` is given."""
    value: float = typed_value(key, flat[key], float)
    if not 0 < value < math.inf:
        raise ValueError(f"{key} must be positive and finite, got {value!r}")
    if needs is not None and needs not in flat:
        raise ValueError(f"{needs!r} is missing: {key} needs it")
    return value


def _with_value(flat: dict[str, Any], key: str, other: str, value: float) -> dict[str, Any]:
    """With ``other`` derived from ``key``; if it is given too, it must agree."""
    given = flat.get(other, value)
    if given != value:
        raise ValueError(
            f"{key} = {flat[key]:g} makes {other} {value:g} and it is given as {given}: keep one "
            "of them"
        )
    return {**flat, other: value}


def _rounds_in(passes: float, flat: Mapping[str, Any]) -> int:
    """The number of rounds in which users draw each of their samples ``passes`` times.

    Σ n_i·passes over the samples that all users draw in a round on average; with drop-exhausted,
    until everybody has dropped out.
    """
    problem = Problem.of(flat)
    if problem.data == SYNTHETIC:
        raise ValueError(
            f"passes is for data with finitely many samples, got {passes:g}: give rounds"
        )
    sizes = problem.per_user().train_sizes
    if "rate" in flat:
        rate = float(typed_value("rate", flat["rate"], float))
    elif "cohort-size" in flat:
        rate = typed_value("cohort-size", flat["cohort-size"], int) / len(sizes)
    else:
        raise ValueError("give either rate or cohort-size: neither is set")
    if flat.get("drop-exhausted"):
        visits = problem.visits_in(passes)
        assert visits is not None
        return math.ceil(float(visits.sum()) / (rate * len(sizes)))
    drawn = rate * np.minimum(sizes, problem.batch_size).sum()
    return max(1, round(passes * float(sizes.sum() / drawn)))
