"""Own data: .npz, .csv and .parquet files with a user column."""

import difflib
import json
import math
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.data.per_user import PerUser, Table, Task
from flwr_ppsgd.data.raw import Raw, Split

Arrays = dict[str, NDArray[Any]]
ABOUT = ("users", "task", "outputs", "feature_names", "target_names", "notes")  # in a written file, as JSON


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What the columns of a file (or the arrays of an .npz) are called.

    target: several names separated by commas are several targets. test: marks the rows of the test part; default
    "test" where there is such a column and no other split is asked for. time: each user's last rows are the test part.
    features: default all other numeric columns; an .npz has ``x``, or CSR in ``indptr, indices, counts | data``.
    """

    user: str = "user"
    target: str = "y"
    test: str | None = None
    time: str | None = None
    features: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.test is not None and self.time is not None:
            raise ValueError("give a test column or a time column, not both: either one decides the test part")


def read(
    path: str | Path,
    columns: Columns | None = None,
    *,
    split: Split | None = None,
    task: Task | None = None,
    min_train: int = 1,
) -> PerUser:
    """The users of a .npz, .csv or .parquet file; print ``describe()`` to see what was found.

    split: in place of a test column. task: in place of detecting it. min_train: leave out users with fewer training
    rows; a note names them. Bytes (uint8) are seen by a model as x/255, unless ``standardised``.
    """
    path, columns = Path(path), columns or Columns()
    readers: dict[str, Callable[[Path, Columns, Split | None, Task | None], PerUser]] = {
        ".npz": _read_npz,
        ".csv": _read_frame,
        ".parquet": _read_frame,
    }
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path}: data must be a file that ends in {', '.join(readers)}: convert it to one of them")
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file: check the name")
    if split is not None and columns.test is not None:
        raise ValueError(f"{path}: test column {columns.test!r} and a split are both given: give one of them")
    return readers[path.suffix.lower()](path, columns, split, task).with_at_least(min_train)


def mean_of_one_hots(counts: sparse.csr_array, lengths: NDArray[Any] | None = None) -> sparse.csr_array:
    """Counts divided by the document's length: the paper's features of a bag of words.

    lengths: words of each document, those out of the vocabulary too; where they are unknown, the sum of the counts.
    """
    totals = np.asarray(counts.sum(axis=1) if lengths is None else lengths, dtype=np.float64)
    data = counts.data / np.repeat(totals, np.diff(counts.indptr))
    return sparse.csr_array((data, counts.indices, counts.indptr), shape=counts.shape)


def public_statistics(path: str | Path, data: PerUser) -> tuple[Vector, Vector]:
    """(mean, std) for ``data.standardised``: from an .npz with ``mean, std`` or a .csv with ``feature, mean, std``."""
    path = Path(path)
    if path.suffix == ".npz":
        arrays = _arrays(path)
        mean, std = (_need(arrays, key, path, "array") for key in ("mean", "std"))
        return np.asarray(mean, dtype=np.float64), np.asarray(std, dtype=np.float64)
    if not data.feature_names:
        raise ValueError(f"{path}: the features of {data.source} have no names: give an .npz with mean and std")
    frame = _frame(path)
    for key in ("feature", "mean", "std"):
        _known(key, frame.columns, path, "column")
    frame = frame.set_index("feature")
    for name in data.feature_names:
        _known(name, frame.index, path, "feature")
    mean, std = frame["mean"], frame["std"]
    names = list(data.feature_names)
    return mean.loc[names].to_numpy(np.float64), std.loc[names].to_numpy(np.float64)


def write_npz(data: PerUser, path: str | Path) -> None:
    """A file that ``read`` gives back as it was; there is never a half-written one."""
    path = Path(path)
    about = {name: getattr(data, name) for name in ABOUT}
    about |= {"mean": np.asarray(data.mean).tolist(), "std": np.asarray(data.std).tolist(), "bias": data.bias}
    arrays: dict[str, Any] = {
        "user": np.repeat(np.arange(len(data), dtype=np.int32), np.diff(data.offsets)),
        "test": data.test,
        "per_user": np.array(json.dumps(about)),
    }
    if data.is_sparse:
        arrays |= {key: getattr(data.x, key) for key in ("indptr", "indices", "data", "shape")}
    else:
        arrays["x"] = data.x
    if data.task == "multi-label":
        arrays |= {"tag_indptr": data.y.indptr, "tag_indices": data.y.indices}
    else:
        arrays["y"] = data.y
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}.", suffix=".npz", delete=False) as file:
        try:
            np.savez(file, **arrays)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def need_module(name: str, for_what: str) -> ModuleType:
    """An optional package, or one line on how to get it."""
    try:
        return __import__(name)
    except ImportError:
        raise ValueError(
            f"{for_what} needs the package {name!r}, which is not installed: pip install 'flwr-ppsgd[data]'"
        ) from None


def _read_npz(path: Path, columns: Columns, split: Split | None, task: Task | None) -> PerUser:
    if columns.features is not None:
        raise ValueError(f"{path}: feature columns are for .csv and .parquet files: an .npz has all of them in 'x'")
    arrays = _arrays(path)
    about: dict[str, Any] = json.loads(str(arrays["per_user"])) if "per_user" in arrays else {}
    raw = Raw(
        source=str(path),
        user=_need(arrays, columns.user, path, "array"),
        x=_npz_features(arrays, path),
        y=_npz_targets(arrays, about.get("outputs"), columns, path),
        user_name=columns.user,
        target_name=columns.target,
        feature_names=_names(about.get("feature_names", arrays.get("vocab", ()))),
        target_names=_names(about.get("target_names", arrays.get("tag_names", ()))),
        labels=tuple(about.get("users", ())),
        notes=tuple(about.get("notes", ())),
    )
    raw = _with_test_part(raw, arrays, columns, split, path)
    data = raw.assemble(task or about.get("task"), about.get("outputs"))
    if about:
        return replace(data, mean=np.array(about["mean"]), std=np.array(about["std"]), bias=about["bias"])
    if not data.is_sparse and data.x.dtype == np.uint8:
        return replace(data, std=255.0, notes=(*data.notes, "x is bytes: a model sees x/255"))
    return data


def _names(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(str(value) for value in values)


def _npz_features(arrays: Arrays, path: Path) -> Table:
    if "x" in arrays:
        x = arrays["x"]
        return x.reshape(len(x), math.prod(x.shape[1:])) if x.ndim else x.reshape(1, 1)
    if "indptr" not in arrays:
        _need(arrays, "x", path, "array")
    counted = "counts" in arrays
    width = len(arrays["vocab"]) if "vocab" in arrays else None
    if "shape" in arrays:
        width = int(arrays["shape"][1])
    table = _csr(path, arrays, ("indptr", "indices"), "counts" if counted else "data", width)
    return mean_of_one_hots(table, arrays.get("length")) if counted else table


def _npz_targets(arrays: Arrays, outputs: int | None, columns: Columns, path: Path) -> Table:
    if columns.target in arrays or "tag_indptr" not in arrays:
        return _need(arrays, columns.target, path, "array")
    width = outputs or len(arrays.get("tag_names", ())) or None
    return _csr(path, arrays, ("tag_indptr", "tag_indices"), None, width)


def _csr(path: Path, arrays: Arrays, keys: tuple[str, str], data: str | None, width: int | None) -> sparse.csr_array:
    indptr, indices = keys
    starts, places = (_need(arrays, key, path, "array").astype(np.int64) for key in keys)
    values = np.ones(len(places)) if data is None else _need(arrays, data, path, "array").astype(np.float64)
    columns = width or int(places.max(initial=-1)) + 1
    consistent = len(starts) and starts[0] == 0 and (np.diff(starts) >= 0).all() and starts[-1] == len(places)
    if not consistent or len(values) != len(places):
        raise ValueError(
            f"{path}: {indptr!r} must rise from 0 to the length of {indices!r}, {len(places)}, and {data or indices!r} "
            "must be as long: save indptr, indices and data of one CSR matrix"
        )
    if (bad := np.flatnonzero((places < 0) | (places >= columns))).size:
        row = int(np.searchsorted(starts, bad[0], side="right")) - 1
        raise ValueError(
            f"{path}: {indices!r} has column {places[bad[0]]} in row {row} and there are {columns} columns: correct it"
        )
    table = sparse.csr_array((values, places, starts), shape=(len(starts) - 1, columns))
    table.sum_duplicates()
    return table


def _with_test_part(
    raw: Raw, found: Mapping[str, NDArray[Any]], columns: Columns, split: Split | None, path: Path
) -> Raw:
    """A test column, or how to choose the test part; what was passed over is noted."""
    if columns.time is not None:
        time = _need(found, columns.time, path, "column")
        raw = replace(raw, time=time, time_name=columns.time, split=split or Split())
    elif split is not None:
        raw = replace(raw, split=split)
    elif columns.test is not None or "test" in found:
        name = columns.test or "test"
        return replace(raw, test=_need(found, name, path, "column"), test_name=name)
    if "test" in found:
        raw = replace(raw, notes=(*raw.notes, "column 'test' left out: another split was asked for"))
    return raw


def _read_frame(path: Path, columns: Columns, split: Split | None, task: Task | None) -> PerUser:
    frame = _frame(path, columns.user)
    targets = [_known(name.strip(), frame.columns, path, "column") for name in columns.target.split(",")]
    special = {_known(columns.user, frame.columns, path, "column"), *targets, "test", columns.test, columns.time}
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
        found[columns.time] = _times(frame[_known(columns.time, frame.columns, path, "column")], raw)
    elif columns.test is not None:
        _known(columns.test, frame.columns, path, "column")
    return _with_test_part(raw, found, columns, split, path).assemble(task)


def _frame(path: Path, user: str | None = None) -> Any:
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


def _feature_columns(frame: Any, columns: Columns, special: set[Any], path: Path) -> tuple[list[str], tuple[str, ...]]:
    numeric = [name for name in frame.columns if frame[name].dtype.kind in "biuf"]
    if columns.features is not None:
        for name in columns.features:
            if _known(name, frame.columns, path, "column") not in numeric:
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


def _arrays(path: Path) -> Arrays:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as npz ({error}): save it again with numpy.savez") from None


def _need(found: Mapping[str, NDArray[Any]], name: str, path: Path, what: str) -> NDArray[Any]:
    return found[_known(name, found, path, what)]


def _known(name: str, there: Iterable[Any], path: Path, what: str) -> str:
    names = [str(other) for other in there]
    if name in names:
        return name
    nearest = (difflib.get_close_matches(name, names, n=1, cutoff=0.0) or ["nothing"])[0]
    raise ValueError(
        f"{path}: there is no {what} {name!r} among {', '.join(names[:12])}{', …' * (len(names) > 12)}: did you mean "
        f"{nearest!r}?"
    )
