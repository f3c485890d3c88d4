"""Per-user data in .npz files: dense or CSR; written and read."""

import json
import math
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.disk import PRIVATE_FILE, replacing
from flwr_ppsgd.lab.data.columns import Columns, need, with_test_part
from flwr_ppsgd.lab.data.per_user import PerUser, Table, Task
from flwr_ppsgd.lab.data.raw import Raw
from flwr_ppsgd.lab.data.split import Split

Arrays: TypeAlias = dict[str, NDArray[Any]]
ABOUT = (  # in a written file, as JSON
    "users",
    "task",
    "outputs",
    "feature_names",
    "target_names",
    "notes",
    "shape",
)
UNREADABLE = (  # what numpy raises for a damaged file
    OSError,
    ValueError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    AttributeError,
    TypeError,
)


def read_npz(
    path: Path,
    columns: Columns,
    split: Split | None,
    task: Task | None,
) -> PerUser:
    """The users of an .npz file."""
    named = columns.features or columns.exclude or columns.categorical or columns.text
    if named:
        raise ValueError(
            f"{path}: feature columns are for .csv and .parquet files: an .npz has all of them in "
            "'x'"
        )
    arrays = arrays_of(path)
    about = _about(arrays)
    outputs = about.get("outputs")
    raw = Raw(
        source=str(path),
        user=need(arrays, columns.user, path, "array"),
        x=_features(arrays, path),
        y=_targets(arrays, outputs, columns, path),
        user_name=columns.user,
        target_name=columns.target,
        feature_names=_names(about.get("feature_names", arrays.get("vocab", ()))),
        target_names=_names(about.get("target_names", arrays.get("tag_names", ()))),
        labels=tuple(about.get("users", ())),
        impute=columns.impute,
        notes=tuple(about.get("notes", ())),
    )
    raw = with_test_part(raw, arrays, columns, split, path)
    data = raw.assemble(task or about.get("task"), outputs)
    data = replace(data, shape=_shape(arrays, about))
    if about:
        mean = np.array(about["mean"])
        std = np.array(about["std"])
        return replace(
            data,
            mean=mean,
            std=std,
            bias=about["bias"],
        )
    if not data.is_sparse and data.x.dtype == np.uint8:
        note = "x is bytes: a model sees x/255"
        return replace(data, std=255.0, notes=(*data.notes, note))
    return data


def write_npz(data: PerUser, path: str | Path) -> None:
    """Write a file from which ``read`` gives back the same data; it is never half-written.

    Only its owner may read it.

    Args:
        data: what to write.
        path: the file; missing folders are made.
    """
    path = Path(path)
    sizes = np.diff(data.offsets)
    arrays: dict[str, Any] = {
        "user": np.repeat(np.arange(len(data), dtype=np.int32), sizes),
        "test": data.test,
        "per_user": np.array(_about_json(data)),
    }
    if data.is_sparse:
        for key in ("indptr", "indices", "data", "shape"):
            arrays[key] = getattr(data.x, key)
    else:
        arrays["x"] = data.x
    if data.task == "multi-label":
        arrays["tag_indptr"] = data.y.indptr
        arrays["tag_indices"] = data.y.indices
    else:
        arrays["y"] = data.y
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, mode=PRIVATE_FILE, sync=False) as file:
        np.savez(file, **arrays)


def mean_of_one_hots(
    counts: sparse.csr_array, lengths: NDArray[Any] | None = None
) -> sparse.csr_array:
    """Counts divided by the document's length: the paper's features of a bag of words.

    Args:
        counts: documents × vocabulary.
        lengths: the number of words of each document, including words that are not in the
            vocabulary. If they are unknown, the sum of the counts is taken.
    """
    if lengths is None:
        lengths = counts.sum(axis=1)
    totals = np.asarray(lengths, dtype=np.float64)
    words = np.diff(counts.indptr)
    shares = counts.data / np.repeat(totals, words)
    return sparse.csr_array((shares, counts.indices, counts.indptr), shape=counts.shape)


def arrays_of(path: Path) -> Arrays:
    """All arrays of an .npz file, by name."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: _array_of(file, name, path) for name in file.files}
    except PickledError:
        raise
    except UNREADABLE as error:
        raise ValueError(
            f"{path}: cannot be read as npz ({error}): save it again with numpy.savez"
        ) from None


class PickledError(ValueError):
    """An array of Python objects: reading it would run code that came with the file."""


def _array_of(file: Any, name: str, path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = file[name]
    except ValueError as error:
        if "pickle" not in str(error):
            raise
        raise PickledError(
            f"{path}: array {name!r} holds Python objects, which are never read (reading them "
            "would run code from the file): save it as numbers or text, as in "
            f"numpy.array({name}, dtype=str)"
        ) from None
    return array


def _about(arrays: Arrays) -> dict[str, Any]:
    """What ``write_npz`` has written besides the arrays; empty for other files."""
    if "per_user" not in arrays:
        return {}
    about: dict[str, Any] = json.loads(str(arrays["per_user"]))
    return about


def _about_json(data: PerUser) -> str:
    about = {name: getattr(data, name) for name in ABOUT}
    about["mean"] = np.asarray(data.mean).tolist()
    about["std"] = np.asarray(data.std).tolist()
    about["bias"] = data.bias
    return json.dumps(about)


def _names(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(str(value) for value in values)


def _shape(arrays: Arrays, about: Mapping[str, Any]) -> tuple[int, ...]:
    """Of one row, if x has more than two axes, as images do; else not known."""
    if "shape" in about:
        return tuple(int(length) for length in about["shape"])
    if "x" not in arrays or arrays["x"].ndim < 3:
        return ()
    return tuple(arrays["x"].shape[1:])


def _features(arrays: Arrays, path: Path) -> Table:
    """x, one row per sample; or a CSR table."""
    if "x" in arrays:
        x = arrays["x"]
        if not x.ndim:
            return x.reshape(1, 1)
        return x.reshape(len(x), math.prod(x.shape[1:]))
    if "indptr" not in arrays:
        need(arrays, "x", path, "array")
    width = None
    if "shape" in arrays:
        width = int(arrays["shape"][1])
    elif "vocab" in arrays:
        width = len(arrays["vocab"])
    if "counts" not in arrays:
        return _csr(
            path,
            arrays,
            ("indptr", "indices"),
            "data",
            width,
        )
    counts = _csr(
        path,
        arrays,
        ("indptr", "indices"),
        "counts",
        width,
    )
    return mean_of_one_hots(counts, arrays.get("length"))


def _targets(
    arrays: Arrays,
    outputs: int | None,
    columns: Columns,
    path: Path,
) -> Table:
    if columns.target in arrays or "tag_indptr" not in arrays:
        return need(arrays, columns.target, path, "array")
    width = outputs or len(arrays.get("tag_names", ())) or None
    return _csr(
        path,
        arrays,
        ("tag_indptr", "tag_indices"),
        None,
        width,
    )


def _csr(
    path: Path,
    arrays: Arrays,
    keys: tuple[str, str],
    data: str | None,
    width: int | None,
) -> sparse.csr_array:
    """A CSR table from its arrays, checked.

    Args:
        path: the file, for messages.
        arrays: all arrays of the file.
        keys: the names of indptr and indices.
        data: the name of the values; None if all of them are 1.
        width: the number of columns; None if the largest index decides.
    """
    indptr, indices = keys
    starts = need(arrays, indptr, path, "array").astype(np.int64)
    places = need(arrays, indices, path, "array").astype(np.int64)
    values: NDArray[np.float64] = np.ones(len(places))
    if data is not None:
        values = need(arrays, data, path, "array").astype(np.float64)
    if not _rises_to(starts, len(places)) or len(values) != len(places):
        raise ValueError(
            f"{path}: {indptr!r} must rise from 0 to the length of {indices!r}, {len(places)}, and "
            f"{data or indices!r} must be as long: save indptr, indices and data of one CSR matrix"
        )
    columns = width or int(places.max(initial=-1)) + 1
    bad = np.flatnonzero((places < 0) | (places >= columns))
    if bad.size:
        row = int(np.searchsorted(starts, bad[0], side="right")) - 1
        raise ValueError(
            f"{path}: {indices!r} has column {places[bad[0]]} in row {row} and there are {columns} "
            "columns: correct it"
        )
    table = sparse.csr_array((values, places, starts), shape=(len(starts) - 1, columns))
    table.sum_duplicates()
    return table


def _rises_to(starts: NDArray[np.int64], length: int) -> bool:
    """Whether ``starts`` goes from 0 to ``length`` and never falls."""
    if not len(starts) or starts[0] != 0 or starts[-1] != length:
        return False
    return bool((np.diff(starts) >= 0).all())
