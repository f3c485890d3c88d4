"""What figures share: colours, names of measures, axes."""

import math
import textwrap
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogFormatter, MaxNLocator

from flwr_ppsgd.lab.measures import HIGHER_IS_BETTER, on_test
from flwr_ppsgd.lab.results.summary import ZERO_OUT
from flwr_ppsgd.statement import rounded_up

# Okabe and Ito, then Tol: safe for colour blindness
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#882255", "#999933", "#332288", "#44AA99"),
)
STYLES = ("-", "--", "-.", ":")
MEASURE_NAMES = {
    "excess_risk": "excess risk (mean over users)",
    "accuracy": "accuracy",
    "precision_at_1": "precision@1",
    "rmse": "RMSE (all rows together)",
    "loss": "loss",
}
MOST_TICKS = 6
SMALL_LETTERS = 8
LETTERS = 64  # in a line below or above a panel that stands alone
LETTERS_OF_A_PANEL = 60  # the same for small letters and several panels side by side


class _Plain(LogFormatter):
    """0.1 for 1e-01, at the same ticks."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def name_of_measure(measure: str) -> str:
    """A measure in words."""
    tested = on_test(measure)
    name = MEASURE_NAMES.get(tested, tested)
    return name if tested == measure else f"{name}, validation rows"


def log_scale(axes: Axes) -> None:
    """A logarithmic ordinate with plain numbers."""
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)


def plain_numbers(axis: Axis) -> None:
    """0.1 and 100, not powers of ten, along a logarithmic axis."""
    axis.set_major_formatter(_Plain(labelOnlyBase=False))
    axis.set_minor_formatter(_Plain(labelOnlyBase=False, minor_thresholds=(2, 0.5)))


def measure_axis(axes: Axes, measure: str) -> None:
    """A logarithmic ordinate for errors and risks, and a grid."""
    if on_test(measure) not in HIGHER_IS_BETTER:
        log_scale(axes)
    axes.grid(alpha=0.3, which="both", lw=0.5)


def epsilon_axis(
    axes: Axes,
    rounds: Sequence[int],
    epsilons: Sequence[float],
    kind: str = ZERO_OUT,
    *,
    guaranteed: bool = False,
    small: bool = False,
) -> None:
    """Whole rounds along the bottom, ε along the top.

    ε is evenly spaced, back from the last round for which it is known.

    Args:
        axes: where curves by round are drawn.
        rounds: the reported rounds.
        epsilons: what each of them costs.
        kind: which ε is meant.
        guaranteed: whether it is a guarantee, rather than what a deployment would cost.
        small: several panels stand side by side.
    """
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    top = axes.secondary_xaxis("top")
    intervals = len(rounds) - 1
    apart = max(1, math.ceil(intervals / MOST_TICKS))
    labels = [_short(epsilon) for epsilon in epsilons]
    top.set_xticks(rounds[::-apart], labels[::-apart])
    size = None if kind == ZERO_OUT and not small else SMALL_LETTERS
    what = "ε spent so far" if guaranteed else "ε that a deployment would have spent"
    label = f"{what} ({kind})"
    top.set_xlabel(textwrap.fill(label, LETTERS_OF_A_PANEL if small else LETTERS), fontsize=size)


def _short(epsilon: float) -> str:
    """Two digits or whole, rounded up, in a few letters: seven of them stand side by side."""
    if math.isinf(epsilon):
        return "∞"
    if 99 < epsilon <= 99_999:
        return f"{math.ceil(epsilon)}"
    return rounded_up(epsilon, digits=2)
