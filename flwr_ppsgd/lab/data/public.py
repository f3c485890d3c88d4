"""Public data sets in the layouts that people have them in: LEAF, folders of images, the hub.

Each becomes a ``PerUser``. Without a network, what is on disk can be read, and one line says what
is missing.
"""

import importlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.checks import printable
from flwr_ppsgd.lab.data.cache import cached
from flwr_ppsgd.lab.data.columns import Columns
from flwr_ppsgd.lab.data.emnist import quiet
from flwr_ppsgd.lab.data.frames import Frame, need_module
from flwr_ppsgd.lab.data.per_user import PerUser, Task
from flwr_ppsgd.lab.data.raw import Origin, Raw
from flwr_ppsgd.lab.data.split import Split
from flwr_ppsgd.lab.data.tables import raw_of

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif")
LEAF_KEYS = ("users", "user_data")
MOST_LETTERS = 200  # of another library's error


def is_hub_name(source: str) -> bool:
    """Whether a source is called as on the hub, "owner/name", and is no file."""
    owner, _, name = source.partition("/")
    plain = bool(owner) and bool(name) and "/" not in name and not Path(source).suffix
    return plain and not Path(source).exists()


def is_leaf(folder: Path) -> bool:
    """Whether a folder has LEAF's layout: train/*.json and test/*.json, perhaps under data."""
    return bool(_leaf_files(folder, "train"))


def _leaf_files(folder: Path, part: str) -> list[Path]:
    for place in (folder / part, folder / "data" / part):
        files = sorted(place.glob("*.json"))
        if files:
            return files
    return []


def leaf(folder: str | Path, *, task: Task | None = None) -> PerUser:
    """The users of LEAF's JSON files, with their own test parts.

    Args:
        folder: with train/*.json and test/*.json.
        task: what the targets stand for; None detects it.
    """
    folder = Path(folder)
    users: list[str] = []
    x: list[Any] = []
    y: list[Any] = []
    test: list[bool] = []
    trained: set[str] = set()
    for part in ("train", "test"):
        for user, rows in _leaf_rows(folder, part):
            if part == "train" or user in trained:  # nobody has test rows only
                trained.add(user)
                x += rows["x"]
                y += rows["y"]
                users += [user] * len(rows["y"])
                test += [part == "test"] * len(rows["y"])
    raw = Raw(
        source=str(folder),
        user=np.array(users, dtype=object),
        x=_leaf_features(x, folder),
        y=np.array(y),
        test=np.array(test, dtype=np.bool_),
    )
    return raw.assemble(task)


def _leaf_rows(folder: Path, part: str) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    for file in _leaf_files(folder, part):
        yield from _leaf_users(file)


def _leaf_users(file: Path) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        for user in content[LEAF_KEYS[0]]:
            rows = content[LEAF_KEYS[1]][user]
            if len(rows["x"]) != len(rows["y"]):
                raise ValueError(f"user {user!r} has {len(rows['x'])} x and {len(rows['y'])} y")
            yield str(user), rows
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        reason = printable(error, MOST_LETTERS)
        raise ValueError(
            f"{file}: not a file of LEAF ({reason}): it needs users, and x and y of each in "
            "user_data"
        ) from None


def _leaf_features(x: list[Any], folder: Path) -> NDArray[np.float64]:
    try:
        table = np.array(x, dtype=np.float64)
        return table.reshape(len(x), -1)
    except (TypeError, ValueError):
        raise ValueError(
            f"{folder}: x is not a list of numbers of one length: encode text as numbers first, or "
            "write a .csv and use --text"
        ) from None


def is_images(folder: Path) -> bool:
    """Whether a folder holds USER/CLASS/picture."""
    return next(_pictures(folder), None) is not None


def _pictures(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.glob("*/*/*")):
        if path.suffix.lower() in PICTURES:
            yield path


def image_folders(folder: str | Path, *, split: Split | None = None) -> PerUser:
    """Pictures in USER/CLASS/picture, as grey bytes of one size.

    Args:
        folder: holds a folder for each user, and in it one for each class.
        split: how the test parts are chosen.
    """
    folder = Path(folder)
    image = need_module("PIL.Image", f"{folder}: pictures")
    users = []
    classes = []
    pixels = []
    size: tuple[int, int] | None = None
    for path in _pictures(folder):
        try:
            with image.open(path) as picture:
                grey = np.asarray(picture.convert("L"), dtype=np.uint8)
        except OSError as error:
            raise ValueError(
                f"{path}: cannot be read as a picture ({printable(error, MOST_LETTERS)}): remove it"
            ) from None
        size = size or grey.shape
        if grey.shape != size:
            raise ValueError(
                f"{path}: has {grey.shape} pixels and the first picture {size}: bring all of them "
                "to one size"
            )
        users.append(path.parent.parent.name)
        classes.append(path.parent.name)
        pixels.append(grey)
    raw = Raw(
        source=str(folder),
        user=np.array(users, dtype=object),
        x=np.stack(pixels).reshape(len(pixels), -1),
        y=np.array(classes, dtype=object),
        split=split,
        target_name="class",
    )
    data = raw.assemble("classification")
    assert size is not None
    note = "x is bytes: a model sees x/255"
    return replace(data, std=255.0, shape=size, notes=(*data.notes, note))


def hub(
    source: str | Path,
    columns: Columns,
    *,
    split: Split | None = None,
    task: Task | None = None,
    cache_dir: str | Path | None = None,
) -> PerUser:
    """Any data set of the hub with a natural id, partitioned by flwr-datasets.

    Args:
        source: its name, as in "owner/name", or a folder with its parquet files.
        columns: ``user`` is the natural id.
        split: how the test parts are chosen.
        task: what the targets stand for; None detects it.
        cache_dir: where the hub's files are kept.
    """

    def make() -> PerUser:
        frame = _hub_frame(source, columns, cache_dir)
        return raw_of(frame, (), columns, split, Origin(str(source))).assemble(task)

    return cached(make, source, ("hub", columns, split, task), cache_dir)


def _hub_frame(source: str | Path, columns: Columns, cache_dir: str | Path | None) -> Frame:
    """The train split as an Arrow table."""
    package = need_module("flwr_datasets", f"{source}: a data set of the hub")
    partitioners = importlib.import_module("flwr_datasets.partitioner")
    natural = partitioners.NaturalIdPartitioner(columns.user)
    kept = {} if cache_dir is None else {"cache_dir": str(cache_dir)}
    try:
        with warnings.catch_warnings(), quiet("huggingface_hub"):
            warnings.simplefilter("ignore")  # "not tested" for any data set but the best known ones
            federated = package.FederatedDataset(
                dataset=str(source), partitioners={"train": natural}, shuffle=False, **kept
            )
            rows = federated.load_split("train")
    except Exception as error:  # the hub's own errors have no common class
        reason = printable(error, MOST_LETTERS)
        raise ValueError(
            f"{source}: cannot be loaded ({reason}): without a network, put its parquet files into "
            "a folder and give that folder with --user in place of the name"
        ) from None
    return rows.with_format("arrow")[:]
