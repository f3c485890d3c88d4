"""A data set by its name, whatever kind it is."""

from pathlib import Path

from flwr_ppsgd.lab.data.columns import Columns
from flwr_ppsgd.lab.data.emnist import HUB, femnist, tff_emnist
from flwr_ppsgd.lab.data.files import read
from flwr_ppsgd.lab.data.per_user import PerUser, Task
from flwr_ppsgd.lab.data.public import hub, image_folders, is_hub_name, is_images, is_leaf, leaf
from flwr_ppsgd.lab.data.split import Split
from flwr_ppsgd.lab.data.stackoverflow import stackoverflow_tags


def load(
    source: str | Path,
    columns: Columns | None = None,
    *,
    split: Split | None = None,
    task: Task | None = None,
    min_train: int = 1,
    users: int | None = None,
    cache_dir: str | Path | None = None,
) -> PerUser:
    """An own file, federated EMNIST or Stack Overflow tags.

    Args:
        source: an own file; "flwrlabs/femnist" or a folder with its files; with a user column any
            other data set of the hub or a folder with its files; a folder in LEAF's layout, or of
            pictures by user and class; TensorFlow Federated's emnist or stackoverflow file. Public
            counts of words and tags are looked for next to
            the latter, as ``stackoverflow.word_count`` and ``stackoverflow.tag_count``.
        columns: for own files, what their columns are called.
        split: for own files and the hub's, how the test part is chosen.
        task: for own files, what the targets stand for.
        min_train: of the chosen users, those with fewer training rows are left out.
        users: at most this many users, the first ones.
        cache_dir: where what was read is kept.
    """
    path = Path(source)
    if ".sqlite" in path.suffixes[-2:]:
        data = _from_sqlite(path, users, cache_dir)
    elif path.is_dir() and is_leaf(path):
        data = leaf(path)
    elif path.is_dir() and is_images(path):
        data = image_folders(path, split=split)
    elif columns is not None and (path.is_dir() or is_hub_name(str(source))):
        data = hub(source, columns, split=split, task=task, cache_dir=cache_dir)
        return _first(data, users).with_at_least(min_train)
    elif str(source) == HUB or path.is_dir():
        data = femnist(source, split=split, cache_dir=cache_dir)
    else:
        data = read(path, columns, split=split, task=task)
        return _first(data, users).with_at_least(min_train)
    if columns is not None or task is not None:
        raise ValueError(
            f"{source}: columns and the task are known for this data set: leave them out"
        )
    return _first(data, users).with_at_least(min_train)


def _first(data: PerUser, users: int | None) -> PerUser:
    if users is None or users >= len(data):
        return data
    return data.only(range(users))


def _from_sqlite(
    path: Path,
    users: int | None,
    cache_dir: str | Path | None,
) -> PerUser:
    if "emnist" in path.name:
        return tff_emnist(path, users=users, cache_dir=cache_dir)
    if "stackoverflow" not in path.name:
        raise ValueError(
            f"{path}: a SQLite file must have emnist or stackoverflow in its name: rename it"
        )
    most = {} if users is None else {"users": users}
    return stackoverflow_tags(
        path,
        word_counts=_beside(path, "stackoverflow.word_count"),
        tag_counts=_beside(path, "stackoverflow.tag_count"),
        cache_dir=cache_dir,
        **most,
    )


def _beside(path: Path, name: str) -> Path | None:
    """The file of this name in the same folder, if there is one."""
    file = path.with_name(name)
    return file if file.is_file() else None
