"""From a file's columns to a ``PerUser``: checked, detected and split alike for every format."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.checks import require
from flwr_ppsgd.data.per_user import Indices, PerUser, Table, Task
from flwr_ppsgd.learner import generator

MOST_CLASSES = 64  # if the numbers 0 … K−1 all occur
MOST_CLASSES_WITH_GAPS = 20


@dataclass(frozen=True)
class Split:
    """How each user's test part is chosen if no column marks it.

    Args:
        fraction: the share of a user's rows, rounded; for users with two or more rows at least one
            row and never all.
        seed: decides which rows, unless there is a time column: then they are the last ones.
    """

    fraction: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        rule = "the test fraction must be between 0 and 1"
        require(
            0 < self.fraction < 1,
            rule,
            self.fraction,
            "try 0.2",
        )

    def mask(self, offsets: Indices, time: NDArray[Any] | None) -> NDArray[np.bool_]:
        """The test rows of users whose rows are sorted by user."""
        bounds = offsets.tolist()
        test = np.zeros(bounds[-1], dtype=np.bool_)
        for user, start in enumerate(bounds[:-1]):
            stop = bounds[user + 1]
            n = stop - start
            wanted = max(1, round(self.fraction * n))
            count = min(wanted, n - 1)
            if time is None:
                order = generator("split", self.seed, user).permutation(n)
            else:
                order = np.argsort(time[start:stop], kind="stable")
            test[start + order[n - count :]] = True
        return test

    def words(self, by_time: bool) -> str:
        """How the test part was chosen, for people."""
        which = "last" if by_time else "randomly chosen"
        return f"test part: the {which} {self.fraction:.0%} of each user's rows"


class Targets(NamedTuple):
    """What was found in the target columns.

    Args:
        y: as in ``PerUser``.
        task: given or detected.
        outputs: K.
        names: of the outputs.
        notes: what was detected.
    """

    y: Table
    task: Task
    outputs: int
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Raw:
    """A file's columns, unchecked. The names are those that the file uses, for messages.

    Args:
        source: the file.
        user: each row's user.
        x: the features.
        y: the targets.
        test: marks the rows of the test part.
        time: of each row.
        split: how the test part is chosen if ``test`` is None.
        user_name: what the file calls ``user``.
        target_name: what it calls ``y``.
        test_name: what it calls ``test``.
        time_name: what it calls ``time``.
        feature_names: a name for each column of x, or none.
        target_names: a name for each output, or none.
        labels: the users' labels, if ``user`` holds numbers 0 … U−1 that stand for them.
        row_word: how a message counts rows: "row", or "line" below a header.
        first_row: the number of the first row in a message.
        notes: what a reader decided or left out.
    """

    source: str
    user: NDArray[Any]
    x: Table
    y: Table
    test: NDArray[Any] | None = None
    time: NDArray[Any] | None = None
    split: Split | None = None
    user_name: str = "user"
    target_name: str = "y"
    test_name: str = "test"
    time_name: str = "time"
    feature_names: tuple[str, ...] = ()
    target_names: tuple[str, ...] = ()
    labels: tuple[int | str, ...] = ()
    row_word: str = "row"
    first_row: int = 0
    notes: tuple[str, ...] = ()

    def refuse(
        self,
        what: str,
        remedy: str,
        row: int | None = None,
    ) -> ValueError:
        """An error in one line: the file, what is wrong, in which row, what to do."""
        where = ""
        if row is not None:
            where = f" in {self.row_word} {row + self.first_row}"
        return ValueError(f"{self.source}: {what}{where}: {remedy}")

    def assemble(self, task: Task | None = None, outputs: int | None = None) -> PerUser:
        """Checked, sorted by user, with a test part for each user.

        Args:
            task: what y stands for; None detects it.
            outputs: the least number of classes.
        """
        self._check_lengths()
        labels, number = self._users()
        self._check_features()
        targets = self._targets(task, outputs)
        order = np.argsort(number, kind="stable")
        everyone = np.arange(len(labels) + 1)
        offsets = np.searchsorted(number[order], everyone).astype(np.intp)
        test, test_notes = self._test(order, offsets)
        self._refuse_test_only(labels, offsets, test, order)
        x = self.x
        y = targets.y
        if (np.diff(number) < 0).any():
            x = x[order]
            y = y[order]
        gaps = _gap_notes(labels, self.user_name)
        return PerUser(
            source=self.source,
            x=x,
            y=y,
            test=test,
            offsets=offsets,
            users=self.labels or labels,
            task=targets.task,
            outputs=targets.outputs,
            feature_names=self.feature_names,
            target_names=targets.names,
            notes=(*self.notes, *targets.notes, *test_notes, *gaps),
        )

    def _check_lengths(self) -> None:
        if self.user.ndim != 1:
            raise self.refuse(
                f"{self.user_name!r} must have one value per row, got shape {self.user.shape}",
                "give one column",
            )
        rows = len(self.user)
        named = {
            "x": self.x,
            self.target_name: self.y,
            self.test_name: self.test,
            self.time_name: self.time,
        }
        for name, column in named.items():
            if column is not None and column.shape[:1] != (rows,):
                raise self.refuse(
                    f"{name!r} has shape {column.shape} and {self.user_name!r} has {rows} rows",
                    "they must be the same rows",
                )
        if not rows:
            raise self.refuse("there are no rows", "give at least one row for each user")
        if not self.x.shape[1]:
            raise self.refuse(
                "there is no numeric feature column beside user, target, test and time", "add one"
            )

    def _users(self) -> tuple[tuple[int | str, ...], Indices]:
        """The users' labels, sorted, and for each row the number of its user."""
        gap = _first_missing(self.user)
        if gap is not None:
            what = f"column {self.user_name!r} is empty"
            raise self.refuse(what, "every row needs its user", gap)
        user = self.user
        if user.dtype.kind == "f" and (user == np.rint(user)).all():
            user = user.astype(np.int64)
        if user.dtype.kind == "O":
            user = user.astype(str)
        labels, number = np.unique(user, return_inverse=True)
        return tuple(labels.tolist()), number.astype(np.intp)

    def _check_features(self) -> None:
        values = self.x.data if sparse.issparse(self.x) else self.x
        if values.dtype.kind in "biu":
            return
        if values.dtype.kind != "f":
            raise self.refuse(f"x has type {values.dtype}", "features must be real numbers")
        if np.isfinite(values).all():
            return
        row, column = self._first_infinite()
        name = f"x, feature {column},"
        if self.feature_names:
            name = f"column {self.feature_names[column]!r}"
        raise self.refuse(
            f"{name} is not a finite number", "fill it in, or leave the row or the column out", row
        )

    def _first_infinite(self) -> tuple[int, int]:
        """The row and the column of a feature that is not a finite number."""
        if sparse.issparse(self.x):
            entries = self.x.tocoo()
            place = np.flatnonzero(~np.isfinite(entries.data))[0]
            return int(entries.row[place]), int(entries.col[place])
        row, column = np.argwhere(~np.isfinite(self.x))[0]
        return int(row), int(column)

    def _targets(self, task: Task | None, outputs: int | None) -> Targets:
        if sparse.issparse(self.y):
            return Targets(
                self.y,
                "multi-label",
                int(self.y.shape[1]),
                self.target_names,
            )
        y, names = self._numbers(task)
        kind = task or detect(y)
        notes = () if task else (self._detected(y, kind),)
        if kind == "regression":
            width = 1 if y.ndim == 1 else y.shape[1]
            return Targets(y, kind, width, names, notes)
        if kind == "multi-label":
            return Targets(
                self._multi_hot(y),
                kind,
                y.shape[1],
                names,
                notes,
            )
        classes = self._classes(y, detected=task is None)
        count = max(outputs or 0, int(classes.max()) + 1, 2)
        return Targets(classes, kind, count, names, notes)

    def _numbers(self, task: Task | None) -> tuple[NDArray[Any], tuple[str, ...]]:
        """Targets as finite numbers, a single column without its second axis; their names."""
        y = self.y
        names = self.target_names
        column = f"column {self.target_name!r}"
        if y.dtype.kind in "OUSb" and task != "regression":
            y, names = self._coded(y)
        if y.dtype.kind not in "biuf":
            raise self.refuse(
                f"{column} has type {y.dtype}", "a target must be a number or a class"
            )
        rows = y.reshape(len(y), -1)
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            row = _first(~finite)
            raise self.refuse(f"{column} is not a finite number", "leave the row out", row)
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        return y, names

    def _detected(self, y: NDArray[Any], kind: Task) -> str:
        doubt = ""
        if kind == "regression" and _are_whole_floats(y):
            doubt = ", though all values are whole numbers: they may be classes"
        return f"detected from {self.target_name!r}: {kind}{doubt} (give the task to change it)"

    def _coded(self, y: NDArray[Any]) -> tuple[NDArray[Any], tuple[str, ...]]:
        """Classes that are words, numbered in sorted order."""
        gap = _first_missing(y.reshape(-1))
        if gap is not None:
            raise self.refuse(f"column {self.target_name!r} is empty", "leave the row out", gap)
        if y.ndim > 1:
            return y.astype(np.int64), self.target_names
        words, codes = np.unique(y.astype(str), return_inverse=True)
        return codes, tuple(words.tolist())

    def _multi_hot(self, y: NDArray[Any]) -> sparse.csr_array:
        if y.ndim != 2:
            raise self.refuse(
                f"{self.target_name!r} must have one column per label for multi-label targets",
                "or change the task",
            )
        rows, _ = np.nonzero(~np.isin(y, (0, 1)))
        if rows.size:
            what = f"{self.target_name!r} is neither 0 nor 1"
            raise self.refuse(what, "multi-label targets are 0 and 1", int(rows[0]))
        return sparse.csr_array(y.astype(np.float64))

    def _classes(self, y: NDArray[Any], detected: bool) -> NDArray[np.int64]:
        column = f"column {self.target_name!r}"
        if y.ndim > 1 or (y != np.rint(y)).any():
            raise self.refuse(f"{column} does not hold class numbers", "use --task regression")
        least = int(y.min())
        if least != 0:
            remedy = f"subtract {least}" if least > 0 else "number them 0, 1, 2, …"
            if detected:
                remedy += ", or use --task regression if they are amounts"
            raise self.refuse(
                f"class numbers in {column} must start at 0 and the least is {least},",
                remedy,
                int(np.argmin(y)),
            )
        return y.astype(np.int64)

    def _test(self, order: Indices, offsets: Indices) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
        """Which rows, sorted by user, are test rows; how they were chosen."""
        if self.test is None:
            return self._chosen(order, offsets)
        values = self.test
        if values.dtype.kind in "OU":
            flags = [_FLAGS.get(str(value).lower(), -1) for value in values.tolist()]
            values = np.array(flags)
        bad = ~np.isin(values, (0, 1))
        if bad.any():
            what = f"column {self.test_name!r} is neither 0 nor 1"
            raise self.refuse(what, "1 marks the rows of the test part", _first(bad))
        return values.astype(np.bool_)[order], ()

    def _chosen(
        self, order: Indices, offsets: Indices
    ) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
        split = self.split or Split()
        if self.time is None:
            return split.mask(offsets, None), (split.words(by_time=False),)
        gap = _first_missing(self.time)
        if gap is not None:
            what = f"column {self.time_name!r} is empty"
            raise self.refuse(what, "every row needs a time", gap)
        return split.mask(offsets, self.time[order]), (split.words(by_time=True),)

    def _refuse_test_only(
        self,
        labels: Sequence[int | str],
        offsets: Indices,
        test: NDArray[np.bool_],
        order: Indices,
    ) -> None:
        trained: Indices = np.add.reduceat(~test, offsets[:-1], dtype=np.intp)
        if trained.all():
            return
        user = int(np.argmin(trained))
        label = (self.labels or labels)[user]
        raise self.refuse(
            f"user {label!r} has test rows only, the first",
            "give that user a training row, or leave the user out",
            int(order[offsets[user]]),
        )


_FLAGS = {"test": 1, "train": 0, "true": 1, "false": 0, "1": 1, "0": 0}


def detect(y: NDArray[Any]) -> Task:
    """Real numbers are for regression; whole numbers are classes unless there are too many.

    Several columns are labels if all values are 0 and 1. Whole numbers that fill 0 … K−1 are
    classes up to K = 64. Others, which leave gaps or start elsewhere, are classes up to 20 values:
    beyond that they are amounts, such as points in an exam.
    """
    if y.ndim > 1:
        return "multi-label" if np.isin(y, (0, 1)).all() else "regression"
    if y.dtype.kind == "f":
        return "regression"
    values = np.unique(y)
    filled = values[0] == 0 and values[-1] == len(values) - 1
    most = MOST_CLASSES if filled else MOST_CLASSES_WITH_GAPS
    return "classification" if len(values) <= most else "regression"


def _are_whole_floats(y: NDArray[Any]) -> bool:
    """Whether whole numbers are stored as real numbers, in one column."""
    if y.ndim > 1 or y.dtype.kind != "f":
        return False
    return bool((y == np.rint(y)).all())


def _first(found: NDArray[np.bool_]) -> int:
    """The first place that is True."""
    return int(np.flatnonzero(found)[0])


def _first_missing(values: NDArray[Any]) -> int | None:
    for place, value in enumerate(values.tolist()):
        if _is_missing(value):
            return place
    return None


def _is_missing(value: object) -> bool:
    """None, NaN and blank text."""
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, str):
        return not value.strip()
    return value is None


def _gap_notes(labels: Sequence[int | str], name: str) -> tuple[str, ...]:
    """A note if users have numbers that are not 0 … U−1."""
    if isinstance(labels[0], str):
        return ()
    last = len(labels) - 1
    gap = _first_unused(labels)
    if gap > last:
        return ()
    return (
        f"ids in column {name!r} leave gaps (the first: {gap}): users are numbered 0 to {last} "
        "by id",
    )


def _first_unused(numbers: Iterable[int | str]) -> int:
    used = set(numbers)
    number = 0
    while number in used:
        number += 1
    return number
