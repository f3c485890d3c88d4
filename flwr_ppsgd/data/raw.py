"""From columns as a file has them to a ``PerUser``: checked, detected and split in the same way for every format."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.data.per_user import Indices, PerUser, Table, Task
from flwr_ppsgd.data.synthetic import generator


@dataclass(frozen=True)
class Split:
    """How each user's test part is chosen where no column tells.

    fraction: the share of a user's rows, rounded; at least one and never all, where the user has two or more.
    seed: decides which rows, unless there is a time column: then they are the last ones.
    """

    fraction: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise ValueError(f"the test fraction must be between 0 and 1, got {self.fraction}: try 0.2")

    def mask(self, offsets: Indices, time: NDArray[Any] | None) -> NDArray[np.bool_]:
        """The test rows of users whose rows are sorted by user."""
        test = np.zeros(int(offsets[-1]), dtype=np.bool_)
        for user, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            n = stop - start
            count = min(max(round(self.fraction * n), 1), n - 1)
            if time is None:
                order = generator("split", self.seed, user).permutation(n)
            else:
                order = np.argsort(time[start:stop], kind="stable")
            test[start + order[n - count :]] = True
        return test

    def words(self, by_time: bool) -> str:
        return f"test part: the {'last' if by_time else 'randomly chosen'} {self.fraction:.0%} of each user's rows"


@dataclass(frozen=True, eq=False)
class Raw:
    """A file's columns, unchecked. The names are those that the file uses, for messages.

    first_row, row_word: how a message counts rows: "row 0", or "line 2" below a header.
    split: None where ``test`` is given.
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
    labels: tuple[int | str, ...] = ()  # where ``user`` holds numbers 0 … U−1 that stand for these
    row_word: str = "row"
    first_row: int = 0
    notes: tuple[str, ...] = ()

    def refuse(self, what: str, remedy: str, row: int | None = None) -> ValueError:
        where = "" if row is None else f" in {self.row_word} {row + self.first_row}"
        return ValueError(f"{self.source}: {what}{where}: {remedy}")

    def assemble(self, task: Task | None = None, outputs: int | None = None) -> PerUser:
        """Checked, sorted by user, with a test part for each."""
        self._check_lengths()
        labels, number = self._users()
        self._check_features()
        y, kind, count, names, noted = self._targets(task, outputs)
        order = np.argsort(number, kind="stable")
        offsets = np.searchsorted(number[order], np.arange(len(labels) + 1)).astype(np.intp)
        test, test_note = self._test(order, offsets)
        in_order = bool((np.diff(number) >= 0).all())
        self._refuse_test_only(labels, offsets, test, order)
        return PerUser(
            source=self.source,
            x=self.x if in_order else self.x[order],
            y=y if in_order else y[order],
            test=test,
            offsets=offsets,
            users=self.labels or labels,
            task=kind,
            outputs=count,
            feature_names=self.feature_names,
            target_names=names,
            notes=(*self.notes, *noted, *test_note, *_skipped(labels, self.user_name)),
        )

    def _check_lengths(self) -> None:
        if self.user.ndim != 1:
            raise self.refuse(
                f"{self.user_name!r} must have one value a row, got shape {self.user.shape}", "give one column"
            )
        rows = len(self.user)
        named = {"x": self.x, self.target_name: self.y, self.test_name: self.test, self.time_name: self.time}
        for name, column in named.items():
            if column is not None and column.shape[:1] != (rows,):
                raise self.refuse(
                    f"{name!r} has shape {column.shape} and {self.user_name!r} has {rows} rows",
                    "they must be the same rows",
                )
        if not rows:
            raise self.refuse("there are no rows", "give at least one row for each user")
        if not self.x.shape[1]:
            raise self.refuse("there is no numeric feature column beside user, target, test and time", "add one")

    def _users(self) -> tuple[tuple[int | str, ...], Indices]:
        missing = np.array([_is_missing(value) for value in self.user.tolist()], dtype=np.bool_)
        if missing.any():
            raise self.refuse(
                f"column {self.user_name!r} is empty", "every row needs its user", int(np.flatnonzero(missing)[0])
            )
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
        if sparse.issparse(self.x):
            entries = self.x.tocoo()
            place = int(np.flatnonzero(~np.isfinite(entries.data))[0])
            row, column = int(entries.row[place]), int(entries.col[place])
        else:
            row, column = (int(index) for index in np.argwhere(~np.isfinite(values))[0])
        name = f"column {self.feature_names[column]!r}" if self.feature_names else f"x, feature {column},"
        raise self.refuse(f"{name} is not a finite number", "fill it in, or leave the row or the column out", row)

    def _targets(
        self, task: Task | None, outputs: int | None
    ) -> tuple[Table, Task, int, tuple[str, ...], tuple[str, ...]]:
        """(y, task, K, names of the outputs, notes)."""
        y, name = self.y, self.target_name
        if sparse.issparse(y):
            return y, "multi-label", int(y.shape[1]), self.target_names, ()
        names = self.target_names
        if y.dtype.kind in "OUSb" and task != "regression":
            y, names = self._coded(y)
        if y.dtype.kind not in "biuf":
            raise self.refuse(f"column {name!r} has type {y.dtype}", "a target must be a number or a class")
        if (bad := ~np.isfinite(y.reshape(len(y), -1)).all(axis=1)).any():
            raise self.refuse(
                f"column {name!r} is not a finite number", "leave the row out", int(np.flatnonzero(bad)[0])
            )
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        kind = task or detect(y)
        note = () if task else (f"detected from {name!r}: {kind}{_doubt(y, kind)} (give the task to change it)",)
        if kind == "regression":
            return y, kind, 1 if y.ndim == 1 else y.shape[1], names, note
        if kind == "multi-label":
            return self._multi_hot(y), kind, y.shape[1], names, note
        y = self._classes(y, detected=task is None)
        return y, kind, max(outputs or 0, int(y.max()) + 1, 2), names, note

    def _coded(self, y: NDArray[Any]) -> tuple[NDArray[Any], tuple[str, ...]]:
        """Classes that are words, numbered in sorted order."""
        missing = np.array([_is_missing(value) for value in y.reshape(-1).tolist()], dtype=np.bool_)
        if missing.any():
            row = int(np.flatnonzero(missing)[0])
            raise self.refuse(f"column {self.target_name!r} is empty", "leave the row out", row)
        if y.ndim > 1:
            return y.astype(np.int64), self.target_names
        words, codes = np.unique(y.astype(str), return_inverse=True)
        return codes, tuple(words.tolist())

    def _multi_hot(self, y: NDArray[Any]) -> sparse.csr_array:
        if y.ndim != 2:
            raise self.refuse(
                f"{self.target_name!r} must have one column a label for multi-label targets", "or change the task"
            )
        if (bad := ~np.isin(y, (0, 1)).all(axis=1)).any():
            row = int(np.flatnonzero(bad)[0])
            raise self.refuse(f"{self.target_name!r} is neither 0 nor 1", "multi-label targets are 0 and 1", row)
        return sparse.csr_array(y.astype(np.float64))

    def _classes(self, y: NDArray[Any], detected: bool) -> NDArray[np.int64]:
        if y.ndim > 1 or (y != np.rint(y)).any():
            raise self.refuse(f"column {self.target_name!r} does not hold class numbers", "use --task regression")
        least = int(y.min())
        if least != 0:
            remedy = f"subtract {least}" if least > 0 else "number them 0, 1, 2, …"
            other = ", or use --task regression if they are amounts" if detected else ""
            raise self.refuse(
                f"class numbers in column {self.target_name!r} must start at 0 and the least is {least},",
                f"{remedy}{other}",
                int(np.argmin(y)),
            )
        return y.astype(np.int64)

    def _test(self, order: Indices, offsets: Indices) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
        if self.test is None:
            split, time = self.split or Split(), self.time
            if time is not None and (late := np.array([_is_missing(value) for value in time.tolist()])).any():
                raise self.refuse(
                    f"column {self.time_name!r} is empty", "every row needs a time", int(np.flatnonzero(late)[0])
                )
            mask = split.mask(offsets, None if time is None else time[order])
            return mask, (split.words(time is not None),)
        values = self.test
        if values.dtype.kind in "OU":
            values = np.array([_FLAGS.get(str(value).lower(), -1) for value in values.tolist()])
        if (bad := ~np.isin(values, (0, 1))).any():
            row = int(np.flatnonzero(bad)[0])
            raise self.refuse(f"column {self.test_name!r} is neither 0 nor 1", "1 marks the rows of the test part", row)
        return values.astype(np.bool_)[order], ()

    def _refuse_test_only(
        self, labels: Sequence[int | str], offsets: Indices, test: NDArray[np.bool_], order: Indices
    ) -> None:
        trained = np.add.reduceat(~test, offsets[:-1], dtype=np.intp)
        if trained.all():
            return
        user = int(np.flatnonzero(trained == 0)[0])
        label = (self.labels or labels)[user]
        raise self.refuse(
            f"user {label!r} has test rows only, the first",
            "give that user a training row, or leave the user out",
            int(order[offsets[user]]),
        )


_FLAGS = {"test": 1, "train": 0, "true": 1, "false": 0, "1": 1, "0": 0}


def detect(y: NDArray[Any]) -> Task:
    """Real numbers are for regression, whole numbers are classes unless there are too many of them.

    Several columns: labels where all are 0 and 1. Whole numbers that fill 0 … K−1 are classes up to K = 64; others,
    which leave gaps or start elsewhere, up to 20 values: beyond that they are amounts, such as points in an exam.
    """
    if y.ndim > 1:
        return "multi-label" if np.isin(y, (0, 1)).all() else "regression"
    if y.dtype.kind == "f":
        return "regression"
    values = np.unique(y)
    filled = values[0] == 0 and values[-1] == len(values) - 1
    return "classification" if len(values) <= (64 if filled else 20) else "regression"


def _doubt(y: NDArray[Any], kind: Task) -> str:
    if kind != "regression" or y.ndim > 1 or y.dtype.kind != "f" or (y != np.rint(y)).any():
        return ""
    return ", though all values are whole numbers: they may be classes"


def _is_missing(value: object) -> bool:
    """None, NaN and blank text."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())


def _skipped(labels: Sequence[int | str], name: str) -> tuple[str, ...]:
    if isinstance(labels[0], str) or list(labels) == list(range(len(labels))):
        return ()
    present = set(labels)
    gap = next(number for number in range(len(labels) + 1) if number not in present)
    return (f"ids in column {name!r} leave gaps (the first: {gap}): users are numbered 0 to {len(labels) - 1} by id",)
