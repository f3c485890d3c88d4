"""Rows in, figures out. Nothing here trains."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogFormatter, MaxNLocator

from flwr_ppsgd.audit import LIMIT, Audit
from flwr_ppsgd.experiments.run import Outcome
from flwr_ppsgd.simulation.measures import HIGHER_IS_BETTER, measure_of

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: safe for colour blindness
ZERO_OUT = "zero-out neighbours"
STYLES = ("-", "--", "-.", ":")
MEASURE_NAMES = {
    "excess_risk": "excess risk (mean over users)",
    "accuracy": "accuracy",
    "precision_at_1": "precision@1",
    "rmse": "RMSE (mean over users)",
    "loss": "loss",
}


def learning_curves(
    curves: Mapping[str, Sequence[Mapping[str, float]]], measure: str, path: Path, title: str, footnote: str
) -> None:
    """A measure against rounds, one curve for each label, and ε of the noisiest-charged curve on a second axis."""
    figure, axes = plt.subplots(figsize=(7.2, 4.8), layout="constrained")
    for index, (label, rows) in enumerate(curves.items()):
        colour, style = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]
        marker = "o" if len(rows) < 3 else ""  # a single point has no line
        rounds, values = [r["round"] for r in rows], [r[measure] for r in rows]
        axes.plot(rounds, values, linestyle=style, marker=marker, color=colour, label=label, lw=2)
    axes.set(xlabel="round", ylabel=MEASURE_NAMES.get(measure, measure), title=title)
    if measure not in HIGHER_IS_BETTER:
        log_scale(axes)
    axes.grid(alpha=0.3, which="both", lw=0.5)
    if len(curves) > 1:
        axes.legend()
    epsilon_axis(axes, max(curves.values(), key=lambda rows: rows[-1]["epsilon"]))
    figure.supxlabel(footnote, fontsize=8, color="0.3", wrap=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


class _Plain(LogFormatter):
    """0.1 for 1e-01, at the same ticks."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def log_scale(axes: Axes) -> None:
    """A logarithmic ordinate with plain numbers."""
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)


def plain_numbers(axis: Axis) -> None:
    """0.1 and 100, not powers of ten, along a logarithmic axis."""
    axis.set_major_formatter(_Plain(labelOnlyBase=False))
    axis.set_minor_formatter(_Plain(labelOnlyBase=False, minor_thresholds=(2, 0.5)))


def draw_run(outcome: Outcome, directory: Path) -> None:
    """The picture of one run, where anything was measured."""
    if not outcome.rows:
        return
    measure = measure_of(outcome.rows[0])
    alpha = f"αQ = {outcome.experiment.alpha_q:g}"
    footnote = "Measured on the users' own data: outside the guarantee."
    title = f"Personalized-Private-SGD, {alpha}".replace("inf", "∞")
    learning_curves({alpha: outcome.rows}, measure, directory / "learning.png", title, footnote)


def audit_picture(found: Audit, path: Path) -> None:
    """What was released against what it should be: the noise's distribution, and each estimate in standard errors."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.2), layout="constrained")
    left.hist(found.residuals, bins=np.linspace(-5, 5, 81).tolist(), density=True, color=COLOURS[5], label="released")
    x = np.linspace(-5, 5, 401)
    left.plot(x, np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi), color=COLOURS[1], lw=2, label="normal density")
    left.set(xlabel="noise / its standard deviation", ylabel="density", yscale="log", ylim=(1e-5, 1))
    left.legend()
    estimates = found.estimates
    off = [(e.value - e.expected) / e.error if e.error else 0.0 for e in estimates.values()]
    right.axvspan(-LIMIT, LIMIT, color="0.9")
    right.errorbar(off, list(estimates), xerr=1.0, fmt="o", color=COLOURS[0], capsize=3)
    reach = max(8.0, *map(abs, off)) + 2
    right.set(
        xlabel=f"off by so many standard errors (grey: {LIMIT:g})",
        xlim=(-reach, reach),
    )
    right.invert_yaxis()
    z = found.noise_multiplier
    figure.suptitle(f"Audit: {found.verdict}. Noise multiplier {z.value:.4g} ± {z.error:.2g}, charged {z.expected:g}")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def epsilon_axis(axes: Axes, rows: Sequence[Mapping[str, float]], kind: str = ZERO_OUT) -> None:
    """Whole rounds along the bottom; along the top ε, evenly spaced back from the last round of which it is known."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    top = axes.secondary_xaxis("top")
    shown = rows[:: -max(1, math.ceil((len(rows) - 1) / 6))]
    top.set_xticks([row["round"] for row in shown], [_short(row["epsilon"]) for row in shown])
    top.set_xlabel(f"ε spent so far ({kind})", fontsize=8 if kind != ZERO_OUT else None)


def _short(epsilon: float) -> str:
    """Two digits or whole, in a few letters: seven of them stand side by side."""
    if math.isinf(epsilon):
        return "∞"
    return f"{epsilon:.2g}" if epsilon < 99.5 or epsilon >= 99_999.5 else f"{epsilon:.0f}"
