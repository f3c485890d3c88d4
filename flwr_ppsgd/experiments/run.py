"""An experiment: settings and data in, a trained w, rows of measures and a privacy statement out."""

import difflib
import functools
import importlib.resources
import json
import logging
import math
import os
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import tomli_w
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_ppsgd import promise as statement
from flwr_ppsgd.algorithm import Release, Vector
from flwr_ppsgd.client.message_api import Learner, client_app
from flwr_ppsgd.data.synthetic import Synthetic, SyntheticLearner
from flwr_ppsgd.experiments import tasks as tables
from flwr_ppsgd.experiments.problem import ROUNDS_ARE_PUBLIC, SYNTHETIC, Problem, resolved
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.promise import json_number
from flwr_ppsgd.server.curator import Curator
from flwr_ppsgd.server.message_api import PPSGD
from flwr_ppsgd.settings import Settings, override
from flwr_ppsgd.simulation.baselines import BASELINES, FINE_TUNED
from flwr_ppsgd.simulation.batches import Fresh, Population
from flwr_ppsgd.simulation.grid import InProcessGrid
from flwr_ppsgd.simulation.linear import CohortEngine, Engine, Setting, left_for_infinity, train
from flwr_ppsgd.theory import Bound, Constants, theorem_b_4
from flwr_ppsgd.wire import Layout

log = logging.getLogger("flwr.ppsgd")

SIMULATION_NOISE = "simulation noise: summed in floating point, for experiments only"
NO_GUARANTEE = "NO GUARANTEE: simulation noise (the cohort engine sums in floating point)."
THEORY_ASSUMES = (
    "a convex additive model, samples that are fresh in every round, a clip norm that clips nothing, features within "
    "three standard deviations, and the average over rounds as the result"
)
EXHAUSTED = (
    "Users who have used up their samples drop out of the draw, as in the paper's experiments: simulation only, since "
    "who is left depends on how many samples users have, and no epsilon covers that."
)
OWN_DATA, OWN_DATA_SWEEP = "own-data.toml", "own-data-sweep.toml"
SHIPPED = importlib.resources.files("flwr_ppsgd.experiments") / "presets"


@dataclass(frozen=True, kw_only=True)
class Experiment(Settings, Problem):
    """Settings of a training together with the data and the model it is about.

    passes: over everyone's samples, in place of ``rounds``. cohort_mean: users of a round on average, in place of
    ``rate``. evaluations: so many, in place of ``evaluate_every``. Each stands beside what it comes to.
    precision: of the cohort engine, float64 or float32.
    drop_exhausted: a user who has drawn all samples ``passes`` times drops out, as in the paper's experiments.
    baselines: of a sweep, "fine-tuned" (θ trained on top of the final w of global learning, ``fine_tune_passes`` over
    the user's own samples, with the best of ``fine_tune_steps``) and "fedavg" (``local_steps`` a round); by commas.
    """

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
        super().__post_init__()
        self.check()
        if self.replies != "gradient":
            raise ValueError(
                f"replies must be 'gradient' here, got {self.replies!r}: the experiments' clients send those"
            )
        if self.precision not in ("float64", "float32"):
            raise ValueError(f"precision must be 'float64' or 'float32', got {self.precision!r}")

        if self.drop_exhausted and self.passes is None:
            raise ValueError("drop_exhausted needs passes: after so many over the own samples a user drops out")
        self._check_baselines()

    def methods(self) -> list[str]:
        """The baselines, as a list."""
        return [name.strip() for name in self.baselines.split(",") if name.strip()]

    def _check_baselines(self) -> None:
        for name in self.methods():
            if name not in BASELINES:
                raise ValueError(f"baselines must be of {', '.join(BASELINES)}, got {name!r}")
            if self.model == "cnn" or (self.data == SYNTHETIC and name == FINE_TUNED):
                raise ValueError(f"the baseline {name} is for linear models on data of one's own: leave it out here")
        if not 0 < self.fine_tune_passes < math.inf or self.local_steps < 1:
            raise ValueError(
                f"fine_tune_passes must be positive and local_steps at least 1, got {self.fine_tune_passes} and "
                f"{self.local_steps}"
            )

    @classmethod
    def read(cls, flat: Mapping[str, Any], where: str) -> Self:
        """As of ``Settings``, with what follows from the data filled in."""
        for key, value in flat.items():
            if isinstance(value, list):
                raise ValueError(f"{where}: {key} is a list: that is for ppsgd sweep, give one value here")
        return super().read(resolved(flat, where), where)

    def dropped_after(self) -> float | None:
        """So many passes a user drops out; None: never."""
        return self.passes if self.drop_exhausted else None

    def assumed_public(self) -> list[str]:
        """What of the data the settings give away without a charge."""
        if self.passes is None:
            return []
        return [ROUNDS_ARE_PUBLIC.format(int(self.problem().per_user().train_sizes.sum()))]

    def describe(self) -> str:
        """What the data are, and what was taken from them, in lines to print."""
        if self.data == SYNTHETIC:
            return ""
        data = self.problem().per_user()
        lines = [data.describe(self.batch_size)]
        lines += [f"{self.passes:g} passes are {self.rounds:,} rounds: {known}" for known in self.assumed_public()]
        if self.drop_exhausted:
            lines.append(EXHAUSTED)
        return "\n".join(lines)

    def theory_alpha_q(self) -> float:
        """The αQ with the smallest bound of Theorem B.4: a starting point, logged with what it assumes."""
        if self.data != SYNTHETIC:
            raise ValueError("alpha_q 'theory' is for the synthetic problem, whose constants are known: give a number")
        problem = Synthetic.draw(self.population, self.features, self.data_seed)
        chosen = theory_choice(self.release(), self.rounds, self.batch_size, problem.constants())
        alpha_q = chosen.steps.alpha_q
        log.warning(
            "alpha-q = 'theory': %.3g, where the bound on f - f* is smallest (%.3g; it would take step = %.3g, yours "
            "is %g). It assumes %s.",
            alpha_q, chosen.total, max(chosen.steps.shared, chosen.steps.personal), self.step, THEORY_ASSUMES,
        )  # fmt: skip
        return alpha_q

    @classmethod
    def load(cls, path: Path | None = None, overrides: dict[str, Any] | None = None) -> Self:
        """From a TOML file (default: the one that ships with the package), changed by ``overrides``."""
        overrides = overrides or {}
        flat, where = read_toml(path, OWN_DATA if "data" in overrides else "synthetic.toml")
        return cls.read(override(flat, overrides), where=where)


def read_toml(path: Path | None, shipped: str) -> tuple[dict[str, Any], str]:
    """The flat settings in a file, or in one that ships with the package, and how to name it in an error."""
    source = SHIPPED / shipped if path is None else path
    if path is not None and not path.suffix and not path.exists():
        source = SHIPPED / f"{known_preset(str(path))}.toml"
    try:
        return tomllib.loads(source.read_text(encoding="utf-8")), source.name if path is None else str(path)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{source}: cannot be read: {error}") from None


def presets() -> dict[str, str]:
    """The experiments that ship with the package: name → what it is, the first line of the file."""
    files = sorted((f for f in SHIPPED.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {file.name.removesuffix(".toml"): file.read_text(encoding="utf-8").splitlines()[0][2:] for file in files}


def known_preset(name: str) -> str:
    if name in presets():
        return name
    nearest = difflib.get_close_matches(name, presets(), n=1, cutoff=0.0)[0]
    raise ValueError(f"{name}: there is no such file and no experiment of that name: did you mean {nearest!r}? --list")


class Accounted(Protocol):
    """Whoever can say what a run released and what that guarantees."""

    @property
    def release(self) -> Release: ...
    @property
    def ledger(self) -> Ledger: ...
    def privacy_statement(self) -> str: ...
    def privacy_data(self) -> dict[str, object]: ...


def theory_choice(release: Release, rounds: int, batch_size: int, constants: Constants) -> Bound:
    """The smallest bound of Theorem B.4 over αQ, for means over ``batch_size`` samples."""
    return theorem_b_4(
        population=release.cohort.population, rate=release.cohort.rate, rounds=rounds, dimension=constants.dimension,
        smoothness=constants.smoothness, variance_w=constants.variance_w / batch_size,
        variance_theta=constants.variance_theta / batch_size, noise_std=release.noise_std / release.denominator,
    ).best(constants.minimiser)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind. rows: one for each evaluated round, with ε and the measures. stopped: by the user."""

    experiment: Experiment
    strategy: Accounted
    w: ArrayRecord
    rows: list[dict[str, float]]
    stopped: bool = False


Watch: TypeAlias = Callable[[int, Result, Ledger], None]


@functools.lru_cache(maxsize=4)
def _problem(users: int, features: int, seed: int) -> Synthetic:
    return Synthetic.draw(users, features, seed)


def population_of(experiment: Experiment) -> Population:
    """Everyone's data, for the cohort engine of linear models."""
    if experiment.data != SYNTHETIC:
        return tables.table(experiment.problem(), experiment.precision, experiment.dropped_after())
    problem = _problem(experiment.population, experiment.features, experiment.data_seed)
    return Fresh(problem, experiment.batch_size)


def engine_of(experiment: Experiment, settings: Sequence[Setting], seed: int | None, rounds: int) -> Engine:
    """The cohort engine for the experiment's model."""
    if experiment.model == "cnn":
        return tables.network_engine(
            experiment.problem(),
            settings,
            seed=seed,
            average=experiment.average,
            dropped_after=experiment.dropped_after(),
        )
    return CohortEngine(
        population_of(experiment), settings, seed=seed, rounds=rounds, average=experiment.average,
        dtype=experiment.precision,
    )  # fmt: skip


def learner_for(context: Context) -> Learner:
    """The learner of one node; its settings travel in the run config."""
    config, user = context.run_config, int(context.node_config["partition-id"])
    problem = Problem.of(config)
    if problem.data != SYNTHETIC:
        return tables.learner(problem, user)
    truth = _problem(int(config["population"]), problem.features, problem.data_seed)
    return SyntheticLearner(truth, user, problem.batch_size)


def initial_arrays(experiment: Experiment) -> ArrayRecord:
    """w before the first round."""
    if experiment.data == SYNTHETIC:
        return ArrayRecord([np.zeros(experiment.features)])
    return tables.initial_arrays(experiment.problem())


def run(experiment: Experiment, on_round: Watch | None = None) -> Outcome:
    """Train in this process."""
    grid = InProcessGrid(client_app(learner_for), experiment.population, experiment.to_flat())
    return run_on(grid, experiment, on_round)


def run_on(grid: Grid, experiment: Experiment, on_round: Watch | None = None) -> Outcome:
    """Train on any grid. Ctrl-C ends the run early; ε is then still that of the planned rounds."""
    if experiment.drop_exhausted:
        raise ValueError("drop-exhausted is simulation only: use --engine cohort, or leave it out")
    strategy = PPSGD.from_config(experiment.to_flat())
    latest = Result(arrays=initial_arrays(experiment))
    ledgers: dict[int, Ledger] = {}

    def remember(round_: int, result: Result) -> None:
        nonlocal latest
        latest, ledgers[round_] = result, strategy.ledger
        if on_round:
            on_round(round_, result, strategy.ledger)

    stopped = False
    try:
        strategy.start(grid, latest.arrays, num_rounds=experiment.rounds, on_round=remember)
    except KeyboardInterrupt:
        stopped = True
    if not all(np.isfinite(array).all() for array in latest.arrays.to_numpy_ndarrays()):
        raise _diverged(experiment)
    rows = [
        {"round": round_, "epsilon": ledgers[round_].epsilon(), **_numbers(metrics)}
        for round_, metrics in latest.evaluate_metrics_clientapp.items()
        if round_ in ledgers
    ]
    if rows and left_for_infinity(rows[0], rows[-1]):
        raise _diverged(experiment)
    w = strategy.averaged(latest.arrays) if stopped else latest.arrays
    return Outcome(experiment, strategy, w, rows, stopped)


def run_as_cohort(experiment: Experiment, on_round: Watch | None = None) -> Outcome:
    """Train on the cohort engine: the same w and θ, many times faster, with simulation noise."""
    simulated = Simulated(experiment)
    setting = Setting(simulated.release, experiment.steps())
    rounds = simulated.curator.plan(experiment.rounds)
    engine = engine_of(experiment, [setting], experiment.insecure_seed, rounds)
    latest, rows, stopped = Result(), [], False

    def show(round_: int) -> None:
        if on_round:
            on_round(round_, latest, simulated.ledger)

    def count(round_: int) -> None:
        simulated.charge(round_)
        show(round_)

    try:
        for report in train(engine, rounds, experiment.evaluate_every, count):
            if report.diverged:
                raise _diverged(experiment)
            latest.evaluate_metrics_clientapp[report.round] = MetricRecord({**report.measures[0]})
            rows.append({"round": report.round, "epsilon": simulated.ledger.epsilon(), **report.measures[0]})
            show(report.round)
    except KeyboardInterrupt:
        stopped = True
    w = engine.w(0)
    if not np.isfinite(w).all():
        raise _diverged(experiment)
    return Outcome(experiment, simulated, _like(initial_arrays(experiment), w), rows, stopped)


def _like(arrays: ArrayRecord, w: Vector) -> ArrayRecord:
    return Layout.of(arrays).unflatten(w, like=arrays)


def _diverged(experiment: Experiment) -> RuntimeError:
    return RuntimeError(f"training diverged: parameters left for infinity; lower step (now {experiment.step:g})")


class Simulated:
    """What a run on the cohort engine would have released, and what that would have cost; it guarantees nothing."""

    def __init__(self, experiment: Experiment) -> None:
        self.terms = [EXHAUSTED] if experiment.drop_exhausted else []
        self.curator = Curator(
            experiment.release(), experiment.steps(), delta=experiment.delta,
            max_epsilon=experiment.arguments()["max_epsilon"], insecure_seed=experiment.insecure_seed,
        )  # fmt: skip
        if experiment.evaluate_every:
            self.curator.note_evaluation()

    @property
    def release(self) -> Release:
        return self.curator.release

    @property
    def ledger(self) -> Ledger:
        return self.curator.ledger

    def charge(self, round_: int) -> None:
        """Every round counts as one without a guarantee."""
        curator = self.curator
        times = round_ - curator.rounds_done
        curator.rounds_done = round_
        if curator.steps.publishes:
            curator.ledger = curator.ledger.record(curator.release, times, insecure=True)

    def privacy_statement(self) -> str:
        _, *terms = statement.in_words(self.curator).splitlines()
        ledger = statement.charged(self.curator)
        return "\n".join(
            [f"{NO_GUARANTEE} A deployment would cost epsilon = {ledger.epsilon():.3g}.", *self.terms, *terms]
        )

    def privacy_data(self) -> dict[str, object]:
        data = statement.as_data(self.curator)
        return {**data, "guarantee": "none", "noise": SIMULATION_NOISE, "statement": self.privacy_statement()}


def _numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def free_directory(name: str) -> Path:
    """``runs/NAME``, or ``runs/NAME-2`` and so on where that is taken."""
    candidate, number = Path("runs") / name, 2
    while candidate.exists():
        candidate, number = Path("runs") / f"{name}-{number}", number + 1
    return candidate


def check_free(out: Path) -> None:
    """Refuse, before any work, a place where something would be overwritten or nothing can be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} already holds something: choose another directory with --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error.strerror}): choose another directory with --out") from None


def save(outcome: Outcome, out: Path, draw: Callable[[Outcome, Path], None]) -> None:
    """Write the output directory in one move: a new one appears complete or not at all."""
    check_free(out)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        flat = outcome.experiment.to_flat() | {"noise-multiplier": outcome.strategy.release.noise_multiplier}
        flat.pop("epsilon", None)
        (temporary / "config.toml").write_text(tomli_w.dumps(flat), encoding="utf-8")
        rows = "".join(json.dumps(_line(row)) + "\n" for row in outcome.rows)
        (temporary / "metrics.jsonl").write_text(rows, encoding="utf-8")
        data = {**outcome.strategy.privacy_data(), "assumed_public": outcome.experiment.assumed_public()}
        privacy = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
        (temporary / "privacy.json").write_text(privacy + "\n", encoding="utf-8")
        np.savez(temporary / "model.npz", **{f"w{i}": a for i, a in enumerate(outcome.w.to_numpy_ndarrays())})  # type: ignore[arg-type]
        draw(outcome, temporary)
        if out.exists():  # an empty directory of the user's, perhaps the one they stand in
            for path in temporary.iterdir():
                os.replace(path, out / path.name)
        else:
            temporary.chmod(0o755)
            os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _line(row: dict[str, float]) -> dict[str, Any]:
    """A row of metrics.jsonl; what was measured on the users' own data is named as outside the guarantee."""
    measured = [name for name in row if name not in ("round", "epsilon")]
    return {**{name: json_number(value) for name, value in row.items()}, "outside_the_guarantee": measured}
