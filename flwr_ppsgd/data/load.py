"""A data set by its name, whatever kind it is."""

from pathlib import Path

from flwr_ppsgd.data.columns import Columns
from flwr_ppsgd.data.emnist import HUB, femnist, tff_emnist
from flwr_ppsgd.data.files import read
from flwr_ppsgd.data.per_user import PerUser, Task
from flwr_ppsgd.data.raw import Split
from flwr_ppsgd.data.stackoverflow import stackoverflow_tags


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
    """An own file; "flwrlabs/femnist" or a folder with its files; TensorFlow Federated's emnist or stackoverflow file.

    Public counts of words and tags are looked for next to the latter, as ``stackoverflow.word_count`` and
    ``stackoverflow.tag_count``. columns and task are for own files, split is for them and the hub's.
    users: at most so many, the first ones; those with fewer than ``min_train`` training rows are left out of them.
    """
    path = Path(source)
    if ".sqlite" in path.suffixes[-2:]:
        data = _from_sqlite(path, users, cache_dir)
    elif str(source) == HUB or path.is_dir():
        data = femnist(source, split=split, cache_dir=cache_dir)
    else:
        return _first(read(path, columns, split=split, task=task), users).with_at_least(min_train)
    if columns is not None or task is not None:
        raise ValueError(f"{source}: columns and the task are known for this data set: leave them out")
    return _first(data, users).with_at_least(min_train)


def _first(data: PerUser, users: int | None) -> PerUser:
    return data if users is None or users >= len(data) else data.only(range(users))


def _from_sqlite(path: Path, users: int | None, cache_dir: str | Path | None) -> PerUser:
    if "emnist" in path.name:
        return tff_emnist(path, users=users, cache_dir=cache_dir)
    if "stackoverflow" not in path.name:
        raise ValueError(f"{path}: a SQLite file must have emnist or stackoverflow in its name: rename it")
    words, tags = (
        file if (file := path.parent / f"stackoverflow.{kind}_count").is_file() else None for kind in ("word", "tag")
    )
    most = {} if users is None else {"users": users}
    return stackoverflow_tags(path, word_counts=words, tag_counts=tags, cache_dir=cache_dir, **most)
