"""Look at a file before training: what is used, on which scales, what the trivial answers reach.

Everything here is read from users' rows. It is for the person who holds them: no ε covers it.
"""

import csv
import io
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.lab.data.features import LOOKED, is_encoded
from flwr_ppsgd.lab.data.per_user import PerUser
from flwr_ppsgd.lab.data.scaling import is_flag

SUSPICIOUS = 0.98  # share of the target's variance that one feature explains alone
ROWS_AT_ONCE = 1 << 14
FEWEST_ROWS = 20  # to suspect anything
MOST_LISTED = 40  # features
MOST_NAMED = 12
ID = re.compile(r"(^|[_\W])(id|ID|Id|code)$|[a-z]I[dD]$")
DIGITS = 2  # of the numbers in a file to review
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
TO_REVIEW = (
    "# Read from users' rows, so that using these numbers is not covered by any epsilon. Replace "
    "them by numbers that are public, then: --set standardise=THIS-FILE"
)


@dataclass(frozen=True)
class Trivial:
    """What can be had without features: the better of two is what a model has to beat.

    Args:
        measure: "rmse", "accuracy" or "precision_at_1".
        pooled: of everyone's mean target, or most frequent class or label.
        own: of the user's own.
    """

    measure: str
    pooled: float
    own: float

    def words(self) -> str:
        """Both, in a line."""
        what = "mean" if self.measure == "rmse" else "most frequent answer"
        return (
            f"without features: {self.measure} {self.pooled:.4g} with everyone's {what}, "
            f"{self.own:.4g} with each user's own"
        )


def trivial(data: PerUser) -> Trivial | None:
    """Trivial predictions of the training rows, measured on all test rows; None if there is none.

    RMSE is pooled over test rows.
    """
    if not data.test.any():
        return None
    pooled = _answer(data, np.flatnonzero(data.trained))
    of_pooled = []
    of_own = []
    for user in np.flatnonzero(data.test_sizes).tolist():
        rows = data.rows(user, test=True)
        of_pooled.append(_faults(data, rows, pooled))
        of_own.append(_faults(data, rows, _answer(data, data.rows(user, test=False))))
    means = [float(np.concatenate(found).mean()) for found in (of_pooled, of_own)]
    if data.task == "regression":
        return Trivial("rmse", math.sqrt(means[0]), math.sqrt(means[1]))
    measure = "accuracy" if data.task == "classification" else "precision_at_1"
    return Trivial(measure, 1 - means[0], 1 - means[1])


def _answer(data: PerUser, rows: NDArray[np.intp]) -> Any:
    """The mean target, or the most frequent class or label, of these rows."""
    if data.task == "regression":
        return data.amounts(rows).mean(axis=0)
    if data.task == "classification":
        return np.bincount(data.y[rows], minlength=data.outputs).argmax()
    return np.asarray(data.y[rows].sum(axis=0)).reshape(-1).argmax()


def _faults(data: PerUser, rows: NDArray[np.intp], answer: Any) -> NDArray[np.float64]:
    """The squared error of each row, or whether the answer is wrong."""
    if data.task == "regression":
        return np.asarray(((data.amounts(rows) - answer) ** 2).mean(axis=1))
    if data.task == "classification":
        return np.asarray(data.y[rows] != answer, dtype=np.float64)
    right = np.asarray(data.y[rows][:, [answer]].toarray()).reshape(-1)
    return 1.0 - right


def suspects(data: PerUser) -> list[str]:
    """Features that predict the target alone, as a leak would."""
    trained = np.flatnonzero(data.trained)
    if len(trained) < FEWEST_ROWS or data.task == "multi-label":
        return []
    shares = _explained(data, trained)
    found = np.flatnonzero(shares > SUSPICIOUS)
    return [data.column_name(column) for column in found.tolist()]


def _explained(data: PerUser, rows: NDArray[np.intp]) -> NDArray[np.float64]:
    """The share of variance that each feature has in common with the target.

    R² of a straight line for amounts; for classes the share of the feature's variance that lies
    between them. A column that is constant but for round-off has 0.
    """
    amounts = data.task == "regression"
    y = data.amounts(rows) if amounts else data.targets(rows)
    if amounts:
        y = y - y.mean(axis=0)
    sums = np.zeros(data.x.shape[1])
    squares = np.zeros(data.x.shape[1])
    products = np.zeros((data.x.shape[1], y.shape[1]))
    for start in range(0, len(rows), ROWS_AT_ONCE):
        x = data.x[rows[start : start + ROWS_AT_ONCE]].astype(np.float64)
        sums += np.asarray(x.sum(axis=0)).reshape(-1)
        squares += np.asarray((x * x).sum(axis=0)).reshape(-1)
        products += np.asarray(x.T @ y[start : start + ROWS_AT_ONCE])
    means = sums / len(rows)
    total = squares - len(rows) * means**2
    if amounts:
        common = (products**2 / np.maximum((y**2).sum(axis=0), 1e-300)).max(axis=1)
    else:
        counts = np.maximum(y.sum(axis=0), 1)
        common = (counts * (products / counts - means[:, None]) ** 2).sum(axis=1)
    varies = total > 1e-9 * len(rows) * (means**2 + 1e-300)
    return np.where(varies, common / np.where(varies, total, 1.0), 0.0)


def smoothness(data: PerUser) -> float:
    """L = 2·E‖x‖² of a linear model with squared loss on the training rows, w and θ together."""
    x, _, _ = data.part(test=False)
    if sparse.issparse(x):
        return float(2 * x.power(2).sum() / x.shape[0])
    return float(2 * np.einsum("nd,nd->", x, x) / len(x))


def numbers_for_plan(seen: PerUser) -> dict[str, float]:
    """What ``ppsgd plan`` takes from a file: N and d, and what was seen by looking."""
    return {
        "population": len(seen),
        "dimension": seen.features * seen.outputs,
        "samples-per-user": float(seen.train_sizes.mean()),
        "smoothness": smoothness(seen),
    }


def brief(seen: PerUser) -> list[str]:
    """The lines that a run or a sweep begins with."""
    found = trivial(seen)
    words = [] if found is None else [found.words()]
    return [_used(seen), *words, *hints(seen)]


def hints(seen: PerUser) -> list[str]:
    """What is probably not meant."""
    lines = []
    if len(seen) == 1:
        lines.append("there is one user: nobody to share a model with, and no crowd to hide in")
    if not seen.test.any():
        lines.append("there are no test rows: nothing can be measured (--test-fraction makes some)")
    ids = [name for name in seen.feature_names if ID.search(name) and not is_encoded(name)]
    if ids:
        lines.append(
            f"taken as numbers, but named like an id: {_named(ids)} (--categorical makes them "
            "one-hot, --exclude leaves them out)"
        )
    leaks = suspects(seen)
    if leaks:
        lines.append(
            f"suspected leak, predicts the target alone: {_named(leaks)} (--exclude leaves it out)"
        )
    return lines


def _used(data: PerUser) -> str:
    names = data.feature_names or tuple(f"x[{place}]" for place in range(data.x.shape[1]))
    numbers = [name for name in names if not is_encoded(name)]
    parts = [_named([repr(name) for name in numbers])] if numbers else []
    for group, count in _groups(names).items():
        parts.append(f"{group!r} in {count} columns")
    if data.bias:
        parts.append("a constant")
    return f"features: {', '.join(parts)}"


def _groups(names: Iterable[str]) -> dict[str, int]:
    """The number of columns of each one-hot or hashed column of the source."""
    found: dict[str, int] = {}
    for name in names:
        if is_encoded(name):
            group = name.replace("#", "=").partition("=")[0]
            found[group] = found.get(group, 0) + 1
    return found


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMED])
    return f"{shown}, … ({len(names):,} in all)" if len(names) > MOST_NAMED else shown


def report(raw: PerUser, seen: PerUser) -> str:
    """Everything there is to know before training, in lines.

    Args:
        raw: the rows as they are in the source.
        seen: as a model sees them.
    """
    sizes = raw.train_sizes
    spread = ", ".join(f"{value:g}" for value in np.quantile(sizes, QUANTILES))
    lines = [
        seen.describe(),
        f"training rows per user (least, quarter, half, three quarters, most): {spread}",
        *brief(seen),
        *_scales(raw),
        _step(seen),
        f"All of this was {LOOKED}; the numbers of users and of parameters are taken to be public.",
    ]
    return "\n".join(lines)


def _step(seen: PerUser) -> str:
    bound = smoothness(seen)
    return (
        f"{seen.features * seen.outputs:,} shared parameters; L = {bound:.3g} for squared loss, as "
        f"a model sees the rows: steps above {2 / bound:.2g} may diverge"
    )


def _scales(raw: PerUser) -> list[str]:
    """Least, mean, deviation and most of each column of numbers."""
    rows = []
    for name, values in itertools.islice(_columns(raw), MOST_LISTED):
        if is_flag(values):
            rows.append((name, "0 and 1", f"{values.mean():.3g}", "", ""))
        else:
            found = (values.min(), values.mean(), values.std(), values.max())
            least, mean, std, most = (f"{value:.4g}" for value in found)
            rows.append((name, least, mean, std, most))
    if not rows:
        return []
    lines = [("column", "least", "mean", "deviation", "most"), *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(5)]
    text = []
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        text.append("  ".join([line[0].ljust(widths[0]), *cells]).rstrip())
    more = raw.x.shape[1] - len(rows)
    if len(rows) == MOST_LISTED and more:
        text.append(f"… and {more:,} more columns")
    return text


def _columns(data: PerUser) -> Iterable[tuple[str, NDArray[np.float64]]]:
    """The name and the training values of each column of numbers."""
    trained = np.flatnonzero(data.trained)
    names = data.feature_names or tuple(f"x[{place}]" for place in range(data.x.shape[1]))
    for place, name in enumerate(names):
        if is_encoded(name) or (data.is_sparse and not data.feature_names):
            continue
        column = data.x[:, [place]].toarray()[:, 0] if data.is_sparse else data.x[:, place]
        yield name, np.asarray(column[trained], dtype=np.float64)


def write_review(raw: PerUser, path: Path) -> bool:
    """A file for ``standardise`` with rounded means and deviations, to be replaced by public ones.

    False if it was not written: no column has a name, or the file is there already.

    Args:
        raw: the rows as they are in the source.
        path: the file.
    """
    if not raw.feature_names or raw.is_sparse:
        return False
    statistics = {name: (values.mean(), values.std()) for name, values in _columns(raw)}
    text = io.StringIO(newline="")
    text.write(f"{TO_REVIEW}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("feature", "mean", "std"))
    for name in raw.feature_names:
        mean, std = statistics.get(name, (0.0, 1.0))
        writer.writerow((name, f"{mean:.{DIGITS}g}", f"{std or 1.0:.{DIGITS}g}"))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.getvalue())
    except FileExistsError:
        return False
    return True
