"""Per-user data in .csv and .parquet files, by way of pandas."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.data.columns import Columns, known, with_test_part
from flwr_ppsgd.data.per_user import PerUser, Task
from flwr_ppsgd.data.raw import Raw, Split


def read_frame(path: Path, columns: Columns, split: Split | None, task: Task | None) -> PerUser:
    frame = frame_of(path, columns.user)
    targets = [known(name.strip(), frame.columns, path, "column") for name in columns.target.split(",")]
    special = {known(columns.user, frame.columns, path, "column"), *targets, "test", columns.test, columns.time}
    features, notes = _feature_columns(frame, columns, special, path)
    target = frame[targets[0]] if len(targets) == 1 else frame[targets]
    raw = Raw(
        source=str(path),
        user=_labels(frame[columns.user]),
        x=frame[features].to_numpy(np.float64, na_value=np.nan),
        y=_plain(target),
        user_name=columns.user,
        target_name=columns.target,
        feature_names=tuple(features),
        target_names=tuple(targets) if len(targets) > 1 else (),
        row_word=_counting(path)[0],
        first_row=_counting(path)[1],
        notes=notes,
    )
    found = {str(name): _plain(frame[name]) for name in frame.columns if name in {"test", columns.test}}
    if columns.time is not None:
        found[columns.time] = _times(frame[known(columns.time, frame.columns, path, "column")], raw)
    elif columns.test is not None:
        known(columns.test, frame.columns, path, "column")
    return with_test_part(raw, found, columns, split, path).assemble(task)


def frame_of(path: Path, user: str | None = None) -> Any:
    """A pandas table; users are read as text, so that 007 and 7 stay two."""
    pandas = need_module("pandas", f"{path}: a {path.suffix} file")
    if path.suffix.lower() == ".parquet":
        need_module("pyarrow", f"{path}: a .parquet file")
    try:
        if path.suffix.lower() == ".parquet":
            return pandas.read_parquet(path)
        return pandas.read_csv(path, dtype={user: str} if user else None, skip_blank_lines=False)
    except Exception as error:  # each engine has errors of its own
        line = " ".join(str(error).split())
        raise ValueError(
            f"{path}: cannot be read as {path.suffix[1:]}: {line}: check or export the file again"
        ) from None


def need_module(name: str, for_what: str) -> ModuleType:
    """An optional package, or one line on how to get it."""
    try:
        return __import__(name)
    except ImportError:
        raise ValueError(
            f"{for_what} needs the package {name!r}, which is not installed: pip install 'flwr-ppsgd[data]'"
        ) from None


def _feature_columns(frame: Any, columns: Columns, special: set[Any], path: Path) -> tuple[list[str], tuple[str, ...]]:
    numeric = [name for name in frame.columns if frame[name].dtype.kind in "biuf"]
    if columns.features is not None:
        for name in columns.features:
            if known(name, frame.columns, path, "column") not in numeric:
                where = _first_word(frame[name], path)
                raise ValueError(f"{path}: feature column {name!r} is not numeric, {where}: encode it as numbers")
        return list(columns.features), ()
    others = [name for name in frame.columns if name not in special and name not in numeric]
    listed = ", ".join(f"{name!r} ({_first_word(frame[name], path)})" for name in others)
    return [name for name in numeric if name not in special], (f"left out, not numeric: {listed}",) if others else ()


def _counting(path: Path) -> tuple[str, int]:
    """How messages count rows: a .csv has a header, and is looked at by lines."""
    return ("line", 2) if path.suffix.lower() == ".csv" else ("row", 0)


def _first_word(column: Any, path: Path) -> str:
    """The first value that is not a number, and where it is."""
    word, first = _counting(path)
    for row, value in enumerate(column.tolist()):
        try:
            float(value)
        except (TypeError, ValueError):
            return f"{str(value)[:30]!r} in {word} {row + first}"
    return f"type {column.dtype}"


def _labels(column: Any) -> NDArray[Any]:
    """Users' labels; as numbers where all of them are whole numbers as one writes them."""
    values = _plain(column)
    texts = values.tolist()
    if all(isinstance(text, str) and text.isdecimal() and str(int(text)) == text for text in texts):
        return np.array([int(text) for text in texts])
    return values


def _plain(column: Any) -> NDArray[Any]:
    """Numbers as numbers, with gaps as NaN; all else as objects, with gaps as None."""
    values: NDArray[Any] = column.to_numpy()
    if values.dtype.kind in "biuf":
        return values
    kinds = [column.dtype.kind] if column.ndim == 1 else [dtype.kind for dtype in column.dtypes]
    if all(kind in "biuf" for kind in kinds):
        return column.to_numpy(np.float64, na_value=np.nan)  # type: ignore[no-any-return]
    plain: NDArray[Any] = column.astype(object).where(column.notna(), None).to_numpy()
    return plain


def _times(column: Any, raw: Raw) -> NDArray[Any]:
    """Numbers, or dates as numbers; a gap is NaN."""
    pandas = need_module("pandas", raw.source)
    if column.dtype.kind in "iuf":
        return column.to_numpy()  # type: ignore[no-any-return]
    dates = pandas.to_datetime(column, format="ISO8601", errors="coerce", utc=True)
    wrong = np.flatnonzero((dates.isna() & column.notna()).to_numpy())
    if wrong.size:
        value = column.iloc[int(wrong[0])]
        raise raw.refuse(
            f"column {column.name!r} is not a time ({value!r})", "write 2024-01-31 or a number", int(wrong[0])
        )
    return np.where(dates.isna(), np.nan, dates.astype("int64").to_numpy())
