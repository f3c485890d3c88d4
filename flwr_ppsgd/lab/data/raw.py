"""From a file's columns to a ``PerUser``: checked, detected and split alike for every format."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.lab.data.per_user import PerUser, Table, Task
from flwr_ppsgd.lab.data.split import Indices, Split

MOST_CLASSES = 64  # if the numbers 0 … K−1 all occur
MOST_CLASSES_WITH_GAPS = 20
MOST_SHOWN = 3  # labels that a note names
# what stands for a feature that is missing or not finite
REFUSE = "refuse"
DROP = "drop"
ZERO = "zero"
OWN_MEAN = "own-mean"
IMPUTE = {
    REFUSE: "the file is refused",
    DROP: "rows with gaps are left out",
    ZERO: "0",
    OWN_MEAN: "the mean of the user's own training rows; 0 if there is none",
}


@dataclass(frozen=True)
class Origin:
    """A file, and how messages count its rows.

    Args:
        source: the file.
        row_word: "row", or "line" below a header.
        first_row: the number of the first row in a message.
    """

    source: str
    row_word: str = "row"
    first_row: int = 0

    def at(self, row: int) -> str:
        """Where a row is."""
        return f" in {self.row_word} {row + self.first_row}"

    def refuse(self, what: str, remedy: str, row: int | None = None) -> ValueError:
        """An error in one line: the file, what is wrong, in which row, what to do."""
        where = "" if row is None else self.at(row)
        return ValueError(f"{self.source}: {what}{where}: {remedy}")


class Numbered(NamedTuple):
    """Values that stand for users or classes.

    Args:
        labels: each one once, sorted.
        places: for each value, the number of its label.
        notes: what was written in more than one way.
    """

    labels: tuple[int | str, ...]
    places: Indices
    notes: tuple[str, ...]


def numbered(values: Sequence[Any], what: str) -> Numbered:
    """Labels for different values: 1, "1" and "1.0" are one, and so are "a" and " a".

    They are numbers if all of them are whole numbers without leading zeros.

    Args:
        values: the values, each once.
        what: what they are, for notes.
    """
    texts = [canonical(value) for value in values]
    labels: list[int | str] = sorted(set(texts))
    if all(is_plain_number(text) for text in texts):
        labels = sorted(int(text) for text in set(texts))
    place_of = {str(label): place for place, label in enumerate(labels)}
    places = np.array([place_of[text] for text in texts], dtype=np.intp)
    notes = _spelling_notes(values, texts, what)
    return Numbered(tuple(labels), places, notes)


def canonical(value: Any) -> str:
    """A label as text: 1 for 1.0 and "1.0", without spaces around it."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    return re.sub(r"^(-?[1-9][0-9]*|0)\.0+$", r"\1", text)


def is_plain_number(text: str) -> bool:
    """Whether a text is a whole number as it is usually written."""
    return re.fullmatch(r"-?[1-9][0-9]*|0", text) is not None


def _spelling_notes(values: Sequence[Any], texts: Sequence[str], what: str) -> tuple[str, ...]:
    """Which values are taken to be one, and which differ by upper and lower case alone."""
    notes = []
    same = _groups(texts, [str(value) for value in values])
    if same:
        notes.append(f"{what} that are written in several ways are taken as one: {same}")
    cases = _groups([text.casefold() for text in texts], texts)
    if cases:
        notes.append(f"{what} that differ by upper and lower case alone stay apart: {cases}")
    return tuple(notes)


def _groups(keys: Sequence[str], shown: Sequence[str]) -> str:
    """The first few groups of different texts that have the same key; empty if there is none."""
    found: dict[str, set[str]] = {}
    for key, text in zip(keys, shown, strict=True):
        found.setdefault(key, set()).add(text)
    several = [sorted(group) for group in found.values() if len(group) > 1]
    words = [" and ".join(repr(text) for text in group) for group in several[:MOST_SHOWN]]
    if len(several) > MOST_SHOWN:
        words.append(f"and {len(several) - MOST_SHOWN:,} more")
    return ", ".join(words)


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
        row_word: how a message counts rows, as of ``Origin``.
        first_row: the same.
        impute: a rule of ``IMPUTE``.
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
    impute: str = REFUSE
    notes: tuple[str, ...] = ()

    def refuse(
        self,
        what: str,
        remedy: str,
        row: int | None = None,
    ) -> ValueError:
        """An error in one line: the file, what is wrong, in which row, what to do."""
        origin = Origin(self.source, self.row_word, self.first_row)
        return origin.refuse(what, remedy, row)

    def assemble(self, task: Task | None = None, outputs: int | None = None) -> PerUser:
        """Checked, sorted by user, with a test part for each user.

        Args:
            task: what y stands for; None detects it.
            outputs: the least number of classes.
        """
        self._check_lengths()
        gaps = self._gaps()
        if gaps.any() and self.impute == DROP:
            return self._without(gaps).assemble(task, outputs)
        labels, number, user_notes = self._users()
        targets = self._targets(task, outputs)
        order = self._order(number)
        everyone = np.arange(len(labels) + 1)
        offsets = np.searchsorted(number[order], everyone).astype(np.intp)
        test, test_notes = self._test(order, offsets)
        self._refuse_test_only(labels, offsets, test, order)
        x = self.x
        y = targets.y
        if (np.diff(order) != 1).any():
            x = x[order]
            y = y[order]
        if gaps.any():
            x = self._filled(x, number[order], ~test)
        notes = (
            *self.notes,
            *self._filled_notes(gaps),
            *user_notes,
            *targets.notes,
            *test_notes,
            *_gap_notes(self.labels or labels, self.user_name),
        )
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
            notes=tuple(dict.fromkeys(notes)),
            by_time=self.time is not None,
        )

    def _order(self, number: Indices) -> Indices:
        """Rows by user; each user's rows by time if there is one, else as in the source."""
        if self.time is None:
            return np.argsort(number, kind="stable")
        gap = _first_missing(self.time)
        if gap is not None:
            what = f"column {self.time_name!r} is empty"
            raise self.refuse(what, "every row needs a time", gap)
        return np.lexsort((self.time, number))

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
            left_out = [note for note in self.notes if note.startswith("left out")]
            what = "there is no numeric feature column beside user, target, test and time"
            raise self.refuse("; ".join([what, *left_out]), "add one")

    def _users(self) -> tuple[tuple[int | str, ...], Indices, tuple[str, ...]]:
        """The users' labels, sorted; for each row the number of its user; notes."""
        gap = _first_missing(self.user)
        if gap is not None:
            what = f"column {self.user_name!r} is empty"
            raise self.refuse(what, "every row needs its user", gap)
        user = self.user
        if user.dtype.kind == "O":
            user = user.astype(str)
        values, number = np.unique(user, return_inverse=True)
        found = numbered(values.tolist(), f"users in column {self.user_name!r}")
        return found.labels, found.places[number], found.notes

    def _gaps(self) -> NDArray[np.bool_]:
        """Which rows have a feature that is missing or not finite; refused if that is the rule."""
        values = self.x.data if sparse.issparse(self.x) else self.x
        none = np.zeros(len(self.user), dtype=np.bool_)
        if values.dtype.kind in "biu":
            return none
        if values.dtype.kind != "f":
            raise self.refuse(f"x has type {values.dtype}", "features must be real numbers")
        if all_finite(values):
            return none
        if self.impute == REFUSE:
            raise self._refused_gap()
        if sparse.issparse(self.x):
            bad = ~np.isfinite(self.x.data)
            none[np.repeat(np.arange(len(none)), np.diff(self.x.indptr))[bad]] = True
            return none
        return np.asarray(~np.isfinite(self.x).all(axis=1))

    def _refused_gap(self) -> ValueError:
        row, column = self._first_infinite()
        name = f"x, feature {column},"
        exclude = ""
        if self.feature_names:
            name = f"column {self.feature_names[column]!r}"
            exclude = f", or --exclude {self.feature_names[column]}"
        rules = ", ".join(rule for rule in IMPUTE if rule != REFUSE)
        return self.refuse(
            f"{name} is not a finite number", f"add --impute with one of {rules}{exclude}", row
        )

    def _without(self, gaps: NDArray[np.bool_]) -> "Raw":
        """Without these rows."""
        kept = np.flatnonzero(~gaps)
        if not len(kept):
            raise self.refuse("every row has a gap", "use --impute zero or own-mean, or --exclude")
        users, number = np.unique(self.user[kept], return_inverse=True)
        labels = tuple(self.labels[int(user)] for user in users) if self.labels else ()
        note = f"left out {int(gaps.sum()):,} rows with gaps (impute = drop)"
        return replace(
            self,
            user=number if labels else self.user[kept],
            labels=labels,
            x=self.x[kept],
            y=self.y[kept],
            test=None if self.test is None else self.test[kept],
            time=None if self.time is None else self.time[kept],
            notes=(*self.notes, note),
        )

    def _filled(self, x: Table, number: Indices, trained: NDArray[np.bool_]) -> Table:
        """x, sorted by user, with gaps filled in.

        Args:
            x: sorted by user.
            number: the user of each row.
            trained: which rows are training rows.
        """
        if sparse.issparse(x):
            x = x.copy()
            x.data[~np.isfinite(x.data)] = 0.0
            return x
        rows, columns = np.nonzero(~np.isfinite(x))
        x[rows, columns] = np.nan
        if self.impute == ZERO:
            x[rows, columns] = 0.0
            return x
        for column in np.unique(columns).tolist():
            own = np.where(trained, x[:, column], np.nan)
            means = _means(own, number)
            here = rows[columns == column]
            x[here, column] = means[number[here]]
        return x

    def _filled_notes(self, gaps: NDArray[np.bool_]) -> tuple[str, ...]:
        if not gaps.any():
            return ()
        rule = IMPUTE[ZERO if sparse.issparse(self.x) else self.impute]
        return (f"{int(gaps.sum()):,} rows have gaps, filled with: {rule}",)

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
        y, names, spelling = self._numbers(task)
        words = self.y.dtype.kind in "OUSb" and y.ndim == 1
        kind: Task = task or ("classification" if words else detect(y))
        notes = spelling if task else (*spelling, self._detected(y, kind, words))
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
        classes, renamed = self._classes(y)
        count = max(outputs or 0, int(classes.max()) + 1, 2)
        if renamed:
            notes = (*notes, f"classes are {', '.join(renamed[:9])}{', …' * (len(renamed) > 9)}")
        return Targets(classes, kind, count, renamed or names, notes)

    def _numbers(self, task: Task | None) -> tuple[NDArray[Any], tuple[str, ...], tuple[str, ...]]:
        """Targets as finite numbers, a single column without its second axis; names; notes."""
        y = self.y
        names = self.target_names
        notes: tuple[str, ...] = ()
        column = f"column {self.target_name!r}"
        if y.dtype.kind in "OUSb" and task != "regression":
            y, names, notes = self._coded(y)
        if y.dtype.kind not in "biuf":
            row = _first_word(y)
            shown = y.reshape(-1)[row]
            raise self.refuse(
                f"{column} is not a number ({shown!r})",
                "leave out --task regression if it is a class, or name another --target",
                row,
            )
        rows = y.reshape(len(y), -1)
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            row = _first(~finite)
            raise self.refuse(f"{column} is not a finite number", "leave the row out", row)
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        return y, names, notes

    def _detected(self, y: NDArray[Any], kind: Task, words: bool) -> str:
        doubt = f", since {_reason(y, kind, words)}"
        if kind == "regression" and _are_whole_floats(y):
            doubt += ", though all values are whole numbers: they may be classes"
        return f"detected from {self.target_name!r}: {kind}{doubt} (--task changes it)"

    def _coded(self, y: NDArray[Any]) -> tuple[NDArray[Any], tuple[str, ...], tuple[str, ...]]:
        """Classes that are words, numbered in sorted order; their names; notes."""
        gap = _first_missing(y.reshape(-1))
        if gap is not None:
            raise self.refuse(f"column {self.target_name!r} is empty", "leave the row out", gap)
        if y.ndim > 1:
            return self._several(y), self.target_names, ()
        words, codes = np.unique(y.astype(str), return_inverse=True)
        found = numbered(words.tolist(), f"classes in column {self.target_name!r}")
        names = tuple(str(label) for label in found.labels)
        return found.places[codes], names, found.notes

    def _several(self, y: NDArray[Any]) -> NDArray[np.float64]:
        """Several target columns as numbers."""
        try:
            return y.astype(np.float64)
        except (TypeError, ValueError):
            raise self.refuse(
                f"columns {self.target_name!r} hold words: several targets must be numbers",
                "name one --target of classes, or columns of 0 and 1",
            ) from None

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

    def _classes(self, y: NDArray[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        """Class numbers from 0 on; the names of classes that are numbered otherwise."""
        column = f"column {self.target_name!r}"
        if y.ndim > 1 or (y != np.rint(y)).any():
            raise self.refuse(f"{column} does not hold class numbers", "use --task regression")
        if int(y.min()) == 0:
            return y.astype(np.int64), ()
        values, codes = np.unique(y.astype(np.int64), return_inverse=True)
        return codes.astype(np.int64), tuple(str(value) for value in values.tolist())

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


def _reason(y: NDArray[Any], kind: Task, words: bool) -> str:
    """Why targets were taken to be of this kind."""
    if words:
        return "its values are words"
    if y.ndim > 1:
        return "all values are 0 and 1" if kind == "multi-label" else "there are several numbers"
    if y.dtype.kind == "f":
        return "its values are real numbers"
    count = len(np.unique(y))
    few = "only" if kind == "classification" else "as many as"
    return f"it has {few} {count} different whole numbers"


def all_finite(values: NDArray[Any]) -> bool:
    """Whether all values are finite, without an array as large as theirs."""
    flat = values.reshape(-1)
    step = 1 << 20
    return all(
        bool(np.isfinite(flat[start : start + step]).all()) for start in range(0, len(flat), step)
    )


def _means(values: NDArray[np.float64], number: Indices) -> NDArray[np.float64]:
    """The mean of each user's values that are there; 0 if there is none."""
    there = np.isfinite(values)
    users = int(number[-1]) + 1
    counts = np.bincount(number[there], minlength=users)
    sums = np.bincount(number[there], weights=values[there], minlength=users)
    return np.asarray(sums / np.maximum(counts, 1))


def _first_word(values: NDArray[Any]) -> int:
    """The first value that is not a number."""
    for place, value in enumerate(values.reshape(-1).tolist()):
        if not isinstance(value, int | float):
            return place
    return 0


def _are_whole_floats(y: NDArray[Any]) -> bool:
    """Whether whole numbers are stored as real numbers, in one column."""
    if y.ndim > 1 or y.dtype.kind != "f":
        return False
    return bool((y == np.rint(y)).all())


def _first(found: NDArray[np.bool_]) -> int:
    """The first place that is True."""
    return int(np.flatnonzero(found)[0])


def _first_missing(values: NDArray[Any]) -> int | None:
    if values.dtype.kind in "biu":
        return None
    if values.dtype.kind == "f":
        return _first(np.isnan(values)) if np.isnan(values).any() else None
    for place, value in enumerate(values.tolist()):
        if is_missing(value):
            return place
    return None


def is_missing(value: object) -> bool:
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
