"""A schema found by looking at everybody's rows: columns, kinds, the task and its classes.

Whatever is found here is a condition of any promise. Modules that read rows by a schema infer
nothing from them.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.lab.features import (
    LARGEST,
    TRUTH,
    as_numbers,
    as_texts,
    is_text,
    list_names,
    sorted_labels,
    stack_targets,
)
from flwr_ppsgd.lab.problem import Problem
from flwr_ppsgd.lab.schema import (
    BUCKETS,
    CATEGORY,
    FLAG,
    HASHED,
    LEFT_OUT,
    NUMBER,
    OWN_MEAN,
    PICTURE,
    SPARSE,
    TEXT,
    ZERO,
    Column,
    Schema,
    TaskName,
)
from flwr_ppsgd.lab.tables import RawTable, Values, is_number_or_gap
from flwr_ppsgd.models.representation import looks_like_images
from flwr_ppsgd.settings import spans_of, split_names

MOST_WORDS = 64  # of a column that is taken as categories without being asked
MOST_ONE_HOT = 1000  # words of a category that was asked for; beyond, they are hashed
FEWEST_NUMBERED = 10  # rows, to take 1, 2, 3, … as row ids
DATES_LOOKED_AT = 100
MOST_CLASSES = 64  # if the numbers 0 … K−1 all occur
MOST_CLASSES_WITH_GAPS = 20
FEWEST_ROWS = 20  # to take a target with nearly as many words as rows as no class
MOST_CLASSES_SHOWN = 10
ID = re.compile(
    r"(^|[_\W])(id|ID|Id|index|code)$|[a-z]I[dD]$"
    r"|^column \d+$|^Unnamed: \d+$|^__index_level_\d+__$"  # without a name, perhaps in pandas
)
MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ].*)?"  # 2024-01-31, with a time or without
    r"|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}( .*)?"  # 31.1.2024
    rf"|([a-z]+,? )?(\d\d?\.?[- ]{MONTH}|{MONTH} \d\d?),?[- ]\d{{2,4}}( .*)?"  # 31 Jan 2024
    r"|\d\d?:\d\d(:\d\d)?",  # 12:30
    re.IGNORECASE,
)
LIKE_NUMBER = re.compile(r"[-+$€£]*[\d.,' ]*\d[\d.,' ]*%?")  # 1234.5, but $1,234 and 5 % too
FIRST_SECOND, LAST_SECOND = 9e8, 2.3e9  # of timestamps: 1998 to 2042
SECONDS = (1.0, 1e3, 1e6, 1e9)  # in the units of timestamps
USE = "--set feature-columns= uses it"
REASONS = {  # why a column is left out, and the option that changes it; "" if somebody said so
    "date": "dates (--set time-column= tests on each user's last rows)",
    "timestamp": f"timestamps (--set time-column= tests on each user's last rows, {USE})",
    "row id": f"row ids ({USE})",
    "words": "many words (--categorical or --set text-columns= uses them)",
    "mixed": "not plain numbers (leave cells empty for gaps, write 1234.5; --categorical uses "
    "them)",
    "nested": "nested (write one column for each number)",
    "empty": "empty",
    "huge": f"numbers beyond {LARGEST:g}",
    "constant": "the same in every row",
    "picture": f"beside pictures ({USE} instead)",
    "excluded": "",
    "not named": "",
}


def find_schema(table: RawTable, problem: Problem) -> tuple[Schema, list[str]]:
    """The schema of a file, as settings describe it or its rows suggest, and notes on both."""
    user = problem.user_column or "user"
    targets = tuple(split_names(problem.target_column) or ["y"])
    test = problem.test_column
    time = problem.time_column
    fraction = problem.test_fraction
    notes = []
    if "test" in table.columns and "test" not in (test, user, *targets):
        if time or fraction is not None:
            notes.append("column 'test' left out: another split was asked for")
        else:
            test = "test"
    special = [name for name in (user, *targets, test, time) if name]
    _check_special(table, special)
    columns, left_out = _find_columns(table, problem, {*special, "test"})
    notes += _column_notes(columns, left_out)
    if not any(column.features for column in columns):
        reasons = [note for note in notes if note.startswith("left out")]
        what = "there is no feature column beside user, target, test and time"
        raise table.refuse("; ".join([what, *reasons]), "add one")
    task, classes, why = _find_task(table, targets, problem.task)
    if why and not problem.task:
        name = ", ".join(targets)
        notes.append(f"detected from {name!r}: {task}, since {why} (--task changes it)")
    if classes:
        notes.append(f"classes are {list_names(classes, MOST_CLASSES_SHOWN)}")
    dtypes = {str(table.columns[column.name].dtype) for column in columns if column.width > 1}
    lines = table.lines
    schema = Schema(
        user=user,
        target=targets,
        task=task,
        classes=classes,
        columns=tuple(columns),
        missing=ZERO if problem.impute == ZERO else OWN_MEAN,
        test=test,
        time=time,
        test_fraction=0.2 if fraction is None else fraction,
        split_seed=problem.data_seed,
        dtype="uint8" if dtypes == {"uint8"} else "float64",
        separator=lines.separator if lines else "",
        decimal=lines.decimal if lines else "",
        encoding=lines.encoding if lines else "",
    )
    return schema, notes


def list_findings(schema: Schema, problem: Problem) -> tuple[str, ...]:
    """The parts of a schema that were found in the rows, as a condition names them."""
    found = ["the ids of users", "the columns and their kinds"]
    words = [repr(column.name) for column in schema.columns if column.kind == CATEGORY]
    if words:
        found.append(f"the words of {', '.join(words)}")
    if not problem.task:
        found.append("the task")
    if schema.classes:
        found.append("the classes")
    if schema.picture:
        found.append("the shape of pictures")
    return tuple(found)


def _check_special(table: RawTable, special: Sequence[str]) -> None:
    """ValueError unless the columns of user, target, test and time are there, and rows in all."""
    for name in special:
        if _is_nested(table.column(name)):
            raise table.refuse(f"column {name!r} is nested", "write one column for each number")
        if special.count(name) > 1:
            what = f"column {name!r} has two roles among user, target, test and time"
            raise table.refuse(what, "name another column for one of them")
    names = list(table.columns)
    if table.only_x:
        table.column("x")
        names = [name for name in names if name in (*special, "x")]
    user = special[0]
    rows = np.shape(table.columns[user])
    if len(rows) != 1:
        raise table.refuse(f"{user!r} must have one value per row, got shape {rows}", "give one")
    for name in names:
        shape = np.shape(table.columns[name])
        if shape[:1] != rows:
            what = f"{name!r} has shape {shape} and {user!r} has {rows[0]} rows"
            raise table.refuse(what, "they must be the same rows")
    if not rows[0]:
        raise table.refuse("there are no rows", "give at least one row for each user")


# --- the kinds of columns


def _find_columns(
    table: RawTable, problem: Problem, special: set[str]
) -> tuple[list[Column], dict[str, list[str]]]:
    """The kind of each column that is not special, and the names of those left out by reason."""
    asked = dict.fromkeys(split_names(problem.categorical_columns), CATEGORY)
    asked |= dict.fromkeys(split_names(problem.text_columns), TEXT)
    features = split_names(problem.feature_columns)
    exclude = split_names(problem.exclude_columns)
    for name in (*asked, *features, *exclude):
        table.column(name)
    pictures = [name for name in table.shapes if name in table.columns and name not in special]
    columns: list[Column] = []
    left_out: dict[str, list[str]] = {}
    for name, values in table.columns.items():
        if name in special or (table.only_x and name != "x"):
            continue
        if name in exclude:
            reason = "excluded"
        elif _is_nested(values):
            reason = "nested"
        elif name in asked or name in features:
            reason = ""
        elif features:
            reason = "not named"
        elif pictures:
            reason = "" if name in pictures else "picture"
        else:
            reason = _reason_against(name, values, table.decimal)
        if not reason:
            columns.append(_make_column(table, name, asked.get(name)))
            continue
        odd = f" (as {_odd_word(values, table.decimal)!r})" if reason == "mixed" else ""
        left_out.setdefault(reason, []).append(f"{name!r}{odd}")
        columns.append(Column(name, LEFT_OUT))
    return columns, left_out


def _reason_against(name: str, values: Values, decimal: str) -> str:
    """Why a column is not used unless it is asked for; empty if it is."""
    if np.ndim(values) == 2:
        return ""
    if values.dtype.kind in "Mm":
        return "date"
    if is_text(values) and not _is_true_false(values):
        return _reason_against_words(values, decimal)
    numbers = as_numbers(values)
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return "empty" if np.isnan(values).all() else "huge"
    if len(finite) == len(numbers) and finite.min() == finite.max():
        return "constant"
    is_whole = (finite == np.rint(finite)).all()
    return _reason_against_numbers(name, finite) if is_whole else ""


def _reason_against_words(values: Values, decimal: str) -> str:
    different, codes = as_texts(values)
    words = [word for word in different if word]
    if not words:
        return "empty"
    first = words[:DATES_LOOKED_AT]
    dates = [word for word in first if DATE.fullmatch(word)]
    if len(dates) > 0.9 * len(first):
        return "date"
    if len(words) == 1 and (codes >= 0).all():
        return "constant"
    if len(words) <= MOST_WORDS and 2 * len(words) <= len(codes):
        return ""
    like_numbers = [word for word in words if LIKE_NUMBER.fullmatch(word)]
    mostly_numbers = 2 * len(like_numbers) > len(words)
    return "mixed" if mostly_numbers and _odd_word(values, decimal) else "words"


def _reason_against_numbers(name: str, numbers: NDArray[np.float64]) -> str:
    """The same for whole numbers: "timestamp", "date" or "row id"."""
    least = numbers.min()
    most = numbers.max()
    for second in SECONDS:
        if least / second >= FIRST_SECOND and most / second <= LAST_SECOND:
            return "timestamp"
    month = numbers // 100 % 100  # of dates as in 20240131
    day = numbers % 100
    is_date = (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
    if least >= 19000101 and most <= 21001231 and is_date.all():
        return "date"
    if len(numbers) >= FEWEST_NUMBERED and (np.diff(numbers) == 1).all():
        return "row id"
    are_different = 1 < len(numbers) == len(np.unique(numbers))
    return "row id" if are_different and ID.search(name) else ""


def _is_nested(values: Values) -> bool:
    if not is_text(values):
        return False
    first = next((value for value in values if value is not None), None)
    return isinstance(first, list | dict | np.ndarray)


def _is_true_false(values: Values) -> bool:
    words = {word.lower() for word in as_texts(values)[0] if word}
    return bool(words) and words <= set(TRUTH)


def _odd_word(values: Values, decimal: str) -> str:
    """The first word that is neither a number nor a gap; empty if there is none."""
    words = as_texts(values)[0]
    return next((word for word in words if not is_number_or_gap(word, decimal)), "")


def _make_column(table: RawTable, name: str, asked: str | None) -> Column:
    """A column of the kind that is asked for, or else found in its values."""
    values = table.columns[name]
    if asked == TEXT:
        return Column(name, TEXT)
    if asked == CATEGORY or (is_text(values) and not _is_true_false(values)):
        words = sorted({word for word in as_texts(values)[0] if word})
        if len(words) > MOST_ONE_HOT or not words:
            return Column(name, HASHED)
        return Column(name, CATEGORY, tuple(words))
    if np.ndim(values) == 2:
        return _array_column(table, name)
    return Column(name, FLAG if _is_flag(as_numbers(values)) else NUMBER)


def _array_column(table: RawTable, name: str) -> Column:
    values = table.columns[name]
    width = int(values.shape[1])
    if sparse.issparse(values):
        return Column(name, SPARSE, width=width)
    shape = table.shapes.get(name, ())
    if values.dtype.kind in "biuf" and looks_like_images(values, shape):
        side = round(width**0.5)
        return Column(name, PICTURE, width=width, shape=shape or (side, side))
    flags = [place for place in range(width) if _is_flag(values[:, place])]
    if values.dtype == np.uint8:
        flags = list(range(width))  # bytes: a model sees x/255
    return Column(name, NUMBER, width=width, flags=spans_of(flags))


def _is_flag(values: Values) -> bool:
    """Whether all finite values are 0 or 1."""
    known = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    return bool(((known == 0) | (known == 1)).all())


def _column_notes(columns: Sequence[Column], left_out: dict[str, list[str]]) -> list[str]:
    """Notes on the columns, one for each kind and for each reason to leave some out."""
    notes = []
    words = []
    for column in columns:
        if column.kind == CATEGORY:
            words.append(f"{column.name!r} ({len(column.words)} words)")
    if words:
        notes.append(f"taken as categories: {list_names(words)} (--exclude leaves them out)")
    for kind in (HASHED, TEXT):
        names = [repr(column.name) for column in columns if column.kind == kind]
        if names:
            notes.append(f"{kind}, in {BUCKETS:,} columns each: {list_names(names)}")
    for reason, names in left_out.items():
        if REASONS[reason]:
            notes.append(f"left out, {REASONS[reason]}: {list_names(names)}")
    return notes


# --- the task


def _find_task(
    table: RawTable, targets: Sequence[str], asked: str
) -> tuple[TaskName, tuple[str, ...], str]:
    """The task, the classes or labels in order, and why it is this task if it was detected.

    Real numbers are for regression; whole numbers are classes unless there are too many: those
    that fill 0 … K−1 up to K = 64, others up to 20 values. Several columns are labels if all values
    are 0 and 1. Words are classes.
    """
    name = targets[0]
    values = table.columns[name]
    if np.ndim(values) == 2 and values.shape[1] == 1 and not sparse.issparse(values):
        values = values[:, 0]
    if len(targets) > 1 or np.ndim(values) == 2:
        return _task_of_several(table, targets, asked)
    if is_text(values) or values.dtype.kind == "b":
        task = "classification"
        why = "its values are words"
        classes = sorted_labels({word for word in as_texts(values)[0] if word})
        if not asked and table.rows >= FEWEST_ROWS and len(classes) > table.rows / 2:
            raise table.refuse(
                f"column {name!r} has {len(classes):,} different words in {table.rows:,} rows",
                "name another --target, or write amounts as plain numbers (1234.5)",
            )
    else:
        numbers = as_numbers(values)
        # with gaps whole numbers are stored as real ones
        are_real = values.dtype.kind == "f" and not np.isnan(values).any()
        task, why, classes = _task_of_numbers(numbers, are_real=are_real)
        if len(numbers) > 1 and (numbers == numbers[0]).all():
            what = f"column {name!r} is {numbers[0]:g} in every row"
            raise table.refuse(what, "there is nothing to learn: name another --target")
    if (asked or task) == "regression":
        return "regression", (), why
    classes = table.classes or classes
    if not classes:
        what = f"column {name!r} does not hold class numbers"
        raise table.refuse(what, "use --task regression")
    if len(classes) < 2:
        what = f"column {name!r} has one class, {classes[0]!r}"
        raise table.refuse(what, "there is nothing to learn: name another --target")
    return "classification", classes, why


def _task_of_numbers(
    numbers: NDArray[np.float64], *, are_real: bool
) -> tuple[str, str, tuple[str, ...]]:
    """The task, why, and the classes; none unless all numbers are whole."""
    different = np.unique(numbers[np.isfinite(numbers)])
    if (different != np.rint(different)).any():
        return "regression", "its values are real numbers", ()
    labels = [int(number) for number in different]
    most = MOST_CLASSES if labels == list(range(len(labels))) else MOST_CLASSES_WITH_GAPS
    if labels and labels[0] == 0 and labels[-1] < MOST_CLASSES:
        labels = list(range(labels[-1] + 1))
    classes = tuple(str(label) for label in labels)
    if are_real:
        doubt = "all values are whole numbers: they may be classes"
        return "regression", f"its values are real numbers, though {doubt}", classes
    if len(different) > most:
        return "regression", "it has many different whole numbers", classes
    return "classification", f"it has only {len(different)} different whole numbers", classes


def _task_of_several(
    table: RawTable, targets: Sequence[str], asked: str
) -> tuple[TaskName, tuple[str, ...], str]:
    """The task of several target columns, or of an array of them."""
    values = stack_targets(table, targets)
    width = int(values.shape[1])
    names = tuple(targets) if len(targets) > 1 else table.classes
    names = names or tuple(str(place) for place in range(width))
    if sparse.issparse(values):
        return "multi-label", names, ""
    if asked == "classification":
        what = f"{targets[0]!r} has {width} columns"
        raise table.refuse(what, "classes need one: use --task multi-label")
    are_labels = np.isin(values, (0, 1)).all()
    if asked == "multi-label" or (are_labels and not asked):
        return "multi-label", names, "all values are 0 and 1"
    return "regression", names, "there are several numbers"
