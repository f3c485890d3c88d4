"""What the package is for: 500 people who have much in common and few rows each.

Three models for everyone (from own rows alone, the shared one, and the personal one) at four
levels of privacy, in one picture: ``python simulations/demo.py [PICTURE.png]``.
"""

import logging
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from flwr_ppsgd.cli import console
from flwr_ppsgd.lab.evaluation import OUTSIDE, SAME_MEASURE
from flwr_ppsgd.lab.experiment import Experiment
from flwr_ppsgd.lab.figures import COLOURS
from flwr_ppsgd.lab.measures import measure_of
from flwr_ppsgd.lab.outputs import free_directory, save
from flwr_ppsgd.lab.run import RunOutcome, run, run_as_cohort
from flwr_ppsgd.lab.screen import progress_bar, progress_hook
from flwr_ppsgd.learner import LOCAL, SHARED
from flwr_ppsgd.statement import rounded_up

USERS = 500
FEATURES = 30
ROWS = (15, 60)  # for training: the fewest and the most of a user
TEST_ROWS = 40
LABEL_NOISE = 0.3
SPREAD = 0.8  # the typical size of what is personal, beside 1 for what is common
DELTA = 1e-4
HEADLINE = 1.0  # the ε that is trained through Flower's messages, with secret noise
OTHERS = (0.5, 2.0, 4.0)  # for the curve: the faster engine, with simulation noise
MEASURE = "accuracy"
CURVES = {"": "personal", SHARED: "shared alone", LOCAL: "own rows alone"}
PLACES = {"": COLOURS[0], SHARED: COLOURS[1], LOCAL: COLOURS[4]}

Measures = Mapping[str, float]


def people(seed: int = 1) -> dict[str, np.ndarray]:
    """Yes or no by sign(xᵀθ_i + noise), θ_i = what is common + what is this user's own.

    How much users differ from the common part is spread too: some hardly do, some very much.
    """
    source = np.random.default_rng(seed)
    common = source.normal(size=FEATURES) / math.sqrt(FEATURES)
    columns: dict[str, list[np.ndarray]] = {"user": [], "x": [], "y": [], "test": []}
    for user in range(USERS):
        training = int(source.integers(ROWS[0], ROWS[1] + 1))
        rows = training + TEST_ROWS
        size = SPREAD * math.exp(source.normal(0, 0.5)) / math.sqrt(FEATURES)
        own = common + size * source.normal(size=FEATURES)
        x = source.normal(size=(rows, FEATURES))
        y = x @ own + LABEL_NOISE * source.normal(size=rows) > 0
        columns["user"].append(np.full(rows, user))
        columns["x"].append(x)
        columns["y"].append(y.astype(int))
        columns["test"].append(np.arange(rows) >= training)
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def experiment(data: Path, epsilon: float) -> Experiment:
    """The same as ``ppsgd run --data people.npz --epsilon … --delta …``."""
    return Experiment.load(None, {"data": str(data), "epsilon": epsilon, "delta": DELTA})


def train(data: Path, epsilon: float) -> RunOutcome:
    """One training, with a bar."""
    chosen = experiment(data, epsilon)
    engine = run if epsilon == HEADLINE else run_as_cohort
    with progress_bar() as progress:
        hook = progress_hook(progress, f"ε = {epsilon:g}", chosen.training.rounds)
        return engine(chosen, hook)


def draw(found: Mapping[float, Measures], gains: Sequence[float], path: Path) -> None:
    """Accuracy against ε for the three models; how many users gain at the headline's ε."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    epsilons = sorted(found)
    for prefix, name in CURVES.items():
        values = [found[epsilon][prefix + MEASURE] for epsilon in epsilons]
        axes.plot(epsilons, values, "o-", lw=2, color=PLACES[prefix])
        axes.annotate(
            f" {name}",
            (epsilons[-1], values[-1]),
            (6, 0),
            textcoords="offset points",
            color=PLACES[prefix],
            va="center",
            weight="bold",
        )
    _axes(axes, epsilons)
    better = sum(gain > 0 for gain in gains)
    worse = sum(gain < 0 for gain in gains)
    axes.set_title(
        f"{USERS} people with {ROWS[0]} to {ROWS[1]} rows each\nat ε = {HEADLINE:g}, {better} are "
        f"better off than alone, {worse} worse off, {len(gains) - better - worse} the same",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


def _axes(axes: Axes, epsilons: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(epsilons[0] * 0.85, epsilons[-1] * 2.1)  # room for the names of the curves
    axes.set_xlabel(f"ε at δ = {DELTA:g}: smaller is more private")
    axes.set_ylabel("accuracy on users' own test rows")
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    warnings.simplefilter("error")
    logging.getLogger("flwr").setLevel(logging.WARNING)
    out = free_directory("demo")
    out.mkdir(parents=True)
    data = out / "people.npz"
    np.savez_compressed(data, **people())  # type: ignore[arg-type]  # savez's own flag
    outcomes = {epsilon: train(data, epsilon) for epsilon in sorted((HEADLINE, *OTHERS))}
    save(outcomes[HEADLINE], out / f"epsilon-{HEADLINE:g}")
    show(outcomes, data, Path(sys.argv[1]) if len(sys.argv) > 1 else out / "demo.png")


def show(outcomes: Mapping[float, RunOutcome], data: Path, picture: Path) -> None:
    """The promise, what users reach, and where the picture is."""
    found = {epsilon: outcome.rows[-1].measures for epsilon, outcome in outcomes.items()}
    headline = outcomes[HEADLINE]
    gains = [person.gain for person in headline.people if person.gain is not None]
    draw(found, gains, picture)
    promise = str(headline.privacy_data()["statement"]).splitlines()[0]
    epsilon = rounded_up(headline.rows[-1].deployed_epsilon)
    for line in (
        promise,
        results_line(found[HEADLINE], gains),
        f"The same for this file, or yours: ppsgd run --data {data} --epsilon {HEADLINE:g} "
        f"--delta {DELTA:g}",
        f"Picture: {picture}   epsilon = {epsilon}",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def results_line(measures: Mapping[str, float], gains: Sequence[float]) -> str:
    """The personal models beside those from own rows alone and beside w alone."""
    main = measure_of(measures)
    alone = f"own rows alone {measures[LOCAL + main]:.4g}"
    shared = f"shared model alone {measures[SHARED + main]:.4g}"
    better = sum(gain > SAME_MEASURE for gain in gains)
    worse = sum(gain < -SAME_MEASURE for gain in gains)
    return (
        f"Personal models: {main} {measures[main]:.4g} ({alone}, {shared}); better off than alone "
        f"{better}, worse off {worse}, of {len(gains)} users. {OUTSIDE}"
    )


if __name__ == "__main__":
    main()
