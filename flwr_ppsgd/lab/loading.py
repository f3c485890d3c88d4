"""Read everyone's rows from a file by a schema, sort them by user, and mark the test part."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.lab.features import (
    as_numbers,
    as_texts,
    count_of,
    encode_columns,
    is_text,
    is_usable,
    list_names,
    map_texts,
    sorted_labels,
    stack_targets,
)
from flwr_ppsgd.lab.find_schema import find_schema, list_findings
from flwr_ppsgd.lab.per_user import Indices, PerUser, held_out_rows
from flwr_ppsgd.lab.problem import DROP, IMPUTE, Problem
from flwr_ppsgd.lab.public import is_public, read_public
from flwr_ppsgd.lab.schema import MISSING, OWN_MEAN, Schema
from flwr_ppsgd.lab.tables import RawTable, Values, as_number, missing_name, read_table_file
from flwr_ppsgd.settings import split_names

MOST_SHOWN = 3
TEST_WORDS = {"1": 1, "true": 1, "test": 1, "0": 0, "false": 0, "train": 0}


def load(problem: Problem) -> PerUser:
    """The users of a problem's data, with their rows as they are in the source.

    The source is a .csv, .parquet or .npz file, or one of ``public``.
    """
    source = Path(problem.data)
    if problem.schema:
        schema = Schema.read(Path(problem.schema))
        if is_public(problem.data):
            return group_by_user(read_public(problem), schema)
        # as text, so that no word in a row changes how other rows are read
        written = (schema.encoding, schema.separator, schema.decimal)
        return group_by_user(read_table_file(source, None, *written), schema)
    if is_public(problem.data):
        table = read_public(problem)
    else:
        text = [problem.user_column or "user"]
        text += split_names(problem.categorical_columns)
        text += split_names(problem.text_columns)
        table = read_table_file(source, text, problem.encoding)
    schema, notes = find_schema(table, problem)
    table = replace(table, notes=(*table.notes, *notes))
    data = group_by_user(table, schema, impute=problem.impute)
    data = replace(data, looked=list_findings(schema, problem))
    if problem.users is not None and problem.users < len(data):
        data = data.only(range(problem.users))
    return data.with_at_least(problem.min_train)


def group_by_user(table: RawTable, schema: Schema, *, impute: str | None = None) -> PerUser:
    """Everyone's rows, sorted by user, with a test part for each.

    A declared schema is applied without notes or errors about rows: a row without an enrolled user
    or a readable target is dropped, and no user is left out.

    Args:
        table: the columns of a file.
        schema: their kinds.
        impute: None for a declared schema. If the schema was found in this file, a row that does
            not fit it is refused with its line; gaps are handled by this rule of ``IMPUTE``, and
            refused if it is "".
    """
    _check_columns(table, schema)
    x = encode_columns(table, schema)
    y, readable = _read_targets(table, schema)
    labels, rows = _row_facts(table, schema, readable, _rows_with_gaps(x))
    notes = list(table.notes)
    if impute is not None:
        rows, more = _check_rows(table, schema, rows, x, impute)
        notes += more
    rows = rows[rows["readable"] & (rows["user"] >= 0)]
    if impute is not None:
        present = np.unique(rows["user"])  # without users who have lost all of their rows
        labels = tuple(labels[place] for place in present)
        rows = rows.assign(user=np.searchsorted(present, rows["user"]))
        notes += _note_same_numbers(labels)
    # without a time that can be read a row is the user's first; equal ones stay as in the file
    rows = rows.sort_values(["user", "time"], na_position="first", kind="stable")
    offsets = np.searchsorted(rows["user"], np.arange(len(labels) + 1)).astype(np.intp)
    order = rows.index.to_numpy()
    if schema.test:
        test = rows["test"].to_numpy() == 1
        if impute is not None:
            _refuse_test_only(table, labels, offsets, test, order)
    else:
        seed = None if schema.time else schema.split_seed
        test = held_out_rows(offsets, schema.test_fraction, seed)
        if impute is not None:
            which = "the last" if schema.time else "a random"
            notes.append(f"test part: {which} {schema.test_fraction:.0%} of each user's rows")
    if len(order) < table.rows or (np.diff(order) != 1).any():
        x = x[order]
        y = y[order]
    if rows["gap"].any():
        x = _fill_gaps(x, rows["user"].to_numpy(), ~test, schema.missing)
    shape = next(iter(table.shapes.values()), ())
    return PerUser(
        source=table.source,
        x=x,
        y=y,
        test=test,
        offsets=offsets,
        users=labels,
        schema=schema,
        divisor=255.0 if schema.dtype == "uint8" else 1.0,
        feature_names=schema.feature_names() or table.feature_names,
        notes=tuple(dict.fromkeys(notes)),
        shape=schema.picture.shape if schema.picture else shape,
    )


def _check_columns(table: RawTable, schema: Schema) -> None:
    """ValueError unless the file has the columns of the schema, and no others."""
    listed = [column.name for column in schema.columns]
    for name in (*schema.special_columns(), *listed):
        if name not in table.columns:
            what = missing_name(name, table.columns, "column")
            raise table.refuse(what, "the schema lists it: take it out, or add it to the file")
    known = {*schema.special_columns(), *listed, "test"}
    for name in table.columns:
        if name not in known and not table.only_x:
            raise table.refuse(
                f"column {name!r} is not in the schema",
                f'add {name!r} = "left out" to its columns, or take it out of the file',
            )


def _row_facts(
    table: RawTable, schema: Schema, readable: NDArray[np.bool_], gap: NDArray[np.bool_]
) -> tuple[tuple[str, ...], Values]:
    """The users in order, and a data frame with a line for each row.

    Its columns: the number of the user, −1 for nobody; whether the target can be read; whether a
    feature is missing; the time; the mark of test rows.
    """
    import pandas

    values = table.columns[schema.user]
    labels = schema.enrolled
    if labels is None:
        words, _ = as_texts(values)
        known = {word for word in words if word}
        labels = sorted_labels(known)
    places = {label: place for place, label in enumerate(labels)}
    facts = {
        "user": map_texts(values, lambda word: places.get(word, -1), -1),
        "readable": readable,
        "gap": gap,
        "time": _row_times(table, schema),
        "test": _test_marks(table, schema),
    }
    return labels, pandas.DataFrame(facts)


def _note_same_numbers(labels: Sequence[str]) -> list[str]:
    """A note if users are written as the same number in two ways."""
    groups: dict[float, list[str]] = {}
    for label in labels:
        number = as_number(label)
        if number is not None:
            groups.setdefault(number, []).append(repr(label))
    several = [" and ".join(group) for group in groups.values() if len(group) > 1]
    if not several:
        return []
    return [f"users are text: {', '.join(several[:MOST_SHOWN])} are not the same"]


def _read_targets(table: RawTable, schema: Schema) -> tuple[Values, NDArray[np.bool_]]:
    """Targets as in ``PerUser``, and which rows have a readable one."""
    if schema.task == "classification":
        numbers = class_numbers(table.columns[schema.target[0]], schema.classes)
        return np.maximum(numbers, 0), numbers >= 0
    y = stack_targets(table, schema.target)
    if y.shape[1] != schema.outputs:
        raise table.refuse(
            f"{schema.target[0]!r} has {y.shape[1]} columns and the schema {schema.outputs}",
            "give a file of that form, or another schema",
        )
    if sparse.issparse(y):
        return y, np.ones(y.shape[0], dtype=np.bool_)
    allowed = is_usable(y)
    if schema.task == "multi-label":
        allowed = np.isin(y, (0, 1))
    readable = np.asarray(allowed.all(axis=1))
    y = np.where(readable[:, None], y, 0.0)
    if schema.task == "multi-label":
        return sparse.csr_array(y), readable
    return (y[:, 0] if schema.outputs == 1 else y), readable


def class_numbers(values: Values, classes: Sequence[str]) -> NDArray[np.int64]:
    """The place of each value among the classes; −1 if it is none of them."""
    if np.ndim(values) == 2:
        values = np.asarray(values)[:, 0]
    order = {_plain_label(name): place for place, name in enumerate(classes)}

    def place_of_class(word: str) -> int:
        return order.get(_plain_label(word), -1)

    return map_texts(values, place_of_class, -1)


def _plain_label(word: str) -> str:
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


def _test_marks(table: RawTable, schema: Schema) -> NDArray[np.intp]:
    """1 for test rows, 0 for training rows, −1 for neither; all 0 without a column that says so."""
    if not schema.test:
        return np.zeros(table.rows, dtype=np.intp)

    def mark_of(word: str) -> int:
        plain = _plain_label(word.lower())
        return TEST_WORDS.get(plain, -1)

    return map_texts(table.columns[schema.test], mark_of, -1)


def _check_rows(
    table: RawTable, schema: Schema, rows: Values, x: Values, impute: str
) -> tuple[Values, list[str]]:
    """The rows that ``impute`` keeps, and notes.

    ValueError with the first row without a user, target, time or mark, or with a gap without a
    rule.
    """
    notes = []
    if impute == DROP:
        whole = rows["readable"] & (rows["user"] >= 0) & rows["time"].notna() & ~rows["gap"]
        what = "with gaps, or without a user, target or time"
        if not whole.any():
            raise table.refuse(f"every row is {what}", "use --impute own-mean, or --exclude")
        if not whole.all():
            lost = count_of(int((~whole).sum()), "row")
            notes.append(f"left out {lost} {what} (impute = drop)")
        rows = rows[whole]
    target = ", ".join(schema.target)
    unreadable = {
        "classification": f"column {target!r} is empty",
        "multi-label": f"{target!r} is neither 0 nor 1",
        "regression": f"column {target!r} is not a finite number",
    }
    remedy = "--impute drop leaves such rows out"
    table.refuse_first(rows["user"] < 0, f"column {schema.user!r} is empty", remedy)
    table.refuse_first(~rows["readable"], unreadable[schema.task], remedy)
    no_time = rows["time"].isna()
    if no_time.any():
        value = table.columns[schema.time][no_time.idxmax()]
        what = f"column {schema.time!r} is not a time ({str(value)!r})"
        remedy = "write 2024-01-31 or a number, or leave such rows out with --impute drop"
        table.refuse_first(no_time, what, remedy)
    remedy = "1 marks the rows of the test part (--set test-fraction=0.2 chooses others)"
    what = f"column {schema.test!r} is neither 0 nor 1"
    table.refuse_first(rows["test"] < 0, what, remedy)
    places = rows.index[rows["gap"]].to_numpy()
    if len(places):
        notes.append(_gap_note(table, schema, x, places, impute))
    return rows, notes


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
        row_of_value = np.repeat(np.arange(x.shape[0]), np.diff(x.indptr))
        has_gap = np.zeros(x.shape[0], dtype=np.bool_)
        has_gap[row_of_value[~is_usable(x.data)]] = True
        return has_gap
    if x.dtype.kind in "biu":
        return np.zeros(len(x), dtype=np.bool_)
    return np.asarray(~is_usable(x).all(axis=1))


def _gap_note(table: RawTable, schema: Schema, x: Values, places: Indices, impute: str) -> str:
    """How the gaps in these rows are filled; ValueError without a rule for them."""
    taken = x[places].toarray() if sparse.issparse(x) else x[places]
    gaps = ~is_usable(taken)
    names = schema.feature_names()
    if not impute:
        place = int(np.argmax(gaps[0]))
        name = f"column {names[place]!r}" if names else f"x, feature {place},"
        exclude = f", or --exclude {names[place]}" if names else ""
        remedy = f"add --impute with one of {', '.join(IMPUTE)}{exclude}"
        raise table.refuse(f"{name} is not a finite number", remedy, int(places[0]))
    note = f"gaps in {count_of(len(places), 'row')}, filled with {MISSING[impute]}"
    note += f" (--impute {impute})"
    if not names:
        return note
    counts = gaps.sum(axis=0)
    columns = [f"{names[place]!r} ({counts[place]:,})" for place in np.flatnonzero(counts)]
    return f"{note}: {list_names(columns)}"


def _fill_gaps(x: Values, user: Indices, trained: NDArray[np.bool_], missing: str) -> Values:
    """x, sorted by user, with 0 or the mean of the user's own training rows in its gaps."""
    import pandas

    if sparse.issparse(x):
        x = x.copy()
        x.data[~is_usable(x.data)] = 0.0
        return x
    x = np.array(x, dtype=np.float64)
    columns = np.flatnonzero(~is_usable(x).all(axis=0))
    values = x[:, columns]
    values[~is_usable(values)] = np.nan
    if missing == OWN_MEAN:
        known = pandas.DataFrame(values[trained])
        means = known.groupby(user[trained]).mean()
        means_by_row = means.reindex(user).to_numpy()
        values = np.where(np.isnan(values), means_by_row, values)
    x[:, columns] = np.nan_to_num(values)
    return x
