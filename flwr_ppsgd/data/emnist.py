"""Federated EMNIST: handwriting by writer, from the hub of flwr-datasets or from TensorFlow Federated's file."""

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

from flwr_ppsgd.data.cache import cache_file, cache_folder, cached
from flwr_ppsgd.data.frames import need_module
from flwr_ppsgd.data.per_user import PerUser
from flwr_ppsgd.data.raw import Raw, Split
from flwr_ppsgd.data.tff import Clients

HUB = "flwrlabs/femnist"
DIGITS, CHARACTERS = 10, 62


def femnist(
    source: str | Path = HUB,
    *,
    digits: bool = True,
    split: Split | None = None,
    cache_dir: str | Path | None = None,
) -> PerUser:
    """Images 28 × 28 (bytes, seen as x/255) by ``writer_id``, each writer with a test part of their own.

    source: a data set of the hub, or a folder with the parquet files of it. digits: only the characters 0 to 9.
    """
    split = split or Split(fraction=0.1)
    place: Path | str = Path(source) if Path(source).is_dir() else str(source)
    options = ("femnist", digits, split)
    missing = (
        f"put its parquet files into a folder and give that folder in place of the name, or an earlier cache at "
        f"{cache_file(place, options, cache_dir)}"
    )
    if place != HUB and isinstance(place, str) and (isinstance(source, Path) or source.count("/") != 1):
        raise ValueError(f"{source}: there is no such folder: put the parquet files of {HUB} there")

    def make() -> PerUser:
        rows = _hub_rows(place, digits, cache_dir, missing)
        images = np.stack([_image(row["image"], place) for row in rows])
        writers = np.array([str(writer) for writer in rows["writer_id"]], dtype=object)
        characters = np.asarray(rows["character"], dtype=np.int64)
        raw = Raw(str(source), writers, images, characters, split=split, user_name="writer_id", target_name="character")
        return replace(raw.assemble("classification", DIGITS if digits else CHARACTERS), std=255.0)

    return cached(make, place, options, cache_dir)


def tff_emnist(
    path: str | Path, *, users: int | None = None, digits: bool = True, cache_dir: str | Path | None = None
) -> PerUser:
    """The same from ``emnist_all.sqlite`` or ``.sqlite.lzma``, with that file's own test parts.

    Its background is 1 and its ink 0. users: the first so many client ids; 1,000 in the paper.
    """
    path, kind = Path(path), "digits_only" if digits else "all"
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file: put TensorFlow Federated's emnist_all.sqlite.lzma there")

    def make() -> PerUser:
        pixels, labels, writers, test = [], [], [], []
        with Clients.open(path, cache_folder(path, cache_dir)) as clients:
            for client in clients.ids(f"{kind}_train")[:users]:
                for part in ("train", "test"):
                    x, y = _drawn(clients.examples(f"{kind}_{part}", client), path, client)
                    pixels.append(_as_bytes(x))
                    labels.append(y)
                    writers += [client] * len(y)
                    test += [part == "test"] * len(y)
        exact = all(block.dtype == np.uint8 for block in pixels)
        x = np.concatenate([block if exact else _as_floats(block) for block in pixels])
        raw = Raw(str(path), np.array(writers, dtype=object), x, np.concatenate(labels), test=np.array(test))
        data = raw.assemble("classification", DIGITS if digits else CHARACTERS)
        return replace(data, std=255.0) if exact else data

    return cached(make, path, ("emnist", users, digits), cache_dir)


def _hub_rows(source: Path | str, digits: bool, cache_dir: str | Path | None, missing: str) -> Any:
    """The rows of the one split; writers are the natural partition, so grouping by them later is that partition."""
    package = need_module("flwr_datasets", f"{source}: federated EMNIST")
    partitioner = importlib.import_module("flwr_datasets.partitioner").NaturalIdPartitioner("writer_id")
    kept = {} if cache_dir is None else {"cache_dir": str(cache_dir)}
    try:
        with warnings.catch_warnings(), _quiet("huggingface_hub"):
            warnings.simplefilter("ignore")  # "not tested" for any data set but the best known ones
            federated = package.FederatedDataset(
                dataset=str(source), partitioners={"train": partitioner}, shuffle=False, **kept
            )
            rows = federated.load_split("train")
    except Exception as error:  # the hub's own errors have no common class
        raise ValueError(f"{source}: cannot be loaded ({' '.join(str(error).split())[:200]}): {missing}") from None
    for name in ("image", "writer_id", "character"):
        if name not in rows.column_names:
            raise ValueError(f"{source}: there is no column {name!r} among {', '.join(rows.column_names)}: {missing}")
    wanted = np.flatnonzero(np.asarray(rows["character"]) < (DIGITS if digits else CHARACTERS))
    if not len(wanted):
        raise ValueError(f"{source}: column 'character' has no digit: use digits=False")
    return rows.select(wanted)


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
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
    if pixels.shape != (28, 28):
        raise ValueError(f"{source}: column 'image' has an image of {pixels.shape} pixels: they must be 28 × 28")
    return pixels.reshape(-1)


def _drawn(
    examples: Iterable[dict[str, Any]], path: Path, client: str
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    found = list(examples)
    for number, example in enumerate(found):
        if len(example.get("pixels", ())) != 784 or len(example.get("label", ())) != 1:
            raise ValueError(
                f"{path}: example {number} of client {client!r} has no 784 'pixels' with a 'label': is it "
                "the EMNIST file?"
            )
    x = np.array([example["pixels"] for example in found], dtype=np.float32).reshape(-1, 784)
    return x, np.array([example["label"][0] for example in found], dtype=np.int64)


def _as_bytes(x: NDArray[np.float32]) -> NDArray[Any]:
    """Multiples of 1/255 as bytes, a quarter of the memory; anything else as it is."""
    rounded = np.rint(255 * x.astype(np.float64))
    exact = x.size == 0 or (rounded.min() >= 0 and rounded.max() <= 255 and np.abs(rounded / 255 - x).max() < 1e-6)
    return rounded.astype(np.uint8) if exact else x


def _as_floats(block: NDArray[Any]) -> NDArray[np.float32]:
    return (block / np.float32(255)).astype(np.float32) if block.dtype == np.uint8 else block
