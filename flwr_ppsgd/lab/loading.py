"""Everyone's rows from a file: read, described by a schema, sorted by user, with a test part."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.lab.data_options import DataOptions, names_in
from flwr_ppsgd.lab.features import (
    as_numbers,
    as_texts,
    encode_columns,
    find_columns,
    is_text,
    list_names,
)
from flwr_ppsgd.lab.per_user import Indices, PerUser, Split
from flwr_ppsgd.lab.schema import CATEGORY, MISSING, OWN_MEAN, ZERO, Schema, Task
from flwr_ppsgd.lab.tables import RawTable, Values, as_number, missing_name, read_table_file

MOST_CLASSES = 64  # if the numbers 0 … K−1 all occur
MOST_CLASSES_WITH_GAPS = 20
MOST_SHOWN = 3
MOST_CLASSES_SHOWN = 10
DROP = "drop"
IMPUTE = (DROP, *MISSING)
TEST_WORDS = {"1": 1, "true": 1, "test": 1, "0": 0, "false": 0, "train": 0}
PLAIN_NUMBER = re.compile(r"-?[1-9][0-9]*|0")


def load(
    source: str | Path,
    options: DataOptions | None = None,
    *,
    min_train: int = 1,
    users: int | None = None,
) -> PerUser:
    """The users of a file of one's own, or of a public data set; print ``describe()``.

    Args:
        source: a .csv, .parquet or .npz file; a folder of .parquet files, in LEAF's layout, or of
            pictures by user and class; "flwrlabs/femnist" or another data set of the hub;
            TensorFlow Federated's emnist or stackoverflow file.
        options: which columns are the user, the target and so on; or a schema.
        min_train: of the chosen users, those with fewer training rows are left out.
        users: at most this many users, the first ones.
    """
    options = options or DataOptions()
    if options.schema:
        schema = Schema.read(Path(options.schema))
        return group_by_user(_read_source(source, options, schema, None), schema)
    table = _read_source(source, options, None, users)
    schema, looked, notes = find_schema(table, options)
    table = replace(table, notes=(*table.notes, *notes))
    data = group_by_user(table, schema, impute=options.impute or "", looked=looked)
    if users is not None and users < len(data):
        data = data.only(range(users))
    return data.with_at_least(min_train)


def _read_source(
    source: str | Path, options: DataOptions, schema: Schema | None, users: int | None
) -> RawTable:
    """The columns of a source; a schema says which are text."""
    from flwr_ppsgd.lab import public

    if public.is_public(source):
        return public.read_public(source, options, users)
    text = {options.user or "user", *names_in(options.categorical), *names_in(options.text)}
    if schema is None:
        return read_table_file(Path(source), text, options.encoding or "")
    # as text, so that no word in a row changes how other rows are read
    return read_table_file(Path(source), None, schema.encoding, schema.separator, schema.decimal)


# --- looking


def find_schema(table: RawTable, options: DataOptions) -> tuple[Schema, tuple[str, ...], list[str]]:
    """A schema found by looking at everybody's rows; what was looked for; notes."""
    user = options.user or "user"
    for name in (user, "x") if table.only_x else (user,):
        table.column(name)
    targets = tuple(names_in(options.target) or ["y"])
    for name in targets:
        table.column(name)
    notes = []
    test = options.test or ""
    time = options.time or ""
    if "test" in table.columns and not test:
        if time or options.test_fraction is not None:
            notes.append("column 'test' left out: another split was asked for")
        else:
            test = "test"
    for name in (test, time):
        if name:
            table.column(name)
    special = {user, *targets, test, time, "test"}
    _check_rows(table, user, special)
    columns, column_notes = find_columns(table, options, special)
    task, classes, why = find_task(table, targets, options.task)
    notes += [*column_notes, *why]
    if classes:
        notes.append(f"classes are {list_names(classes, MOST_CLASSES_SHOWN)}")
    if not any(column.features for column in columns):
        left_out = "; ".join(note for note in column_notes if note.startswith("left out"))
        what = "there is no feature column beside user, target, test and time"
        raise table.refuse(f"{what}; {left_out}" if left_out else what, "add one")
    dtypes = {str(table.columns[column.name].dtype) for column in columns if column.width > 1}
    schema = Schema(
        user=user,
        target=targets,
        task=task,
        classes=classes,
        columns=columns,
        missing=ZERO if options.impute == ZERO else OWN_MEAN,
        test=test,
        time=time,
        test_fraction=0.2 if options.test_fraction is None else options.test_fraction,
        split_seed=options.split_seed,
        dtype="uint8" if dtypes == {"uint8"} else "float64",
        separator=table.lines.separator if table.lines else "",
        decimal=table.lines.decimal if table.lines else "",
        encoding=table.lines.encoding if table.lines else "",
    )
    return schema.with_hash(), _chosen_by_looking(schema, options), notes


def _chosen_by_looking(schema: Schema, options: DataOptions) -> tuple[str, ...]:
    """What was chosen by looking at everybody's rows, each as it stands in a condition."""
    found = ["the ids of users", "the columns and their kinds"]
    words = [repr(column.name) for column in schema.columns if column.kind == CATEGORY]
    if words:
        found.append(f"the words of {', '.join(words)}")
    if not options.task:
        found.append("the task")
    if schema.classes:
        found.append("the classes")
    if schema.picture:
        found.append("the shape of pictures")
    return tuple(found)


def find_task(
    table: RawTable, targets: Sequence[str], asked: str | None
) -> tuple[Task, tuple[str, ...], list[str]]:
    """The task, the classes or labels in order, and a note on what was detected.

    Real numbers are for regression; whole numbers are classes unless there are too many: those
    that fill 0 … K−1 up to K = 64, others up to 20 values. Several columns are labels if all values
    are 0 and 1. Words are classes.
    """
    values = table.columns[targets[0]]
    named = f"detected from {', '.join(targets)!r}: "
    several = len(targets) > 1 or np.ndim(values) == 2
    if several:
        return _find_several(table, targets, asked, named)
    words = is_text(values) or values.dtype.kind == "b"
    if words and asked == "regression":
        numbers = as_numbers(values)
        bad = np.flatnonzero(~np.isfinite(numbers))
        if bad.size:
            shown = str(np.asarray(values)[bad[0]])
            raise table.refuse(
                f"column {targets[0]!r} is not a number ({shown!r})",
                "leave out --task regression if it is a class, or name another --target",
                int(bad[0]),
            )
        return "regression", (), []
    if words:
        classes = _sorted_labels({word for word in as_texts(values)[0] if word})
        note = f"{named}classification, since its values are words (--task changes it)"
        return _classes(table, targets, classes), classes, [] if asked else [note]
    numbers = as_numbers(values)
    there = np.unique(numbers[np.isfinite(numbers)])
    whole = bool((there == np.rint(there)).all())
    filled = whole and len(there) > 0 and there[0] == 0 and there[-1] == len(there) - 1
    most = MOST_CLASSES if filled else MOST_CLASSES_WITH_GAPS
    real = values.dtype.kind == "f"
    kind = "regression" if real or len(there) > most else "classification"
    why = "it has many different whole numbers"
    if kind == "classification":
        why = f"it has only {len(there)} different whole numbers"
    elif real:
        why = "its values are real numbers"
        if whole:
            why += ", though all values are whole numbers: they may be classes"
    notes = [] if asked else [f"{named}{kind}, since {why} (--task changes it)"]
    if (asked or kind) == "regression":
        return "regression", (), notes
    if not whole:
        raise table.refuse(
            f"column {targets[0]!r} does not hold class numbers", "use --task regression"
        )
    labels = [int(value) for value in there]
    if filled or (labels and labels[0] == 0 and labels[-1] < MOST_CLASSES):
        labels = list(range(labels[-1] + 1))
    classes = table.classes or tuple(str(label) for label in labels)
    return _classes(table, targets, classes), classes, notes


def _classes(table: RawTable, targets: Sequence[str], classes: Sequence[str]) -> Task:
    if len(classes) < 2:
        shown = f"one class, {classes[0]!r}" if classes else "no class"
        raise table.refuse(
            f"column {targets[0]!r} has {shown}", "there is nothing to learn: name another --target"
        )
    return "classification"


def _find_several(
    table: RawTable, targets: Sequence[str], asked: str | None, named: str
) -> tuple[Task, tuple[str, ...], list[str]]:
    """The task of several target columns, or of an array of them."""
    values = _stack_targets(table, targets)
    width = int(values.shape[1])
    names = tuple(targets) if len(targets) > 1 else table.classes
    names = names or tuple(str(place) for place in range(width))
    if sparse.issparse(values):
        return "multi-label", names, []
    labels = bool(np.isin(values, (0, 1)).all())
    kind = asked or ("multi-label" if labels else "regression")
    why = "all values are 0 and 1" if labels else "there are several numbers"
    notes = [] if asked else [f"{named}{kind}, since {why} (--task changes it)"]
    if kind == "classification":
        if width > 1:
            raise table.refuse(
                f"{targets[0]!r} has {width} columns", "classes need one: use --task multi-label"
            )
        return find_task(replace(table, columns={targets[0]: values[:, 0]}), targets[:1], asked)
    if width == 1 and kind == "regression":
        return "regression", (), notes
    return ("multi-label" if kind == "multi-label" else "regression"), names, notes


def _stack_targets(table: RawTable, targets: Sequence[str]) -> Values:
    """Target columns side by side."""
    first = table.columns[targets[0]]
    if np.ndim(first) == 2:
        return first if sparse.issparse(first) else np.asarray(first, dtype=np.float64)
    parts = [as_numbers(table.columns[name], table.decimal) for name in targets]
    return np.stack(parts, axis=1)


def _sorted_labels(labels: set[str]) -> tuple[str, ...]:
    """By number if all of them are whole numbers as they are usually written, else by letters."""
    if all(PLAIN_NUMBER.fullmatch(label) for label in labels):
        return tuple(sorted(labels, key=int))
    return tuple(sorted(labels))


# --- rows of known form


def check_columns(table: RawTable, schema: Schema) -> None:
    """ValueError unless the file has the columns of the schema, and no others."""
    known = schema.special() | {column.name for column in schema.columns}
    for name in (schema.user, *schema.target, schema.test, schema.time):
        if name and name not in table.columns:
            raise table.refuse(missing_name(name, table.columns, "column"), "the schema has it")
    for column in schema.columns:
        if column.name not in table.columns:
            what = missing_name(column.name, table.columns, "column")
            raise table.refuse(what, "the schema lists it: take it out, or add it to the file")
    for name in table.columns:
        if name not in known and name != "test" and not table.only_x:
            raise table.refuse(
                f"column {name!r} is not in the schema",
                f'add {name!r} = "left out" to its columns, or take it out of the file',
            )


def group_by_user(
    table: RawTable,
    schema: Schema,
    *,
    impute: str | None = None,
    looked: tuple[str, ...] = (),
) -> PerUser:
    """Everyone's rows, sorted by user, with a test part for each.

    A schema of somebody's own is obeyed without a word about rows: a row without a user who is
    enrolled, or without a target that can be read, is dropped, and nobody is left out.

    Args:
        table: the columns of a file.
        schema: what they are.
        impute: None for a schema of somebody's own. Otherwise the schema was found in this file, so
            that what does not fit it is refused with its line: a rule of ``IMPUTE`` for gaps, which
            are refused if it is "".
        looked: what was chosen by looking.
    """
    strict = impute is not None
    check_columns(table, schema)
    if impute and impute not in IMPUTE:
        raise ValueError(f"impute must be one of {', '.join(IMPUTE)}, got {impute!r}")
    x = encode_columns(table, schema)
    labels, user = _users(table, schema, strict)
    y, readable = _targets(table, schema)
    if strict and not readable.all():
        raise _refused_target(table, schema, _first_place(~readable))
    kept = readable & (user >= 0)
    gaps = _gaps(x)
    notes = list(table.notes)
    if strict and gaps.any():
        notes += _gap_notes(table, schema, x, gaps, impute or "")
        if impute == DROP:
            kept &= ~gaps
    rows = np.flatnonzero(kept)
    if strict:
        present = np.unique(user[rows])
        user = np.searchsorted(present, user)
        labels = tuple(labels[place] for place in present.tolist())
        notes += _same_numbers(labels)
    time = _row_times(table, schema, strict)
    order = rows[np.lexsort((time[rows], user[rows]))]  # stable: without a time, as in the file
    offsets = np.searchsorted(user[order], np.arange(len(labels) + 1)).astype(np.intp)
    test = _test_rows(table, schema, order, offsets, strict)
    if strict:
        _refuse_test_only(table, labels, offsets, test, order)
        if not schema.test:
            notes.append(_split(schema).words(by_time=bool(schema.time)))
    if len(order) < len(user) or (np.diff(order) != 1).any():
        x = x[order]
        y = y[order]
    if gaps.any():
        x = _fill_gaps(x, user[order], ~test, schema.missing)
    return PerUser(
        source=table.source,
        x=x,
        y=y,
        test=test,
        offsets=offsets,
        users=labels,
        task=schema.task,
        outputs=schema.outputs,
        std=255.0 if schema.dtype == "uint8" else 1.0,
        feature_names=schema.feature_names() or table.feature_names,
        target_names=schema.classes,
        notes=tuple(dict.fromkeys(notes)),
        shape=next(iter(table.shapes.values()), ()) if not schema.picture else schema.picture.shape,
        by_time=bool(schema.time),
        schema=schema,
        looked=looked,
    )


def _check_rows(table: RawTable, user: str, special: set[str]) -> None:
    """ValueError unless all columns have one value per row, and there is a row."""
    rows = np.shape(table.columns[user])
    if len(rows) != 1:
        raise table.refuse(f"{user!r} must have one value per row, got shape {rows}", "give one")
    for name, values in table.columns.items():
        matters = name in special or name == "x" or not table.only_x
        if matters and np.shape(values)[:1] != rows:
            raise table.refuse(
                f"{name!r} has shape {np.shape(values)} and {user!r} has {rows[0]} rows",
                "they must be the same rows",
            )
    if not rows[0]:
        raise table.refuse("there are no rows", "give at least one row for each user")


def _users(table: RawTable, schema: Schema, strict: bool) -> tuple[tuple[str, ...], Indices]:
    """The users in order, and for each row the number of its user; −1 is nobody."""
    words, codes = as_texts(table.columns[schema.user])
    if strict and (codes < 0).any():
        raise table.refuse(
            f"column {schema.user!r} is empty", "every row needs its user", _first_place(codes < 0)
        )
    labels = schema.enrolled
    if labels is None:
        labels = _sorted_labels({word for word in words if word})
    places = {label: place for place, label in enumerate(labels)}
    number = [places.get(word, -1) for word in words]
    return labels, np.array([*number, -1], dtype=np.intp)[codes]


def _same_numbers(labels: Sequence[str]) -> list[str]:
    """A note if users are written as the same number in two ways."""
    found: dict[float, list[str]] = {}
    for label in labels:
        number = as_number(label)
        if number is not None:
            found.setdefault(number, []).append(label)
    several = [" and ".join(map(repr, group)) for group in found.values() if len(group) > 1]
    if not several:
        return []
    return [f"users are text: {', '.join(several[:MOST_SHOWN])} are not the same"]


def _targets(table: RawTable, schema: Schema) -> tuple[Values, NDArray[np.bool_]]:
    """Targets as in ``PerUser``, and which rows have one that can be read."""
    if schema.task == "classification":
        values = table.columns[schema.target[0]]
        if np.ndim(values) == 2:
            values = np.asarray(values)[:, 0]
        words, codes = as_texts(values)
        order = {class_name(name): place for place, name in enumerate(schema.classes)}
        places = [order.get(class_name(word), -1) for word in words]
        numbers = np.array([*places, -1], dtype=np.int64)[codes]
        return np.maximum(numbers, 0), numbers >= 0
    found = _stack_targets(table, schema.target)
    if found.shape[1] != schema.outputs:
        raise table.refuse(
            f"{schema.target[0]!r} has {found.shape[1]} columns and the schema {schema.outputs}",
            "give a file of that form, or another schema",
        )
    if sparse.issparse(found):
        return found, np.ones(found.shape[0], dtype=np.bool_)
    if schema.task == "multi-label":
        readable = np.asarray(np.isin(found, (0, 1)).all(axis=1))
        return sparse.csr_array(np.where(readable[:, None], found, 0.0)), readable
    readable = np.asarray(np.isfinite(found).all(axis=1))
    amounts = np.where(readable[:, None], found, 0.0)
    return (amounts[:, 0] if schema.outputs == 1 else amounts), readable


def class_name(word: str) -> str:
    """A class as text: 1 for 1.0 and for 01."""
    number = as_number(word)
    return str(int(number)) if number is not None and number == np.rint(number) else word


def _refused_target(table: RawTable, schema: Schema, row: int) -> ValueError:
    name = ", ".join(schema.target)
    if schema.task == "multi-label":
        what = f"{name!r} is neither 0 nor 1"
        return table.refuse(what, "multi-label targets are 0 and 1", row)
    kind = "is empty" if schema.task == "classification" else "is not a finite number"
    return table.refuse(f"column {name!r} {kind}", "leave the row out", row)


def _row_times(table: RawTable, schema: Schema, strict: bool) -> NDArray[np.float64]:
    """Each row's time as a number; without one that can be read a row is the user's first."""
    import pandas

    if not schema.time:
        return np.zeros(table.rows)
    values = table.columns[schema.time]
    found = np.full(len(values), np.nan)
    if values.dtype.kind != "M":
        found = as_numbers(values, table.decimal)
    if values.dtype.kind == "M" or is_text(values):
        dates = pandas.to_datetime(
            pandas.Series(values), utc=True, errors="coerce", format="ISO8601"
        )
        seconds = (dates - pandas.Timestamp(0, tz="UTC")).dt.total_seconds().to_numpy()
        found = np.where(np.isfinite(found), found, seconds)
    bad = ~np.isfinite(found)
    if strict and bad.any():
        row = _first_place(bad)
        shown = str(np.asarray(values)[row])
        raise table.refuse(
            f"column {schema.time!r} is not a time ({shown!r})", "write 2024-01-31 or a number", row
        )
    return np.where(bad, -np.inf, found)


def _split(schema: Schema) -> Split:
    return Split(schema.test_fraction, schema.split_seed)


def _test_rows(
    table: RawTable, schema: Schema, order: Indices, offsets: Indices, strict: bool
) -> NDArray[np.bool_]:
    """Which rows, sorted by user, are test rows."""
    if not schema.test:
        time = np.arange(len(order)) if schema.time else None
        return _split(schema).mask(offsets, time)
    words, codes = as_texts(table.columns[schema.test])
    known = [TEST_WORDS.get(class_name(word.lower()), -1) for word in words]
    flags = np.array([*known, -1])[codes]
    if strict and (flags < 0).any():
        what = f"column {schema.test!r} is neither 0 nor 1"
        raise table.refuse(what, "1 marks the rows of the test part", _first_place(flags < 0))
    return np.asarray(flags[order] == 1)


def _refuse_test_only(
    table: RawTable,
    labels: Sequence[str],
    offsets: Indices,
    test: NDArray[np.bool_],
    order: Indices,
) -> None:
    trained = np.add.reduceat(~test, offsets[:-1], dtype=np.intp)
    if trained.all():
        return
    user = int(np.argmin(trained))
    raise table.refuse(
        f"user {labels[user]!r} has test rows only, the first",
        "give that user a training row, or leave the user out",
        int(order[offsets[user]]),
    )


def _gaps(x: Values) -> NDArray[np.bool_]:
    """Which rows have a feature that is missing or not finite."""
    if sparse.issparse(x):
        found = np.zeros(x.shape[0], dtype=np.bool_)
        bad = ~np.isfinite(x.data)
        if bad.any():
            found[np.repeat(np.arange(x.shape[0]), np.diff(x.indptr))[bad]] = True
        return found
    if x.dtype.kind in "biu":
        return np.zeros(len(x), dtype=np.bool_)
    return np.asarray(~np.isfinite(x).all(axis=1))


def _gap_notes(
    table: RawTable, schema: Schema, x: Values, gaps: NDArray[np.bool_], impute: str
) -> list[str]:
    """What is done about gaps; ValueError if there is no rule."""
    row = _first_place(gaps)
    values = x[[row]].toarray()[0] if sparse.issparse(x) else x[row]
    place = _first_place(~np.isfinite(values))
    names = schema.feature_names()
    if not impute:
        name = f"column {names[place]!r}" if names else f"x, feature {place},"
        exclude = f", or --exclude {names[place]}" if names else ""
        rules = ", ".join(IMPUTE)
        raise table.refuse(
            f"{name} is not a finite number", f"add --impute with one of {rules}{exclude}", row
        )
    count = int(gaps.sum())
    if impute == DROP:
        if gaps.all():
            raise table.refuse("every row has a gap", "use --impute own-mean, or --exclude")
        return [f"left out {count:,} rows with gaps (impute = drop)"]
    return [f"{count:,} rows have gaps, filled with: {MISSING[impute]}"]


def _fill_gaps(x: Values, user: Indices, trained: NDArray[np.bool_], missing: str) -> Values:
    """x, sorted by user, with 0 or the mean of the user's own training rows in its gaps."""
    if sparse.issparse(x):
        x = x.copy()
        x.data[~np.isfinite(x.data)] = 0.0
        return x
    x = np.array(x, dtype=np.float64)
    rows, columns = np.nonzero(~np.isfinite(x))
    x[rows, columns] = np.nan
    if missing == ZERO:
        x[rows, columns] = 0.0
        return x
    users = int(user.max(initial=-1)) + 1
    for column in np.unique(columns).tolist():
        there = trained & np.isfinite(x[:, column])
        counts = np.bincount(user[there], minlength=users)
        sums = np.bincount(user[there], weights=x[there, column], minlength=users)
        here = rows[columns == column]
        x[here, column] = (sums / np.maximum(counts, 1))[user[here]]
    return x


def _first_place(found: NDArray[np.bool_]) -> int:
    """The first place that is True."""
    return int(np.flatnonzero(found)[0])


def public_statistics(path: str | Path, data: PerUser) -> tuple[Any, Any]:
    """(mean, std) for ``PerUser.standardise``.

    Args:
        path: an .npz with the arrays ``mean`` and ``std``, or a .csv with the columns ``feature``,
            ``mean`` and ``std``.
        data: what they are for; a .csv is looked up by its feature names.
    """
    table = read_table_file(Path(path), ["feature"])
    mean = as_numbers(table.column("mean"))
    std = as_numbers(table.column("std"))
    if Path(path).suffix == ".npz":
        return mean, std
    if not data.feature_names:
        raise ValueError(
            f"{path}: the features of {data.source} have no names: give an .npz with mean and std"
        )
    features = np.asarray(table.column("feature")).tolist()
    for name in data.feature_names:
        if name not in features:
            raise ValueError(f"{path}: {missing_name(name, features, 'feature')}")
    places = [features.index(name) for name in data.feature_names]
    return mean[places], std[places]
