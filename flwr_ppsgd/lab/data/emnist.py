"""Federated EMNIST: handwriting by writer.

It is read from the hub of flwr-datasets or from TensorFlow Federated's file.
"""

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.lab.data.cache import cache_file, cache_folder, cached
from flwr_ppsgd.lab.data.frames import need_module
from flwr_ppsgd.lab.data.per_user import PerUser
from flwr_ppsgd.lab.data.raw import Raw
from flwr_ppsgd.lab.data.split import Split
from flwr_ppsgd.lab.data.tff import Clients

HUB = "flwrlabs/femnist"
DIGITS = 10
CHARACTERS = 62
SIDE = 28  # pixels
PIXELS = SIDE * SIDE


def femnist(
    source: str | Path = HUB,
    *,
    digits: bool = True,
    split: Split | None = None,
    cache_dir: str | Path | None = None,
) -> PerUser:
    """Images 28 × 28 (bytes, seen as x/255) by ``writer_id``, each writer with a test part.

    Args:
        source: a data set of the hub, or a folder with its parquet files.
        digits: only the characters 0 to 9.
        split: how the test parts are chosen; a tenth of each writer's images if None.
        cache_dir: where what was read is kept.
    """
    split = split or Split(fraction=0.1)
    place = _place(source)
    options = ("femnist", digits, split)
    missing = (
        "put its parquet files into a folder and give that folder in place of the name, or an "
        f"earlier cache at {cache_file(place, options, cache_dir)}"
    )

    def make() -> PerUser:
        rows = _hub_rows(place, digits, cache_dir, missing)
        images = [_image(row["image"], place) for row in rows]
        writers = [str(writer) for writer in rows["writer_id"]]
        raw = Raw(
            source=str(source),
            user=np.array(writers, dtype=object),
            x=np.stack(images),
            y=np.asarray(rows["character"], dtype=np.int64),
            split=split,
            user_name="writer_id",
            target_name="character",
        )
        data = raw.assemble("classification", _classes(digits))
        return replace(data, std=255.0)

    return cached(make, place, options, cache_dir)


def tff_emnist(
    path: str | Path,
    *,
    users: int | None = None,
    digits: bool = True,
    cache_dir: str | Path | None = None,
) -> PerUser:
    """The same from ``emnist_all.sqlite`` or ``.sqlite.lzma``, with that file's own test parts.

    Its background is 1 and its ink 0.

    Args:
        path: the file.
        users: only the first ``users`` client ids; the paper has 1,000.
        digits: only the characters 0 to 9.
        cache_dir: where what was read is kept.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"{path}: there is no such file: put TensorFlow Federated's emnist_all.sqlite.lzma "
            "there"
        )

    def make() -> PerUser:
        folder = cache_folder(path, cache_dir)
        with Clients.open(path, folder) as clients:
            return _by_writer(clients, path, users, digits)

    return cached(
        make,
        path,
        ("emnist", users, digits),
        cache_dir,
    )


def _classes(digits: bool) -> int:
    return DIGITS if digits else CHARACTERS


def _place(source: str | Path) -> Path | str:
    """A folder, or the name of a data set of the hub."""
    if Path(source).is_dir():
        return Path(source)
    is_name = isinstance(source, str) and source.count("/") == 1
    if not is_name and str(source) != HUB:
        raise ValueError(f"{source}: there is no such folder: put the parquet files of {HUB} there")
    return str(source)


def _by_writer(
    clients: Clients,
    path: Path,
    users: int | None,
    digits: bool,
) -> PerUser:
    """The first ``users`` writers of TensorFlow Federated's file."""
    kind = "digits_only" if digits else "all"
    pixels = []
    labels = []
    writers: list[str] = []
    test: list[bool] = []
    for client in clients.ids(f"{kind}_train")[:users]:
        for part in ("train", "test"):
            examples = clients.examples(f"{kind}_{part}", client)
            x, y = _drawn(examples, path, client)
            pixels.append(_as_bytes(x))
            labels.append(y)
            writers += [client] * len(y)
            test += [part == "test"] * len(y)
    exact = all(block.dtype == np.uint8 for block in pixels)
    if not exact:
        pixels = [_as_floats(block) for block in pixels]
    raw = Raw(
        source=str(path),
        user=np.array(writers, dtype=object),
        x=np.concatenate(pixels),
        y=np.concatenate(labels),
        test=np.array(test),
    )
    data = raw.assemble("classification", _classes(digits))
    return replace(data, std=255.0) if exact else data


def _hub_rows(
    source: Path | str,
    digits: bool,
    cache_dir: str | Path | None,
    missing: str,
) -> Any:
    """The rows of the one split.

    Writers are the natural partition, so grouping by them later is that partition.
    """
    rows = _hub_split(source, cache_dir, missing)
    for name in ("image", "writer_id", "character"):
        if name not in rows.column_names:
            names = ", ".join(rows.column_names)
            raise ValueError(f"{source}: there is no column {name!r} among {names}: {missing}")
    characters = np.asarray(rows["character"])
    wanted = np.flatnonzero(characters < _classes(digits))
    if not len(wanted):
        raise ValueError(f"{source}: column 'character' has no digit: use digits=False")
    return rows.select(wanted)


def _hub_split(
    source: Path | str,
    cache_dir: str | Path | None,
    missing: str,
) -> Any:
    package = need_module("flwr_datasets", f"{source}: federated EMNIST")
    partitioners = importlib.import_module("flwr_datasets.partitioner")
    by_writer = partitioners.NaturalIdPartitioner("writer_id")
    kept = {} if cache_dir is None else {"cache_dir": str(cache_dir)}
    try:
        with warnings.catch_warnings(), quiet("huggingface_hub"):
            warnings.simplefilter("ignore")  # "not tested" for any data set but the best known ones
            federated = package.FederatedDataset(
                dataset=str(source),
                partitioners={"train": by_writer},
                shuffle=False,
                **kept,
            )
            return federated.load_split("train")
    except Exception as error:  # the hub's own errors have no common class
        line = " ".join(str(error).split())
        raise ValueError(f"{source}: cannot be loaded ({line[:200]}): {missing}") from None


@contextlib.contextmanager
def quiet(name: str) -> Iterator[None]:
    """Without a logger's warnings, such as one for each attempt to reach the hub."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _image(image: Any, source: Path | str) -> NDArray[np.uint8]:
    pixels = np.asarray(image.convert("L"), dtype=np.uint8)
    if pixels.shape != (SIDE, SIDE):
        raise ValueError(
            f"{source}: column 'image' has an image of {pixels.shape} pixels: they must be 28 × 28"
        )
    return pixels.reshape(-1)


def _drawn(
    examples: Iterable[dict[str, Any]],
    path: Path,
    client: str,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """A client's images, one row of pixels each, and the characters they show."""
    images = []
    labels = []
    for number, example in enumerate(examples):
        pixels = example.get("pixels", ())
        label = example.get("label", ())
        if len(pixels) != PIXELS or len(label) != 1:
            raise ValueError(
                f"{path}: example {number} of client {client!r} has no 784 'pixels' with a "
                "'label': is it the EMNIST file?"
            )
        images.append(pixels)
        labels.append(label[0])
    x = np.array(images, dtype=np.float32).reshape(-1, PIXELS)
    return x, np.array(labels, dtype=np.int64)


def _as_bytes(x: NDArray[np.float32]) -> NDArray[Any]:
    """Multiples of 1/255 as bytes, a quarter of the memory; anything else as it is."""
    rounded = np.rint(255 * x.astype(np.float64))
    if x.size == 0:
        return rounded.astype(np.uint8)
    fits = rounded.min() >= 0 and rounded.max() <= 255
    if fits and np.abs(rounded / 255 - x).max() < 1e-6:
        return rounded.astype(np.uint8)
    return x


def _as_floats(block: NDArray[Any]) -> NDArray[np.float32]:
    if block.dtype != np.uint8:
        return block
    return (block / np.float32(255)).astype(np.float32)
