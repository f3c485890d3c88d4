"""Own data: .npz, .csv and .parquet files with a user column."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.data.columns import Columns, known, need
from flwr_ppsgd.data.frames import frame_of, read_frame
from flwr_ppsgd.data.npz import arrays_of, read_npz
from flwr_ppsgd.data.per_user import PerUser, Task
from flwr_ppsgd.data.raw import Split


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
        ".npz": read_npz,
        ".csv": read_frame,
        ".parquet": read_frame,
    }
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path}: data must be a file that ends in {', '.join(readers)}: convert it to one of them")
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file: check the name")
    if split is not None and columns.test is not None:
        raise ValueError(f"{path}: test column {columns.test!r} and a split are both given: give one of them")
    return readers[path.suffix.lower()](path, columns, split, task).with_at_least(min_train)


def public_statistics(path: str | Path, data: PerUser) -> tuple[Vector, Vector]:
    """(mean, std) for ``data.standardised``: from an .npz with ``mean, std`` or a .csv with ``feature, mean, std``."""
    path = Path(path)
    if path.suffix == ".npz":
        arrays = arrays_of(path)
        mean, std = (need(arrays, key, path, "array") for key in ("mean", "std"))
        return np.asarray(mean, dtype=np.float64), np.asarray(std, dtype=np.float64)
    if not data.feature_names:
        raise ValueError(f"{path}: the features of {data.source} have no names: give an .npz with mean and std")
    frame = frame_of(path)
    for key in ("feature", "mean", "std"):
        known(key, frame.columns, path, "column")
    frame = frame.set_index("feature")
    for name in data.feature_names:
        known(name, frame.index, path, "feature")
    mean, std = frame["mean"], frame["std"]
    names = list(data.feature_names)
    return mean.loc[names].to_numpy(np.float64), std.loc[names].to_numpy(np.float64)
