"""Per-user data in .csv and .parquet files, by way of pandas."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.data.columns import Columns, known, with_test_part
from flwr_ppsgd.data.per_user import PerUser, Task
from flwr_ppsgd.data.raw import Raw, Split

NUMERIC = "biuf"  # numpy's kinds: booleans, whole numbers, real numbers


def read_frame(
    path: Path,
    columns: Columns,
    split: Split | None,
    task: Task | None,
) -> PerUser:
    """The users of a .csv or .parquet file."""
    frame = frame_of(path, columns.user)
    targets = []
    for name in columns.target.split(","):
        targets.append(known(name.strip(), frame.columns, path, "column"))
    user = known(columns.user, frame.columns, path, "column")
    special = {user, *targets, "test", columns.test, columns.time}
    features, notes = _feature_columns(
        frame,
        columns,
        special,
        path,
    )
    several = len(targets) > 1
    row_word, first_row = _counting(path)
    raw = Raw(
        source=str(path),
        user=_labels(frame[user]),
        x=frame[features].to_numpy(np.float64, na_value=np.nan),
        y=_plain(frame[targets] if several else frame[targets[0]]),
        user_name=columns.user,
        target_name=columns.target,
        feature_names=tuple(features),
        target_names=tuple(targets) if several else (),
        row_word=row_word,
        first_row=first_row,
        notes=notes,
    )
    found = _test_columns(frame, columns, raw, path)
    return with_test_part(raw, found, columns, split, path).assemble(task)


def frame_of(path: Path, user: str | None = None) -> Any:
    """A pandas table.

    Args:
        path: a .csv or .parquet file.
        user: the column of users. It is read as text, so that 007 and 7 stay two users.
    """
    kind = path.suffix.lower()
    pandas = need_module("pandas", f"{path}: a {path.suffix} file")
    if kind == ".parquet":
        need_module("pyarrow", f"{path}: a .parquet file")
    try:
        if kind == ".parquet":
            return pandas.read_parquet(path)
        types = {user: str} if user else None
        return pandas.read_csv(path, dtype=types, skip_blank_lines=False)
    except Exception as error:  # each engine has errors of its own
        line = " ".join(str(error).split())
        raise ValueError(
            f"{path}: cannot be read as {path.suffix[1:]}: {line}: check or export the file again"
        ) from None


def need_module(name: str, for_what: str) -> ModuleType:
    """An optional package; ValueError with the pip command if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(
            f"{for_what} needs the package {name!r}, which is not installed: pip install "
            "'flwr-ppsgd[data]'"
        ) from None


def _test_columns(
    frame: Any,
    columns: Columns,
    raw: Raw,
    path: Path,
) -> dict[str, NDArray[Any]]:
    """The columns that mark or order the test part, by name."""
    found = {}
    for name in frame.columns:
        if name in {"test", columns.test}:
            found[str(name)] = _plain(frame[name])
    if columns.time is not None:
        time = known(
            columns.time,
            frame.columns,
            path,
            "column",
        )
        found[time] = _times(frame[time], raw)
    elif columns.test is not None:
        known(columns.test, frame.columns, path, "column")
    return found


def _feature_columns(
    frame: Any,
    columns: Columns,
    special: set[Any],
    path: Path,
) -> tuple[list[str], tuple[str, ...]]:
    """The names of the features, and a note on the columns that are left out."""
    numeric = [name for name in frame.columns if frame[name].dtype.kind in NUMERIC]
    if columns.features is not None:
        for name in columns.features:
            if known(name, frame.columns, path, "column") not in numeric:
                where = _first_word(frame[name], path)
                raise ValueError(
                    f"{path}: feature column {name!r} is not numeric, {where}: encode it as numbers"
                )
        return list(columns.features), ()
    features = [name for name in numeric if name not in special]
    left_out = []
    for name in frame.columns:
        if name not in special and name not in numeric:
            left_out.append(f"{name!r} ({_first_word(frame[name], path)})")
    if not left_out:
        return features, ()
    return features, (f"left out, not numeric: {', '.join(left_out)}",)


def _counting(path: Path) -> tuple[str, int]:
    """How messages count rows: in a .csv by lines, below the header."""
    if path.suffix.lower() == ".csv":
        return "line", 2
    return "row", 0


def _first_word(column: Any, path: Path) -> str:
    """The first value that is not a number, and where it is."""
    word, first = _counting(path)
    for row, value in enumerate(column.tolist()):
        try:
            float(value)
        except (TypeError, ValueError):
            shown = str(value)[:30]
            return f"{shown!r} in {word} {row + first}"
    return f"type {column.dtype}"


def _labels(column: Any) -> NDArray[Any]:
    """Users' labels, as numbers if all of them are whole numbers without leading zeros."""
    values = _plain(column)
    texts = values.tolist()
    if all(_is_plain_number(text) for text in texts):
        return np.array([int(text) for text in texts])
    return values


def _is_plain_number(text: object) -> bool:
    return isinstance(text, str) and text.isdecimal() and str(int(text)) == text


def _plain(column: Any) -> NDArray[Any]:
    """Numbers as numbers, with gaps as NaN; all else as objects, with gaps as None.

    Args:
        column: one column, or a table of several.
    """
    values: NDArray[Any] = column.to_numpy()
    if values.dtype.kind in NUMERIC:
        return values
    dtypes = [column.dtype] if column.ndim == 1 else list(column.dtypes)
    if all(dtype.kind in NUMERIC for dtype in dtypes):
        return column.to_numpy(np.float64, na_value=np.nan)  # type: ignore[no-any-return]
    objects = column.astype(object)
    plain: NDArray[Any] = objects.where(column.notna(), None).to_numpy()
    return plain


def _times(column: Any, raw: Raw) -> NDArray[Any]:
    """Numbers, or dates as numbers; a gap is NaN."""
    pandas = need_module("pandas", raw.source)
    if column.dtype.kind in "iuf":
        return column.to_numpy()  # type: ignore[no-any-return]
    dates = pandas.to_datetime(
        column,
        format="ISO8601",
        errors="coerce",
        utc=True,
    )
    unread = dates.isna() & column.notna()
    wrong = np.flatnonzero(unread.to_numpy())
    if wrong.size:
        row = int(wrong[0])
        value = column.iloc[row]
        raise raw.refuse(
            f"column {column.name!r} is not a time ({value!r})",
            "write 2024-01-31 or a number",
            row,
        )
    return np.where(dates.isna(), np.nan, dates.astype("int64").to_numpy())
