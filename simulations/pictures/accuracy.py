"""Accuracy against ε: the recipe beside the paper's method, its ends and two baselines.

    python simulations/pictures/accuracy.py --data mnist_writer.npz --out docs

accuracy.png, and the numbers behind it in accuracy.csv. Everything but the recipe is chosen on a
validation part of the users' training rows; test rows are opened once. The sweep of the paper's
method takes half an hour: ``--paper FILE.csv`` takes its rows from an earlier accuracy.csv instead.
"""

import argparse
import csv
import logging
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that this runs as a file, too

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from flwr_ppsgd.lab.experiment import Experiment
from flwr_ppsgd.lab.figures import COLOURS
from flwr_ppsgd.lab.measures import as_test_measure, measure_of, name_of_measure
from flwr_ppsgd.lab.outputs import read_rows
from flwr_ppsgd.lab.run import RunOutcome, run_as_cohort
from flwr_ppsgd.lab.screen import progress_bar, sweep_hook
from flwr_ppsgd.lab.summary import EPSILON, summarise
from flwr_ppsgd.lab.sweep import Sweep
from flwr_ppsgd.lab.workers import run_sweep
from flwr_ppsgd.learner import LOCAL, SHARED

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
DELTA = 1e-4
RECIPE = "auto on random convolutions, nothing tuned"
ALONE = "own rows alone, the same features"
SHARED_ALONE = "shared model alone, the same features"
PIXELS = "auto on pixels"
PAPER = "the paper's method on pixels, tuned"
TUNED = "global, then fine-tuned, on pixels, tuned"
FEDAVG = "FedAvg, then solved, on pixels, tuned"
SWEPT = {PAPER: "", TUNED: "fine-tuned", FEDAVG: "fedavg-solved"}
Points = dict[float, list[float]]  # by ε, one number per seed


def recipe_runs(data: str, seeds: int, representation: str) -> dict[float, list[RunOutcome]]:
    """The recipe at every ε."""
    runs: dict[float, list[RunOutcome]] = {}
    for epsilon in EPSILONS:
        for seed in range(1, seeds + 1):
            changes = {
                "data": data,
                "epsilon": epsilon,
                "delta": DELTA,
                "representation": representation,
                "insecure-seed": seed,
            }
            outcome = run_as_cohort(Experiment.load(None, changes))
            runs.setdefault(epsilon, []).append(outcome)
            found = dict(outcome.rows[-1].measures)
            print(f"{representation}, epsilon {epsilon:g}, seed {seed}: {found}", flush=True)
    return runs


def paper_points(data: str, seeds: int) -> dict[str, Points]:
    """The best of a grid at every ε, chosen on validation rows and measured on test rows."""
    changes = {
        "data": data,
        "users": 100_000,
        "clip-norm": 1.0,
        "epsilon": list(EPSILONS),
        "delta": DELTA,
        "step": [0.0002, 0.0005, 0.002, 0.005, 0.01],
        "alpha-q": [0.0, 0.03, 0.1, 0.3, float("inf")],
        "insecure-seed": list(range(1, seeds + 1)),
        "evaluations": 1,
        "select-on": "validation",
        "baselines": "fine-tuned, fedavg-solved",
        "fine-tune-steps": "0.001, 0.002, 0.005, 0.01",
    }
    sweep = Sweep.load(Path("figure-1c-poisson"), changes)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "sweep"
        with progress_bar("setting-rounds") as progress:
            run_sweep(sweep, out, sweep_hook(progress))
        summary = summarise(read_rows(out))
    found: dict[str, Points] = {name: {} for name in SWEPT}
    table = summary.table[summary.table["noise-multiplier"] > 0].sort_values(EPSILON)
    for row, epsilon in zip(table.to_dict("records"), EPSILONS, strict=True):
        found[PAPER][epsilon] = [row[as_test_measure(summary.measure)]]
        for name in (TUNED, FEDAVG):
            if SWEPT[name] in row:
                found[name][epsilon] = [row[SWEPT[name]]]
    return found


def points_in(path: Path) -> dict[str, Points]:
    """The rows of the paper's method and its baselines in an earlier accuracy.csv."""
    found: dict[str, Points] = {name: {} for name in SWEPT}
    with path.open(encoding="utf-8", newline="") as file:
        for method, epsilon, value in list(csv.reader(file))[1:]:
            if method in found:
                found[method].setdefault(float(epsilon), []).append(float(value))
    return found


def recipe_points(runs: Mapping[float, Sequence[RunOutcome]]) -> dict[str, Points]:
    """What the runs of the recipe measured, and both of its ends."""
    found: dict[str, Points] = {RECIPE: {}, ALONE: {}, SHARED_ALONE: {}}
    for epsilon, outcomes in runs.items():
        measures = [outcome.rows[-1].measures for outcome in outcomes]
        main = measure_of(measures[0])
        found[RECIPE][epsilon] = [row[main] for row in measures]
        found[ALONE][epsilon] = [row[LOCAL + main] for row in measures]
        found[SHARED_ALONE][epsilon] = [row[SHARED + main] for row in measures]
    return found


def draw_accuracy(found: Mapping[str, Points], main: str, out: Path) -> None:
    """A line for each method."""
    figure, axes = plt.subplots(figsize=(7.6, 5.0), layout="constrained")
    for place, (method, points) in enumerate(found.items()):
        if not points:
            continue
        means = [statistics.fmean(points[epsilon]) for epsilon in EPSILONS]
        bold = 2.8 if method == RECIPE else 1.6
        axes.plot(
            EPSILONS,
            means,
            marker="o",
            lw=bold,
            color=COLOURS[place],
            ls="--" if method == ALONE else "-",
            label=method,
        )
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.minorticks_off()
    axes.set_xlabel(f"ε at δ = {DELTA:g} (zero-out neighbours)")
    axes.set_ylabel(f"{name_of_measure(main)} on test rows")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    _save(figure, out / "accuracy.png")
    rows = [
        [method, epsilon, f"{value:.5f}"]
        for method, points in found.items()
        for epsilon, values in points.items()
        for value in values
    ]
    _write(out / "accuracy.csv", ["method", "epsilon", main], rows)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"Picture: {path}")


def _write(path: Path, names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", required=True, help="a file of classes by user")
    parser.add_argument("--out", type=Path, default=Path(), help="where the picture goes")
    parser.add_argument("--seeds", type=int, default=3, help="of the recipe")
    parser.add_argument("--paper-seeds", type=int, default=1, help="of the grid")
    parser.add_argument("--paper", type=Path, help="an earlier accuracy.csv with its rows")
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    given.out.mkdir(parents=True, exist_ok=True)
    runs = recipe_runs(given.data, given.seeds, "random-convolution")
    found = recipe_points(runs)
    found[PIXELS] = recipe_points(recipe_runs(given.data, given.seeds, "none"))[RECIPE]
    if given.paper is None:
        found |= paper_points(given.data, given.paper_seeds)
    else:
        found |= points_in(given.paper)
    measure = measure_of(runs[EPSILONS[0]][0].rows[-1].measures)
    draw_accuracy(found, measure, given.out)


if __name__ == "__main__":
    main()
