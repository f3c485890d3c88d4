"""Read public data sets in their usual layouts as columns.

Federated EMNIST and Stack Overflow (TensorFlow Federated's files), the hub of flwr-datasets, LEAF's
JSON, folders of .parquet files and of pictures. Only the hub needs a network. Nothing is written
beside a source.
"""

import json
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.checks import printable
from flwr_ppsgd.lab.problem import Problem
from flwr_ppsgd.lab.tables import (
    MOST_LETTERS,
    RawTable,
    grey_picture,
    mean_of_one_hots,
    read_parquet,
    stack_pictures,
    table_of,
)
from flwr_ppsgd.lab.tff import TffClients, open_clients

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


def is_public(source: str) -> bool:
    """Whether a source is a folder, a data set of the hub, or a file of TensorFlow Federated."""
    path = Path(source)
    return path.is_dir() or is_hub_name(source) or ".sqlite" in path.suffixes[-2:]


def is_hub_name(source: str) -> bool:
    """Whether a source has the form "owner/name" of the hub and is not a file."""
    owner, _, name = source.partition("/")
    is_plain = bool(owner) and bool(name) and "/" not in name and not Path(source).suffix
    return is_plain and not Path(source).exists()


def read_public(problem: Problem) -> RawTable:
    """The columns ``user``, ``y``, ``x`` and perhaps ``test`` of a public data set; or all columns
    of .parquet files that are not federated EMNIST."""
    if is_hub_name(problem.data):
        return _digits(_read_hub(problem), problem)
    path = Path(problem.data)
    is_sqlite = ".sqlite" in path.suffixes[-2:]
    is_leaf = not is_sqlite and bool(_leaf_files(path, "train"))
    if not is_sqlite and not is_leaf:
        parquet = sorted(path.rglob("*.parquet"))
        if parquet:
            return _digits(read_parquet(parquet, str(path)), problem)
    columns = (problem.user_column, problem.target_column, problem.feature_columns)
    if any((*columns, problem.categorical_columns, problem.task)):
        raise ValueError(
            f"{path}: columns and the task are known for this data set: leave them out"
        )
    if is_sqlite:
        return _read_sqlite(path, problem.users)
    return _read_leaf(path) if is_leaf else _read_pictures(path)


# --- the hub


def _read_hub(problem: Problem) -> RawTable:
    """The train split of a data set of the hub."""
    import flwr_datasets
    from flwr_datasets.partitioner import NaturalIdPartitioner

    name = problem.data
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a warning for each attempt
    partitioner = NaturalIdPartitioner(problem.user_column or WRITER)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "not tested" for any data set but the best known ones
            federated = flwr_datasets.FederatedDataset(
                dataset=name, partitioners={"train": partitioner}, shuffle=False
            )
            rows = federated.load_split("train")
    except Exception as error:  # the hub's own errors have no common class
        reason = printable(error, MOST_LETTERS)
        raise ValueError(f"{name}: cannot be loaded ({reason}): {OFFLINE}") from None
    return table_of(rows.with_format("arrow")[:], name)


def _digits(table: RawTable, problem: Problem) -> RawTable:
    """The digits by writer of federated EMNIST; unchanged if it is another table, or if columns are
    named."""
    is_femnist = {WRITER, CHARACTER} <= set(table.columns)
    if problem.user_column or problem.schema or not is_femnist:
        return table
    characters = np.asarray(table.columns[CHARACTER])
    digits = np.flatnonzero(characters < len(DIGITS))
    if not len(digits):
        raise table.refuse("column 'character' has no digit", "add --user and --target")
    columns = {
        "user": np.asarray(table.columns[WRITER], dtype=object)[digits],
        "x": table.column("image")[digits],
        "y": characters[digits],
    }
    return RawTable(table.source, columns, shapes={"x": (SIDE, SIDE)}, classes=DIGITS)


# --- LEAF


def _leaf_files(folder: Path, part: str) -> list[Path]:
    """train/*.json and test/*.json, perhaps under data."""
    for place in (folder / part, folder / "data" / part):
        files = sorted(place.glob("*.json"))
        if files:
            return files
    return []


def _read_leaf(folder: Path) -> RawTable:
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
    columns = {
        "user": np.array(users, dtype=object),
        "x": features,
        "y": np.array(y),
        "test": np.array(test, dtype=np.bool_),
    }
    return RawTable(str(folder), columns)


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


def _read_pictures(folder: Path) -> RawTable:
    """Pictures in USER/CLASS/picture, as grey bytes of one size."""
    files = sorted(folder.glob("*/*/*"))
    paths = [path for path in files if path.suffix.lower() in PICTURES]
    if not paths:
        raise ValueError(
            f"{folder}: here are no .parquet files, no train/*.json of LEAF and no "
            "USER/CLASS/picture: give a file"
        )
    pixels = stack_pictures([grey_picture(path, str(path)) for path in paths], str(folder))
    columns = {
        "user": np.array([path.parent.parent.name for path in paths], dtype=object),
        "x": pixels.reshape(len(pixels), -1),
        "y": np.array([path.parent.name for path in paths], dtype=object),
    }
    return RawTable(str(folder), columns, shapes={"x": pixels.shape[1:]})


# --- TensorFlow Federated


def _read_sqlite(path: Path, users: int | None) -> RawTable:
    if not path.is_file():
        raise ValueError(
            f"{path}: there is no such file: put TensorFlow Federated's .sqlite.lzma there"
        )
    kinds = [kind for kind in ("emnist", "stackoverflow") if kind in path.name]
    if not kinds:
        raise ValueError(
            f"{path}: a SQLite file must have emnist or stackoverflow in its name: rename it"
        )
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    with open_clients(path, Path(folder) / "flwr-ppsgd") as clients:
        if kinds[0] == "emnist":
            return _emnist(clients, path, users)
        return _stackoverflow(clients, path, users or STACKOVERFLOW_USERS)


def _emnist(clients: TffClients, path: Path, users: int | None) -> RawTable:
    """Digits by writer, with the test parts of the file. The background is 1 and the ink 0."""
    images = []
    labels: list[int] = []
    writers: list[str] = []
    test: list[bool] = []
    for client in clients.ids("digits_only_train")[:users]:
        for part in ("train", "test"):
            for number, example in enumerate(clients.examples(f"digits_only_{part}", client)):
                pixels = example.get("pixels", ())
                label = example.get("label", ())
                if len(pixels) != SIDE * SIDE or len(label) != 1:
                    raise ValueError(
                        f"{path}: example {number} of client {client!r} has no 784 'pixels' with a "
                        "'label': is it the EMNIST file?"
                    )
                images.append(np.array(pixels, dtype=np.float32))
                labels.append(label[0])
                writers.append(client)
                test.append(part == "test")
    columns = {
        "user": np.array(writers, dtype=object),
        "x": _as_bytes(np.stack(images)),
        "y": np.array(labels, dtype=np.int64),
        "test": np.array(test),
    }
    return RawTable(str(path), columns, shapes={"x": (SIDE, SIDE)}, classes=DIGITS)


def _as_bytes(x: NDArray[np.float32]) -> NDArray[Any]:
    """Multiples of 1/255 as bytes, a quarter of the memory; anything else as it is."""
    rounded = np.rint(255 * x)
    in_range = rounded.min(initial=0) >= 0 and rounded.max(initial=0) <= 255
    if in_range and np.abs(rounded / 255 - x).max(initial=0) < 1e-6:
        return rounded.astype(np.uint8)
    return x


def _stackoverflow(clients: TffClients, path: Path, most_users: int) -> RawTable:
    """Words of tokens and title → tags: the mean of one-hots over a public vocabulary.

    Public counts are looked for next to the file, as ``stackoverflow.word_count`` and
    ``stackoverflow.tag_count``. Without them words are counted in these users' training documents,
    and a note says so. Users are the first client ids of the test split that train too.
    """
    trained = set(clients.ids("train"))
    chosen = [client for client in clients.ids("test") if client in trained][:most_users]
    if not chosen:
        raise ValueError(
            f"{path}: no client of the split 'test' is in 'train' too: is it the Stack Overflow "
            "file?"
        )
    users: list[str] = []
    test: list[bool] = []
    words: list[list[str]] = []  # of each document
    tags: list[list[str]] = []
    for client in chosen:
        for split, most in (("train", MOST_TRAINED), ("test", None)):
            for number, example in enumerate(clients.examples(split, client, most)):
                texts = {}
                for name in ("tokens", "title", "tags"):
                    if name not in example:
                        raise ValueError(
                            f"{path}: example {number} of {client!r} has no {name!r}: is it the "
                            "Stack Overflow file?"
                        )
                    texts[name] = b" ".join(example[name]).decode("utf-8", errors="replace")
                users.append(client)
                test.append(split == "test")
                words.append(f"{texts['tokens']} {texts['title']}".split())
                tags.append(texts["tags"].split("|"))
    notes: list[str] = []
    vocabularies = []
    for kind, documents, size in (("word", words, WORDS), ("tag", tags, TAGS)):
        file = path.with_name(f"stackoverflow.{kind}_count")
        counts: Counter[str] = Counter()
        if file.is_file():
            counts = _read_counts(file)
        else:
            for document, is_test in zip(documents, test, strict=True):
                if not is_test:
                    counts.update(word for word in document if word)
            notes.append(f"{kind}s counted in users' training documents: no epsilon covers that")
        # the most frequent ones; ties are ordered by the alphabet
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        vocabularies.append(ordered[:size])
    lengths = np.array([max(len(document), 1) for document in words])
    y = _count_words(tags, vocabularies[1])
    y.data[:] = 1.0
    columns = {
        "user": np.array(users, dtype=object),
        "x": mean_of_one_hots(_count_words(words, vocabularies[0]), lengths),
        "y": y,
        "test": np.array(test),
    }
    return RawTable(
        str(path),
        columns,
        feature_names=tuple(vocabularies[0]),
        classes=tuple(vocabularies[1]),
        notes=tuple(notes),
    )


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


def _count_words(documents: Iterable[list[str]], vocabulary: list[str]) -> sparse.csr_array:
    """Documents × vocabulary: how often each word occurs; other words are left out."""
    number = {word: place for place, word in enumerate(vocabulary)}
    starts = [0]
    places: list[int] = []
    for words in documents:
        places += [number[word] for word in words if word in number]
        starts.append(len(places))
    shape = (len(starts) - 1, len(vocabulary))
    table = sparse.csr_array((np.ones(len(places)), places, starts), shape=shape)
    table.sum_duplicates()
    return table
