"""Everyone's rows from a file: read, described by a schema, sorted by user, with a test part."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.lab.data_options import DataOptions
from flwr_ppsgd.lab.features import (
    as_numbers,
    as_texts,
    count_of,
    encode_columns,
    find_columns,
    is_text,
    is_usable,
    list_names,
    map_texts,
)
from flwr_ppsgd.lab.per_user import Indices, PerUser, Split
from flwr_ppsgd.lab.schema import CATEGORY, MISSING, OWN_MEAN, ZERO, Schema, Task
from flwr_ppsgd.lab.tables import RawTable, Values, as_number, missing_name, read_table_file
from flwr_ppsgd.settings import split_names

MOST_CLASSES = 64  # if the numbers 0 … K−1 all occur
MOST_CLASSES_WITH_GAPS = 20
FEWEST_ROWS = 20  # to take a target with nearly as many values as rows as no class
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
    if schema is None:
        text = [options.user or "user"]
        text += [*split_names(options.categorical or ""), *split_names(options.text or "")]
        return read_table_file(Path(source), text, options.encoding or "")
    # as text, so that no word in a row changes how other rows are read
    return read_table_file(Path(source), None, schema.encoding, schema.separator, schema.decimal)


# --- looking


def find_schema(table: RawTable, options: DataOptions) -> tuple[Schema, tuple[str, ...], list[str]]:
    """A schema found by looking at everybody's rows; what was looked for; notes."""
    user = options.user or "user"
    targets = tuple(split_names(options.target or "") or ["y"])
    test = options.test or ""
    time = options.time or ""
    notes = []
    if "test" in table.columns and "test" not in (test, user, *targets):
        if time or options.test_fraction is not None:
            notes.append("column 'test' left out: another split was asked for")
        else:
            test = "test"
    x = ("x",) if table.only_x else ()
    named = [name for name in (user, *targets, test, time) if name]
    for name in (*x, *named):
        table.column(name)
        if named.count(name) > 1:
            what = f"column {name!r} has two roles among user, target, test and time"
            raise table.refuse(what, "name another column for one of them")
    special = {user, *targets, test, time, "test"}
    _check_rows(table, user, special)
    columns, column_notes = find_columns(table, options, special)
    task, classes, task_notes = find_task(table, targets, options.task)
    notes += [*column_notes, *task_notes]
    if classes:
        notes.append(f"classes are {list_names(classes, MOST_CLASSES_SHOWN)}")
    if not any(column.features for column in columns):
        left_out = [note for note in column_notes if note.startswith("left out")]
        what = "there is no feature column beside user, target, test and time"
        raise table.refuse("; ".join([what, *left_out]), "add one")
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
    )
    if table.lines:
        schema = replace(
            schema,
            separator=table.lines.separator,
            decimal=table.lines.decimal,
            encoding=table.lines.encoding,
        )
    return schema.with_hash(), _chosen_by_looking(schema, options), notes


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
    name = targets[0]
    values = table.columns[name]
    if np.ndim(values) == 2 and values.shape[1] == 1 and not sparse.issparse(values):
        values = values[:, 0]
    if len(targets) > 1 or np.ndim(values) == 2:
        return _task_of_several(table, targets, asked)
    if is_text(values) or values.dtype.kind == "b":
        kind = "classification"
        why = "its values are words"
        labels = _sorted_labels({word for word in as_texts(values)[0] if word})
        if not asked and table.rows >= FEWEST_ROWS and len(labels) > table.rows / 2:
            raise table.refuse(
                f"column {name!r} has {len(labels):,} different words in {table.rows:,} rows",
                "name another --target, or write amounts as plain numbers (1234.5)",
            )
    else:
        numbers = as_numbers(values)
        # with gaps whole numbers are stored as real ones
        real = values.dtype.kind == "f" and not np.isnan(values).any()
        kind, why, labels = _task_of_numbers(numbers, real=real)
        if len(numbers) > 1 and (numbers == numbers[0]).all():
            what = f"column {name!r} is {numbers[0]:g} in every row"
            raise table.refuse(what, "there is nothing to learn: name another --target")
    notes = [] if asked else [_detected(targets, kind, why)]
    if (asked or kind) == "regression":
        return "regression", (), notes
    classes = table.classes or labels
    if not classes:
        what = f"column {name!r} does not hold class numbers"
        raise table.refuse(what, "use --task regression")
    if len(classes) < 2:
        what = f"column {name!r} has one class, {classes[0]!r}"
        raise table.refuse(what, "there is nothing to learn: name another --target")
    return "classification", classes, notes


def _detected(targets: Sequence[str], kind: str, why: str) -> str:
    return f"detected from {', '.join(targets)!r}: {kind}, since {why} (--task changes it)"


def _task_of_numbers(
    numbers: NDArray[np.float64], *, real: bool
) -> tuple[str, str, tuple[str, ...]]:
    """The task, why, and the classes; none unless all numbers are whole."""
    there = np.unique(numbers[np.isfinite(numbers)])
    whole = bool((there == np.rint(there)).all())
    labels = [int(number) for number in there] if whole else []
    filled = labels == list(range(len(labels)))
    most = MOST_CLASSES if filled else MOST_CLASSES_WITH_GAPS
    if labels and labels[0] == 0 and labels[-1] < MOST_CLASSES:
        labels = list(range(labels[-1] + 1))
    classes = tuple(str(label) for label in labels)
    if real or not whole:
        doubt = ", though all values are whole numbers: they may be classes" if whole else ""
        return "regression", f"its values are real numbers{doubt}", classes
    if len(there) > most:
        return "regression", "it has many different whole numbers", classes
    return "classification", f"it has only {len(there)} different whole numbers", classes


def _task_of_several(
    table: RawTable, targets: Sequence[str], asked: str | None
) -> tuple[Task, tuple[str, ...], list[str]]:
    """The task of several target columns, or of an array of them."""
    values = _stack_targets(table, targets)
    width = int(values.shape[1])
    names = tuple(targets) if len(targets) > 1 else table.classes
    names = names or tuple(str(place) for place in range(width))
    if sparse.issparse(values):
        return "multi-label", names, []
    if asked == "classification":
        raise table.refuse(
            f"{targets[0]!r} has {width} columns", "classes need one: use --task multi-label"
        )
    kind: Task = "regression"
    why = "there are several numbers"
    if np.isin(values, (0, 1)).all():
        kind = "multi-label"
        why = "all values are 0 and 1"
    if asked:
        return ("multi-label" if asked == "multi-label" else "regression"), names, []
    return kind, names, [_detected(targets, kind, why)]


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
    import pandas

    strict = impute is not None
    check_columns(table, schema)
    if impute and impute not in IMPUTE:
        raise ValueError(f"impute must be one of {', '.join(IMPUTE)}, got {impute!r}")
    x = encode_columns(table, schema)
    y, readable = _targets(table, schema)
    labels, user = _users(table, schema)
    rows = pandas.DataFrame({"user": user, "readable": readable, "gap": _rows_with_gaps(x)})
    rows = rows.assign(time=_row_times(table, schema), test=_marked_rows(table, schema))
    incomplete = rows["gap"] | ~rows["readable"] | (rows["user"] < 0)
    rows["dropped"] = incomplete & (impute == DROP)
    notes = list(table.notes)
    if strict:
        _refuse_rows(table, schema, rows)
        notes += _gap_notes(table, schema, x, rows, impute or "")
    rows = rows[rows["readable"] & (rows["user"] >= 0) & ~rows["dropped"]]
    if strict:  # without users who have lost all of their rows
        places, present = pandas.factorize(rows["user"], sort=True)
        rows = rows.assign(user=places)
        labels = tuple(labels[place] for place in present)
        notes += _same_numbers(labels)
    # without a time that can be read a row is the user's first; equal ones stay as in the file
    rows = rows.sort_values(["user", "time"], na_position="first", kind="stable")
    offsets = np.searchsorted(rows["user"], np.arange(len(labels) + 1)).astype(np.intp)
    by_time = bool(schema.time)
    if schema.test:
        test = rows["test"].to_numpy() == 1
    else:
        split = Split(schema.test_fraction, schema.split_seed)
        test = split.mask(offsets, by_time=by_time)
        if strict:
            notes.append(split.words(by_time=by_time))
    order = rows.index.to_numpy()
    if strict:
        _refuse_test_only(table, labels, offsets, test, order)
    if len(order) < len(user) or (np.diff(order) != 1).any():
        x = x[order]
        y = y[order]
    if rows["gap"].any():
        x = _fill_gaps(x, rows["user"].to_numpy(), ~test, schema.missing)
    shape = next(iter(table.shapes.values()), ())
    if schema.picture:
        shape = schema.picture.shape
    return PerUser(
        source=table.source,
        x=x,
        y=y,
        test=test,
        offsets=offsets,
        users=labels,
        task=schema.task,
        outputs=schema.outputs,
        divisor=255.0 if schema.dtype == "uint8" else 1.0,
        feature_names=schema.feature_names() or table.feature_names,
        target_names=schema.classes,
        notes=tuple(dict.fromkeys(notes)),
        shape=shape,
        by_time=by_time,
        schema=schema,
        looked=looked,
    )


def check_columns(table: RawTable, schema: Schema) -> None:
    """ValueError unless the file has the columns of the schema, and no others."""
    listed = [column.name for column in schema.columns]
    for name in (*schema.special(), *listed):
        if name not in table.columns:
            what = missing_name(name, table.columns, "column")
            raise table.refuse(what, "the schema lists it: take it out, or add it to the file")
    known = {*schema.special(), *listed, "test"}
    for name in table.columns:
        if name not in known and not table.only_x:
            raise table.refuse(
                f"column {name!r} is not in the schema",
                f'add {name!r} = "left out" to its columns, or take it out of the file',
            )


def _users(table: RawTable, schema: Schema) -> tuple[tuple[str, ...], Indices]:
    """The users in order, and for each row the number of its user; −1 is nobody."""
    values = table.columns[schema.user]
    labels = schema.enrolled
    if labels is None:
        labels = _sorted_labels({word for word in as_texts(values)[0] if word})
    places = {label: place for place, label in enumerate(labels)}
    return labels, map_texts(values, lambda word: places.get(word, -1), -1)


def _same_numbers(labels: Sequence[str]) -> list[str]:
    """A note if users are written as the same number in two ways."""
    found: dict[float, list[str]] = {}
    for label in labels:
        number = as_number(label)
        if number is not None:
            found.setdefault(number, []).append(repr(label))
    several = [" and ".join(group) for group in found.values() if len(group) > 1]
    if not several:
        return []
    return [f"users are text: {', '.join(several[:MOST_SHOWN])} are not the same"]


def _targets(table: RawTable, schema: Schema) -> tuple[Values, NDArray[np.bool_]]:
    """Targets as in ``PerUser``, and which rows have one that can be read."""
    if schema.task == "classification":
        numbers = class_numbers(table.columns[schema.target[0]], schema.classes)
        return np.maximum(numbers, 0), numbers >= 0
    found = _stack_targets(table, schema.target)
    if found.shape[1] != schema.outputs:
        raise table.refuse(
            f"{schema.target[0]!r} has {found.shape[1]} columns and the schema {schema.outputs}",
            "give a file of that form, or another schema",
        )
    if sparse.issparse(found):
        return found, np.ones(found.shape[0], dtype=np.bool_)
    allowed = is_usable(found)
    if schema.task == "multi-label":
        allowed = np.isin(found, (0, 1))
    readable = np.asarray(allowed.all(axis=1))
    amounts = np.where(readable[:, None], found, 0.0)
    if schema.task == "multi-label":
        return sparse.csr_array(amounts), readable
    return (amounts[:, 0] if schema.outputs == 1 else amounts), readable


def class_numbers(values: Values, classes: Sequence[str]) -> NDArray[np.int64]:
    """The place of each value among the classes; −1 if it is none of them."""
    if np.ndim(values) == 2:
        values = np.asarray(values)[:, 0]
    order = {_plain_name(name): place for place, name in enumerate(classes)}
    return map_texts(values, lambda word: order.get(_plain_name(word), -1), -1)


def _plain_name(word: str) -> str:
    """A class as text: 1 for 1.0 and for 01."""
    number = as_number(word)
    if number is None or number != np.rint(number):
        return word
    return str(int(number))


def _row_times(table: RawTable, schema: Schema) -> NDArray[np.float64]:
    """Each row's time as a number; NaN if it cannot be read, 0 without a time column."""
    import pandas

    if not schema.time:
        return np.zeros(table.rows)
    values = table.columns[schema.time]
    is_date = values.dtype.kind == "M"
    if not is_date and not is_text(values):
        return as_numbers(values)
    series = pandas.Series(values)
    dates = pandas.to_datetime(series, utc=True, errors="coerce", format="ISO8601")
    seconds = (dates - pandas.Timestamp(0, tz="UTC")).dt.total_seconds().to_numpy()
    if is_date:
        return np.asarray(seconds)
    numbers = as_numbers(values, table.decimal)
    return np.where(np.isfinite(numbers), numbers, seconds)


def _marked_rows(table: RawTable, schema: Schema) -> NDArray[np.intp]:
    """1 for test rows, 0 for training rows, −1 for neither; all 0 without a column that says so."""
    if not schema.test:
        return np.zeros(table.rows, dtype=np.intp)
    values = table.columns[schema.test]
    return map_texts(values, lambda word: TEST_WORDS.get(_plain_name(word.lower()), -1), -1)


def _refuse_rows(table: RawTable, schema: Schema, rows: Values) -> None:
    """ValueError that names the first row without a user, target, time or mark."""
    kept = rows[~rows["dropped"]]
    remedy = "--impute drop leaves such rows out"
    table.refuse_first(kept["user"] < 0, f"column {schema.user!r} is empty", remedy)
    target = ", ".join(schema.target)
    kinds = {
        "classification": f"column {target!r} is empty",
        "multi-label": f"{target!r} is neither 0 nor 1",
        "regression": f"column {target!r} is not a finite number",
    }
    table.refuse_first(~kept["readable"], kinds[schema.task], remedy)
    unknown = kept["time"].isna()
    if unknown.any():
        value = table.columns[schema.time][unknown.idxmax()]
        what = f"column {schema.time!r} is not a time ({str(value)!r})"
        table.refuse_first(unknown, what, "write 2024-01-31 or a number")
    what = f"column {schema.test!r} is neither 0 nor 1"
    remedy = "1 marks the rows of the test part (--set test-fraction=0.2 chooses others)"
    table.refuse_first(kept["test"] < 0, what, remedy)


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


# --- gaps


def _rows_with_gaps(x: Values) -> NDArray[np.bool_]:
    """Which rows have a feature that is missing or not finite."""
    if sparse.issparse(x):
        rows = np.repeat(np.arange(x.shape[0]), np.diff(x.indptr))
        found = np.zeros(x.shape[0], dtype=np.bool_)
        found[rows[~is_usable(x.data)]] = True
        return found
    if x.dtype.kind in "biu":
        return np.zeros(len(x), dtype=np.bool_)
    return np.asarray(~is_usable(x).all(axis=1))


def _gap_notes(table: RawTable, schema: Schema, x: Values, rows: Values, impute: str) -> list[str]:
    """What is done about gaps; ValueError if there is no rule."""
    names = schema.feature_names()
    if impute == DROP:
        if rows["dropped"].all():
            raise table.refuse("every row has a gap", "use --impute own-mean, or --exclude")
        count = count_of(int(rows["dropped"].sum()), "row")
        note = f"left out {count} with gaps, or without a user or a target (impute = drop)"
        return [note] if rows["dropped"].any() else []
    places = np.flatnonzero(rows["gap"])
    if not len(places):
        return []
    taken = x[places].toarray() if sparse.issparse(x) else x[places]
    gaps = ~is_usable(taken)
    if not impute:
        place = int(np.argmax(gaps[0]))
        name = f"column {names[place]!r}" if names else f"x, feature {place},"
        exclude = f", or --exclude {names[place]}" if names else ""
        remedy = f"add --impute with one of {', '.join(IMPUTE)}{exclude}"
        raise table.refuse(f"{name} is not a finite number", remedy, int(places[0]))
    counts = gaps.sum(axis=0)
    columns = [f"{names[place]!r} ({counts[place]:,})" for place in np.flatnonzero(counts) if names]
    where = f": {list_names(columns)}" if columns else ""
    filled = f"filled with {MISSING[impute]} (--impute {impute})"
    return [f"gaps in {count_of(len(places), 'row')}, {filled}{where}"]


def _fill_gaps(x: Values, user: Indices, trained: NDArray[np.bool_], missing: str) -> Values:
    """x, sorted by user, with 0 or the mean of the user's own training rows in its gaps."""
    import pandas

    if sparse.issparse(x):
        x = x.copy()
        x.data[~is_usable(x.data)] = 0.0
        return x
    x = np.array(x, dtype=np.float64)
    columns = np.flatnonzero(~is_usable(x).all(axis=0))
    found = x[:, columns]
    found[~is_usable(found)] = np.nan
    if missing == OWN_MEAN:
        known = pandas.DataFrame(found[trained])
        means = known.groupby(user[trained]).mean()
        of_rows = means.reindex(user).to_numpy()
        found = np.where(np.isnan(found), of_rows, found)
    x[:, columns] = np.nan_to_num(found)
    return x
