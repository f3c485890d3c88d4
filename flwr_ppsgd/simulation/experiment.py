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
from typing import Any, Self, TypeAlias

import numpy as np
import tomli_w
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_ppsgd.algorithm import Release
from flwr_ppsgd.client import Learner, client_app
from flwr_ppsgd.datasets import Synthetic, SyntheticLearner
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.settings import Settings, override
from flwr_ppsgd.simulation.grid import InProcessGrid
from flwr_ppsgd.statement import json_number
from flwr_ppsgd.strategy import PPSGD
from flwr_ppsgd.theory import Bound, Constants, theorem_b_4

log = logging.getLogger("flwr.ppsgd")

THEORY_ASSUMES = (
    "a convex additive model, samples that are fresh in every round, a clip norm that clips nothing, features within "
    "three standard deviations, and the average over rounds as the result"
)
SHIPPED = importlib.resources.files("flwr_ppsgd.experiments")


@dataclass(frozen=True, kw_only=True)
class Experiment(Settings):
    """Settings of a training together with the data it runs on.

    data: which data set. features, data_seed: of the synthetic problem. batch_size: samples a user draws in a round.
    """

    data: str = "synthetic"
    features: int = 100
    data_seed: int = 0
    batch_size: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data != "synthetic":
            raise ValueError(f"data must be 'synthetic', got {self.data!r}: no other data set is known")
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
        source = SHIPPED / "synthetic.toml" if path is None else path
        try:
            flat = tomllib.loads(source.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{source}: cannot be read: {error}") from None
        return cls.read(override(flat, overrides or {}), where=str(path or source.name))


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
    strategy: PPSGD
    w: ArrayRecord
    rows: list[dict[str, float]]
    stopped: bool = False


Watch: TypeAlias = Callable[[int, Result, Ledger], None]


@functools.lru_cache(maxsize=4)
def _problem(users: int, features: int, seed: int) -> Synthetic:
    return Synthetic.draw(users, features, seed)


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
        raise RuntimeError(f"training diverged: w is not finite; lower step (now {experiment.step:g})")
    rows = [
        {"round": round_, "epsilon": ledgers[round_].epsilon(), **_numbers(metrics)}
        for round_, metrics in latest.evaluate_metrics_clientapp.items()
        if round_ in ledgers
    ]
    return Outcome(experiment, strategy, latest.arrays, rows, stopped)


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
        rows = "".join(json.dumps(_valid(row)) + "\n" for row in outcome.rows)
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


def _valid(row: dict[str, float]) -> dict[str, float | str]:
    return {name: json_number(value) for name, value in row.items()}
