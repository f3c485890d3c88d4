"""An experiment: settings and data in, a trained w, rows of measures and a privacy statement out."""

import functools
import importlib.resources
import json
import logging
import os
import shutil
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import tomli_w
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_ppsgd import statement
from flwr_ppsgd.algorithm import Release
from flwr_ppsgd.client import Learner, client_app
from flwr_ppsgd.curator import Curator
from flwr_ppsgd.datasets import Synthetic, SyntheticLearner
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.settings import Settings, override
from flwr_ppsgd.simulation.cohort import CohortEngine, Setting, train
from flwr_ppsgd.simulation.grid import InProcessGrid
from flwr_ppsgd.simulation.population import Fresh, Population
from flwr_ppsgd.statement import json_number
from flwr_ppsgd.strategy import PPSGD
from flwr_ppsgd.theory import Bound, Constants, theorem_b_4

log = logging.getLogger("flwr.ppsgd")

SIMULATION_NOISE = "simulation noise: summed in floating point, for experiments only"
NO_GUARANTEE = "NO GUARANTEE: simulation noise (the cohort engine sums in floating point)."
THEORY_ASSUMES = (
    "a convex additive model, samples that are fresh in every round, a clip norm that clips nothing, features within "
    "three standard deviations, and the average over rounds as the result"
)
SHIPPED = importlib.resources.files("flwr_ppsgd.experiments")


@dataclass(frozen=True, kw_only=True)
class Experiment(Settings):
    """Settings of a training together with the data it runs on.

    data: which data set. features, data_seed: of the synthetic problem. batch_size: samples a user draws in a round.
    precision: of the cohort engine, float64 or float32.
    """

    data: str = "synthetic"
    features: int = 100
    data_seed: int = 0
    batch_size: int = 10
    precision: str = "float64"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data != "synthetic":
            raise ValueError(f"data must be 'synthetic', got {self.data!r}: no other data set is known")
        if self.replies != "gradient":
            raise ValueError(
                f"replies must be 'gradient' here, got {self.replies!r}: the experiments' clients send those"
            )
        if self.precision not in ("float64", "float32"):
            raise ValueError(f"precision must be 'float64' or 'float32', got {self.precision!r}")
        for name, least in (("features", 5), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}: raise it"
                )

    def theory_alpha_q(self) -> float:
        """The αQ with the smallest bound of Theorem B.4: a starting point, logged with what it assumes."""
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
        flat, where = read_toml(path, "synthetic.toml")
        return cls.read(override(flat, overrides or {}), where=where)


def read_toml(path: Path | None, shipped: str) -> tuple[dict[str, Any], str]:
    """The flat settings in a file, or in one that ships with the package, and how to name it in an error."""
    source = SHIPPED / shipped if path is None else path
    try:
        return tomllib.loads(source.read_text(encoding="utf-8")), str(path or shipped)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{source}: cannot be read: {error}") from None


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
    """Everyone's data, for the cohort engine."""
    problem = _problem(experiment.population, experiment.features, experiment.data_seed)
    return Fresh(problem, experiment.batch_size)


def synthetic_learner(context: Context) -> Learner:
    """The learner of one node of the synthetic problem; its settings travel in the run config."""
    config = context.run_config
    problem = _problem(int(config["population"]), int(config["features"]), int(config["data-seed"]))
    return SyntheticLearner(problem, int(context.node_config["partition-id"]), int(config["batch-size"]))


def run(experiment: Experiment, on_round: Watch | None = None) -> Outcome:
    """Train in this process."""
    grid = InProcessGrid(client_app(synthetic_learner), experiment.population, experiment.to_flat())
    return run_on(grid, experiment, on_round)


def run_on(grid: Grid, experiment: Experiment, on_round: Watch | None = None) -> Outcome:
    """Train on any grid. Ctrl-C ends the run early; ε is then still that of the planned rounds."""
    strategy = PPSGD.from_config(experiment.to_flat())
    latest = Result(arrays=ArrayRecord([np.zeros(experiment.features)]))
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
    w = strategy.averaged(latest.arrays) if stopped else latest.arrays
    return Outcome(experiment, strategy, w, rows, stopped)


def run_as_cohort(experiment: Experiment, on_round: Watch | None = None) -> Outcome:
    """Train on the cohort engine: the same w and θ, many times faster, with simulation noise."""
    simulated = Simulated(experiment)
    setting = Setting(simulated.release, experiment.steps())
    rounds = simulated.curator.plan(experiment.rounds)
    engine = CohortEngine(
        population_of(experiment), [setting], seed=experiment.insecure_seed, rounds=rounds, average=experiment.average,
        dtype=experiment.precision,
    )  # fmt: skip
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
    return Outcome(experiment, simulated, ArrayRecord([w]), rows, stopped)


def _diverged(experiment: Experiment) -> RuntimeError:
    return RuntimeError(f"training diverged: w is not finite; lower step (now {experiment.step:g})")


class Simulated:
    """What a run on the cohort engine would have released, and what that would have cost; it guarantees nothing."""

    def __init__(self, experiment: Experiment) -> None:
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
        return "\n".join([f"{NO_GUARANTEE} A deployment would cost epsilon = {ledger.epsilon():.3g}.", *terms])

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
        privacy = json.dumps(outcome.strategy.privacy_data(), indent=2, ensure_ascii=False, allow_nan=False)
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
