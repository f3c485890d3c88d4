"""Own data: .npz, .csv and .parquet files with a user column."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.lab.data.columns import Columns, known, need
from flwr_ppsgd.lab.data.frames import frame_of, numbers, plain
from flwr_ppsgd.lab.data.npz import arrays_of, read_npz
from flwr_ppsgd.lab.data.per_user import PerUser, Task
from flwr_ppsgd.lab.data.split import Split
from flwr_ppsgd.lab.data.tables import read_table

Reader: TypeAlias = Callable[[Path, Columns, Split | None, Task | None], PerUser]
READERS: dict[str, Reader] = {
    ".npz": read_npz,
    ".csv": read_table,
    ".parquet": read_table,
}


def read(
    path: str | Path,
    columns: Columns | None = None,
    *,
    split: Split | None = None,
    task: Task | None = None,
    min_train: int = 1,
) -> PerUser:
    """The users of a .npz, .csv or .parquet file; print ``describe()`` to see what was found.

    A model sees bytes (uint8) as x/255, unless ``standardised``.

    Args:
        path: the file.
        columns: what its columns are called.
        split: chooses the test part in place of a test column.
        task: what the targets stand for; None detects it.
        min_train: users with fewer training rows are left out; a note names them.
    """
    path = Path(path)
    columns = columns or Columns()
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        endings = ", ".join(READERS)
        raise ValueError(
            f"{path}: data must be a file that ends in {endings}: convert it to one of them"
        )
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file: check the name")
    if split is not None and columns.test is not None:
        raise ValueError(
            f"{path}: test column {columns.test!r} and a split are both given: give one of them"
        )
    return reader(path, columns, split, task).with_at_least(min_train)


def public_statistics(path: str | Path, data: PerUser) -> tuple[Vector, Vector]:
    """(mean, std) for ``data.standardised``.

    Args:
        path: an .npz with the arrays ``mean`` and ``std``, or a .csv with the columns ``feature``,
            ``mean`` and ``std``.
        data: what they are for; a .csv is looked up by its feature names.
    """
    path = Path(path)
    if path.suffix == ".npz":
        arrays = arrays_of(path)
        mean = need(arrays, "mean", path, "array")
        std = need(arrays, "std", path, "array")
        return np.asarray(mean, dtype=np.float64), np.asarray(std, dtype=np.float64)
    if not data.feature_names:
        raise ValueError(
            f"{path}: the features of {data.source} have no names: give an .npz with mean and std"
        )
    frame, _ = frame_of(path)
    for key in ("feature", "mean", "std"):
        known(key, frame.column_names, path, "column")
    features = plain(frame.column("feature")).tolist()
    places = [features.index(known(name, features, path, "feature")) for name in data.feature_names]
    means = numbers(frame.column("mean"))
    stds = numbers(frame.column("std"))
    return means[places], stds[places]
