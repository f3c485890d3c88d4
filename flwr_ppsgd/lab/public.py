"""Public data sets in the layouts that people have them in, as columns.

Federated EMNIST and Stack Overflow (TensorFlow Federated's files), the hub of flwr-datasets, LEAF's
JSON, folders of .parquet files and of pictures. Without a network, what is on disk can be read, and
one line says what is missing. Nothing is written beside a source.
"""

import json
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.checks import printable
from flwr_ppsgd.lab.data_options import DataOptions
from flwr_ppsgd.lab.tables import (
    MOST_LETTERS,
    RawTable,
    grey_picture,
    mean_of_one_hots,
    read_parquet,
    stack_pictures,
    table_of,
)
from flwr_ppsgd.lab.tff import Clients

WRITER = "writer_id"  # the columns of federated EMNIST on the hub
CHARACTER = "character"
DIGITS = tuple(str(digit) for digit in range(10))
SIDE = 28  # pixels
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif")
OFFLINE = (
    "without a network, put its parquet files into a folder and give that folder in place of the "
    "name"
)
STACKOVERFLOW_USERS = 500  # the paper's choices
WORDS = 5000
TAGS = 80
MOST_TRAINED = 500  # documents per user


def is_public(source: str | Path) -> bool:
    """Whether a source is a folder, a data set of the hub, or a file of TensorFlow Federated."""
    path = Path(source)
    return path.is_dir() or is_hub_name(str(source)) or ".sqlite" in path.suffixes[-2:]


def is_hub_name(source: str) -> bool:
    """Whether a source is called as on the hub, "owner/name", and is no file."""
    owner, _, name = source.partition("/")
    plain = bool(owner) and bool(name) and "/" not in name and not Path(source).suffix
    return plain and not Path(source).exists()


def read_public(source: str | Path, options: DataOptions, users: int | None = None) -> RawTable:
    """The columns of a public data set: ``user``, ``y``, ``x`` and perhaps ``test``; of a data set
    with a user column of its own, all of its columns.

    Args:
        source: a folder, a name on the hub, or a file of TensorFlow Federated.
        options: the names of columns, for data sets that do not know theirs.
        users: only the first ones, where reading all would take long.
    """
    path = Path(source)
    if ".sqlite" in path.suffixes[-2:]:
        _refuse_options(source, options)
        return _sqlite(path, users)
    if is_hub_name(str(source)):
        return _digits(_hub(str(source), options), options)
    if _leaf_files(path, "train"):
        _refuse_options(source, options)
        return _leaf(path)
    parquet = sorted(path.rglob("*.parquet"))
    if parquet:
        return _digits(read_parquet(parquet, str(path)), options)
    if next(_pictures(path), None) is not None:
        _refuse_options(source, options)
        return _image_folders(path)
    raise ValueError(
        f"{path}: here are no .parquet files, no train/*.json of LEAF and no USER/CLASS/picture: "
        "give a file"
    )


def _refuse_options(source: str | Path, options: DataOptions) -> None:
    named = (options.user, options.target, options.features, options.categorical, options.task)
    if any(named):
        raise ValueError(
            f"{source}: columns and the task are known for this data set: leave them out"
        )


# --- the hub


def _digits(table: RawTable, options: DataOptions) -> RawTable:
    """Of federated EMNIST the digits by writer, unless other columns are named."""
    if options.user or options.schema or not {WRITER, CHARACTER} <= set(table.columns):
        return table
    characters = np.asarray(table.columns[CHARACTER])
    wanted = np.flatnonzero(characters < len(DIGITS))
    if not len(wanted):
        raise table.refuse("column 'character' has no digit", "add --user and --target")
    columns = {
        "user": np.asarray(table.columns[WRITER], dtype=object)[wanted],
        "x": table.column("image")[wanted],
        "y": characters[wanted],
    }
    return RawTable(table.source, columns, shapes={"x": (SIDE, SIDE)}, classes=DIGITS)


def _hub(name: str, options: DataOptions) -> RawTable:
    """The train split of a data set of the hub."""
    import flwr_datasets
    from flwr_datasets.partitioner import NaturalIdPartitioner

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a warning for each attempt
    natural = NaturalIdPartitioner(options.user or WRITER)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "not tested" for any data set but the best known ones
            federated = flwr_datasets.FederatedDataset(
                dataset=name, partitioners={"train": natural}, shuffle=False
            )
            rows = federated.load_split("train")
    except Exception as error:  # the hub's own errors have no common class
        reason = printable(error, MOST_LETTERS)
        raise ValueError(f"{name}: cannot be loaded ({reason}): {OFFLINE}") from None
    return table_of(rows.with_format("arrow")[:], name)


# --- LEAF


def _leaf_files(folder: Path, part: str) -> list[Path]:
    """train/*.json and test/*.json, perhaps under data."""
    for place in (folder / part, folder / "data" / part):
        files = sorted(place.glob("*.json"))
        if files:
            return files
    return []


def _leaf(folder: Path) -> RawTable:
    """LEAF's JSON files, with their own test parts; users without training rows are left out."""
    users: list[str] = []
    x: list[Any] = []
    y: list[Any] = []
    test: list[bool] = []
    for part in ("train", "test"):
        trained = set(users)
        for file in _leaf_files(folder, part):
            for user, rows in _leaf_users(file):
                if part == "train" or user in trained:
                    x += rows["x"]
                    y += rows["y"]
                    users += [user] * len(rows["y"])
                    test += [part == "test"] * len(rows["y"])
    try:
        features = np.array(x, dtype=np.float64).reshape(len(x), -1)
    except (TypeError, ValueError):
        raise ValueError(
            f"{folder}: x is not a list of numbers of one length: encode text as numbers first, or "
            "write a .csv and use --text"
        ) from None
    named = {"user": np.array(users, dtype=object), "x": features, "y": np.array(y)}
    return RawTable(str(folder), {**named, "test": np.array(test, dtype=np.bool_)})


def _leaf_users(file: Path) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        for user in content["users"]:
            rows = content["user_data"][user]
            if len(rows["x"]) != len(rows["y"]):
                raise ValueError(f"user {user!r} has {len(rows['x'])} x and {len(rows['y'])} y")
            yield str(user), rows
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        reason = printable(error, MOST_LETTERS)
        raise ValueError(
            f"{file}: not a file of LEAF ({reason}): it needs users, and x and y of each in "
            "user_data"
        ) from None


# --- folders of pictures


def _pictures(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.glob("*/*/*")):
        if path.suffix.lower() in PICTURES:
            yield path


def _image_folders(folder: Path) -> RawTable:
    """Pictures in USER/CLASS/picture, as grey bytes of one size."""
    paths = list(_pictures(folder))
    pixels = stack_pictures((grey_picture(path, str(path)) for path in paths), str(folder))
    columns = {
        "user": np.array([path.parent.parent.name for path in paths], dtype=object),
        "x": pixels.reshape(len(pixels), -1),
        "y": np.array([path.parent.name for path in paths], dtype=object),
    }
    return RawTable(str(folder), columns, shapes={"x": pixels.shape[1:]})


# --- TensorFlow Federated


def _sqlite(path: Path, users: int | None) -> RawTable:
    if not path.is_file():
        raise ValueError(
            f"{path}: there is no such file: put TensorFlow Federated's .sqlite.lzma there"
        )
    kinds = [kind for kind in ("emnist", "stackoverflow") if kind in path.name]
    if not kinds:
        raise ValueError(
            f"{path}: a SQLite file must have emnist or stackoverflow in its name: rename it"
        )
    with Clients.open(path, user_cache()) as clients:
        if kinds[0] == "emnist":
            return _emnist(clients, path, users)
        return _stackoverflow(clients, path, users or STACKOVERFLOW_USERS)


def user_cache() -> Path:
    """The user's cache directory for this package, where .lzma files are unpacked."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "flwr-ppsgd"


def _emnist(clients: Clients, path: Path, users: int | None) -> RawTable:
    """Digits by writer, with the file's own test parts. Its background is 1 and its ink 0."""
    pixels = []
    labels = []
    writers: list[str] = []
    test: list[bool] = []
    for client in clients.ids("digits_only_train")[:users]:
        for part in ("train", "test"):
            examples = clients.examples(f"digits_only_{part}", client)
            x, y = _read_images(examples, path, client)
            pixels.append(x)
            labels.append(y)
            writers += [client] * len(y)
            test += [part == "test"] * len(y)
    columns = {
        "user": np.array(writers, dtype=object),
        "x": _as_bytes(np.concatenate(pixels)),
        "y": np.concatenate(labels),
        "test": np.array(test),
    }
    return RawTable(str(path), columns, shapes={"x": (SIDE, SIDE)}, classes=DIGITS)


def _read_images(
    examples: Iterable[dict[str, Any]], path: Path, client: str
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """A client's images, one row of pixels each, and the characters they show."""
    images = []
    labels = []
    for number, example in enumerate(examples):
        pixels = example.get("pixels", ())
        label = example.get("label", ())
        if len(pixels) != SIDE * SIDE or len(label) != 1:
            raise ValueError(
                f"{path}: example {number} of client {client!r} has no 784 'pixels' with a "
                "'label': is it the EMNIST file?"
            )
        images.append(pixels)
        labels.append(label[0])
    x = np.array(images, dtype=np.float32).reshape(-1, SIDE * SIDE)
    return x, np.array(labels, dtype=np.int64)


def _as_bytes(x: NDArray[np.float32]) -> NDArray[Any]:
    """Multiples of 1/255 as bytes, a quarter of the memory; anything else as it is."""
    rounded = np.rint(255 * x)
    fits = rounded.min(initial=0) >= 0 and rounded.max(initial=0) <= 255
    if fits and np.abs(rounded / 255 - x).max(initial=0) < 1e-6:
        return rounded.astype(np.uint8)
    return x


class Document(NamedTuple):
    """One question or answer on Stack Overflow: its words, and its tags."""

    user: str
    test: bool
    words: list[str]
    tags: list[str]


def _stackoverflow(clients: Clients, path: Path, users: int) -> RawTable:
    """Words of tokens and title → tags: the mean of one-hots over a public vocabulary.

    Public counts are looked for next to the file, as ``stackoverflow.word_count`` and
    ``stackoverflow.tag_count``. Without them words are counted in these users' training documents,
    and a note says so. Users are the first client ids of the test split that train too.
    """
    trained = set(clients.ids("train"))
    chosen = [client for client in clients.ids("test") if client in trained][:users]
    if not chosen:
        raise ValueError(
            f"{path}: no client of the split 'test' is in 'train' too: is it the Stack Overflow "
            "file?"
        )
    documents: list[Document] = []
    for client in chosen:
        documents += _documents(clients, client, "train", MOST_TRAINED, path)
        documents += _documents(clients, client, "test", None, path)
    own = [document for document in documents if not document.test]
    words, counted_words = _vocabulary(path, "word", (one.words for one in own), WORDS)
    tags, counted_tags = _vocabulary(path, "tag", (one.tags for one in own), TAGS)
    lengths = np.array([max(len(document.words), 1) for document in documents])
    y = _count_words([document.tags for document in documents], tags)
    y.data[:] = 1.0
    columns = {
        "user": np.array([document.user for document in documents], dtype=object),
        "x": mean_of_one_hots(_count_words([one.words for one in documents], words), lengths),
        "y": y,
        "test": np.array([document.test for document in documents]),
    }
    notes = (*counted_words, *counted_tags)
    return RawTable(
        str(path), columns, feature_names=tuple(words), classes=tuple(tags), notes=notes
    )


def _documents(
    clients: Clients, client: str, split: str, most: int | None, path: Path
) -> Iterator[Document]:
    for number, example in enumerate(clients.examples(split, client, most)):
        texts = {}
        for name in ("tokens", "title", "tags"):
            if name not in example:
                raise ValueError(
                    f"{path}: example {number} of {client!r} has no {name!r}: is it the Stack "
                    "Overflow file?"
                )
            parts: Any = example[name]
            texts[name] = b" ".join(parts).decode("utf-8", errors="replace")
        words = f"{texts['tokens']} {texts['title']}".split()
        yield Document(client, split == "test", words, texts["tags"].split("|"))


def _vocabulary(
    path: Path, kind: str, documents: Iterable[list[str]], size: int
) -> tuple[list[str], list[str]]:
    """The most frequent words or tags of a file of public counts, else of users' documents; a note
    about the latter. Ties are ordered by the alphabet."""
    file = path.with_name(f"stackoverflow.{kind}_count")
    notes = []
    if file.is_file():
        counts = _read_counts(file)
    else:
        counts = Counter(word for words in documents for word in words if word)
        notes = [f"{kind}s counted in users' training documents: no epsilon covers that"]
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [word for word, _ in ordered[:size]], notes


def _count_words(texts: Iterable[list[str]], vocabulary: list[str]) -> sparse.csr_array:
    """Documents × vocabulary: how often each word occurs; other words are left out."""
    number = {word: place for place, word in enumerate(vocabulary)}
    starts = [0]
    places: list[int] = []
    for words in texts:
        places += [number[word] for word in words if word in number]
        starts.append(len(places))
    shape = (len(starts) - 1, len(vocabulary))
    table = sparse.csr_array((np.ones(len(places)), places, starts), shape=shape)
    table.sum_duplicates()
    return table


def _read_counts(path: Path) -> Counter[str]:
    """Lines "word count", or a JSON object."""
    counts: Counter[str] = Counter()
    text = path.read_text(encoding="utf-8", errors="replace")
    if text.lstrip().startswith("{"):
        try:
            return Counter({str(word): int(count) for word, count in json.loads(text).items()})
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: cannot be read as JSON ({error}): correct it") from None
    for number, line in enumerate(text.splitlines(), start=1):
        parts = line.split()
        if len(parts) != 2 or not parts[1].isdecimal():
            raise ValueError(
                f"{path}: line {number} is not 'word count': {line[:40]!r}: correct it"
            )
        counts[parts[0]] = int(parts[1])
    return counts
