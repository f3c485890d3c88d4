"""The users of a .csv or .parquet file."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.lab.data.columns import Columns, known, with_test_part
from flwr_ppsgd.lab.data.features import features_of
from flwr_ppsgd.lab.data.frames import (
    Column,
    Frame,
    frame_of,
    give_back_memory,
    lookup,
    origin_of,
    plain,
    times,
)
from flwr_ppsgd.lab.data.per_user import PerUser, Task
from flwr_ppsgd.lab.data.raw import Numbered, Origin, Raw, is_missing, numbered
from flwr_ppsgd.lab.data.split import Indices, Split


def read_table(
    path: Path,
    columns: Columns,
    split: Split | None,
    task: Task | None,
) -> PerUser:
    """The users of a .csv or .parquet file."""
    raw = raw_table(path, columns, split)
    give_back_memory()  # before rows are sorted
    return raw.assemble(task)


def raw_table(path: Path, columns: Columns, split: Split | None) -> Raw:
    """The columns of a .csv or .parquet file, unchecked."""
    frame, notes = frame_of(path, columns)
    return raw_of(frame, notes, columns, split, origin_of(path))


def raw_of(
    frame: Frame,
    name_notes: tuple[str, ...],
    columns: Columns,
    split: Split | None,
    origin: Origin,
) -> Raw:
    """The columns of a table, unchecked.

    Args:
        frame: the table.
        name_notes: on names that were changed.
        columns: what its columns are called.
        split: chooses the test part in place of a test column.
        origin: where the table comes from.
    """
    path = Path(origin.source)
    users, found = _users(lookup(frame, columns.user, path), columns.user, origin)
    targets = []
    for name in columns.target.split(","):
        targets.append(known(name.strip(), frame.column_names, path, "column"))
    special = {columns.user, *targets, "test", columns.test, columns.time}
    features = features_of(frame, columns, special, origin)
    raw = Raw(
        source=origin.source,
        user=users,
        x=features.x,
        y=_targets(frame, targets),
        user_name=columns.user,
        target_name=columns.target,
        feature_names=features.names,
        target_names=tuple(targets) if len(targets) > 1 else (),
        labels=found.labels,
        row_word=origin.row_word,
        first_row=origin.first_row,
        impute=columns.impute,
        notes=(*name_notes, *found.notes, *features.notes),
    )
    return with_test_part(raw, _test_columns(frame, columns, origin), columns, split, path)


def _users(column: Column, name: str, origin: Origin) -> tuple[Indices, Numbered]:
    """For each row the number of its user, and the users' labels."""
    coded = column.combine_chunks().dictionary_encode()
    values = coded.dictionary.to_pylist()
    missing = [place for place, value in enumerate(values) if is_missing(value)]
    codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.intp)
    gaps = np.flatnonzero((codes < 0) | np.isin(codes, missing))
    if gaps.size:
        raise origin.refuse(f"column {name!r} is empty", "every row needs its user", int(gaps[0]))
    found = numbered(values, f"users in column {name!r}")
    return found.places[codes], found


def _targets(frame: Frame, names: list[str]) -> NDArray[Any]:
    """One column, or several side by side."""
    if len(names) == 1:
        return plain(frame.column(names[0]))
    return np.stack([plain(frame.column(name)) for name in names], axis=1)


def _test_columns(frame: Frame, columns: Columns, origin: Origin) -> dict[str, NDArray[Any]]:
    """The columns that mark or order the test part, by name."""
    path = Path(origin.source)
    found = {}
    for name in frame.column_names:
        if name in {"test", columns.test}:
            found[str(name)] = plain(frame.column(name))
    if columns.time is not None:
        column = lookup(frame, columns.time, path)
        found[columns.time] = times(column, columns.time, origin)
    elif columns.test is not None:
        lookup(frame, columns.test, path)
    return found
