"""Per-user data in .npz files: dense or CSR; written and read."""

import json
import math
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.data.columns import Columns, need, with_test_part
from flwr_ppsgd.data.per_user import PerUser, Table, Task
from flwr_ppsgd.data.raw import Raw, Split

Arrays = dict[str, NDArray[Any]]
ABOUT = ("users", "task", "outputs", "feature_names", "target_names", "notes")  # in a written file, as JSON


def read_npz(path: Path, columns: Columns, split: Split | None, task: Task | None) -> PerUser:
    if columns.features is not None:
        raise ValueError(f"{path}: feature columns are for .csv and .parquet files: an .npz has all of them in 'x'")
    arrays = arrays_of(path)
    about: dict[str, Any] = json.loads(str(arrays["per_user"])) if "per_user" in arrays else {}
    raw = Raw(
        source=str(path),
        user=need(arrays, columns.user, path, "array"),
        x=_npz_features(arrays, path),
        y=_npz_targets(arrays, about.get("outputs"), columns, path),
        user_name=columns.user,
        target_name=columns.target,
        feature_names=_names(about.get("feature_names", arrays.get("vocab", ()))),
        target_names=_names(about.get("target_names", arrays.get("tag_names", ()))),
        labels=tuple(about.get("users", ())),
        notes=tuple(about.get("notes", ())),
    )
    raw = with_test_part(raw, arrays, columns, split, path)
    data = raw.assemble(task or about.get("task"), about.get("outputs"))
    if about:
        return replace(data, mean=np.array(about["mean"]), std=np.array(about["std"]), bias=about["bias"])
    if not data.is_sparse and data.x.dtype == np.uint8:
        return replace(data, std=255.0, notes=(*data.notes, "x is bytes: a model sees x/255"))
    return data


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


def mean_of_one_hots(counts: sparse.csr_array, lengths: NDArray[Any] | None = None) -> sparse.csr_array:
    """Counts divided by the document's length: the paper's features of a bag of words.

    lengths: words of each document, those out of the vocabulary too; where they are unknown, the sum of the counts.
    """
    totals = np.asarray(counts.sum(axis=1) if lengths is None else lengths, dtype=np.float64)
    data = counts.data / np.repeat(totals, np.diff(counts.indptr))
    return sparse.csr_array((data, counts.indices, counts.indptr), shape=counts.shape)


def arrays_of(path: Path) -> Arrays:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as npz ({error}): save it again with numpy.savez") from None


def _names(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(str(value) for value in values)


def _npz_features(arrays: Arrays, path: Path) -> Table:
    if "x" in arrays:
        x = arrays["x"]
        return x.reshape(len(x), math.prod(x.shape[1:])) if x.ndim else x.reshape(1, 1)
    if "indptr" not in arrays:
        need(arrays, "x", path, "array")
    counted = "counts" in arrays
    width = len(arrays["vocab"]) if "vocab" in arrays else None
    if "shape" in arrays:
        width = int(arrays["shape"][1])
    table = _csr(path, arrays, ("indptr", "indices"), "counts" if counted else "data", width)
    return mean_of_one_hots(table, arrays.get("length")) if counted else table


def _npz_targets(arrays: Arrays, outputs: int | None, columns: Columns, path: Path) -> Table:
    if columns.target in arrays or "tag_indptr" not in arrays:
        return need(arrays, columns.target, path, "array")
    width = outputs or len(arrays.get("tag_names", ())) or None
    return _csr(path, arrays, ("tag_indptr", "tag_indices"), None, width)


def _csr(path: Path, arrays: Arrays, keys: tuple[str, str], data: str | None, width: int | None) -> sparse.csr_array:
    indptr, indices = keys
    starts, places = (need(arrays, key, path, "array").astype(np.int64) for key in keys)
    values = np.ones(len(places)) if data is None else need(arrays, data, path, "array").astype(np.float64)
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
