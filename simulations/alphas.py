"""Which αQ was best on real data: the measure at the end of sweeps against αQ, for each ε.

    python simulations/alphas.py OUT.png "TITLE=DIR[,DIR…]" …

A panel for each title; several sweeps of the same data are taken together.
"""

import math
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that this runs as a file, too

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flwr_ppsgd.experiments.outputs import read_rows
from flwr_ppsgd.experiments.sweep import Row
from flwr_ppsgd.results.figures import Mean, alphas, best_curves, means, noises
from flwr_ppsgd.results.plots import COLOURS, MEASURE_NAMES, STYLES
from flwr_ppsgd.simulation.measures import measure_of


def final(directories: Iterable[Path]) -> tuple[str, list[Mean]]:
    """The measure, and its mean over seeds at the end of each setting."""
    rows = {tuple(sorted((k, str(v)) for k, v in row.items())): row for d in directories for row in read_rows(d)}
    last = max(row["round"] for row in rows.values())
    ended = [_rounded(row) for row in rows.values() if row["round"] == last and not row.get("diverged")]
    measure = measure_of(ended[0])
    return measure, means(ended, measure)


def _rounded(row: Row) -> Row:
    """Noise that was calibrated for the same ε differs in the last digits from sweep to sweep."""
    z = row["noise-multiplier"]
    return row if z is None else {**row, "noise-multiplier": float(f"{z:.3g}")}


def panel(axes: Axes, title: str, directories: Iterable[Path]) -> None:
    measure, every = final(directories)
    curves = best_curves(every, measure)
    values = alphas(curves)
    for place, z in enumerate(noises(curves)):
        ends = {values.index(a): curve[-1] for (a, level), curve in curves.items() if level in (z, None)}
        at, found = sorted(ends), [ends[one] for one in sorted(ends)]
        spent = max(mean.epsilon for mean in found)
        axes.errorbar(
            at, [mean.value for mean in found], [mean.error or 0.0 for mean in found], marker="o", ms=4, capsize=2,
            color=COLOURS[place % len(COLOURS)], ls=STYLES[place % len(STYLES)],
            label="no noise" if math.isinf(spent) else f"ε = {spent:.2g}",
        )  # fmt: skip
    axes.set_xticks(range(len(values)), ["∞" if math.isinf(a) else f"{a:g}" for a in values])
    axes.set(xlabel="αQ   (0 is local, ∞ is global learning)", ylabel=MEASURE_NAMES.get(measure, measure))
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3, lw=0.5)
    axes.legend(fontsize=8)


def main(out: str, *panels: str) -> None:
    figure = Figure(figsize=(4.8 * len(panels), 3.8), layout="constrained")
    for axes, text in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        title, _, directories = text.rpartition("=")
        panel(axes, title, map(Path, directories.split(",")))
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
