"""Stack Overflow tags: the questions and answers of each user as bags of words, from TensorFlow Federated's file."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.data.cache import cache_folder, cached
from flwr_ppsgd.data.npz import mean_of_one_hots
from flwr_ppsgd.data.per_user import PerUser
from flwr_ppsgd.data.raw import Raw
from flwr_ppsgd.data.tff import Clients


class Document(NamedTuple):
    user: str
    test: bool
    words: str
    tags: str


def stackoverflow_tags(
    path: str | Path,
    *,
    word_counts: str | Path | None = None,
    tag_counts: str | Path | None = None,
    users: int = 500,
    words: int = 5000,
    tags: int = 80,
    max_train: int = 500,
    cache_dir: str | Path | None = None,
) -> PerUser:
    """Words of tokens and title → tags, kept sparse: the mean of one-hots, without the out-of-vocabulary column.

    path: ``stackoverflow.sqlite`` or ``.sqlite.lzma``. users: the first client ids of the test split that have training
    documents too. max_train: training documents of a user, the first in the file.
    word_counts, tag_counts: files of public counts, of which the most frequent are taken (lines "word count" or a JSON
    object). Without them they are counted in these users' training documents, which no ε accounts for: a note says so.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file: put TensorFlow Federated's stackoverflow.sqlite.lzma there")
    vocabulary = None if word_counts is None else _most_frequent(_read_counts(Path(word_counts)), words)
    labels = None if tag_counts is None else _most_frequent(_read_counts(Path(tag_counts)), tags)

    def make() -> PerUser:
        with Clients.open(path, cache_folder(path, cache_dir)) as clients:
            documents, notes = _documents(clients, path, users, max_train)
        trained = [document for document in documents if not document.test]
        counted = [name for name, given in (("vocabulary", vocabulary), ("tags", labels)) if given is None]
        if counted:
            notes += (f"{' and '.join(counted)} counted in users' training documents: ε does not account for that",)
        known_words = vocabulary or _most_frequent(_count(d.words.split() for d in trained), words)
        known_tags = labels or _most_frequent(_count(d.tags.split("|") for d in trained), tags)
        return _bags(documents, known_words, known_tags, str(path), notes)

    return cached(make, path, ("stackoverflow", users, words, tags, max_train, vocabulary, labels), cache_dir)


def _documents(clients: Clients, path: Path, users: int, max_train: int) -> tuple[list[Document], tuple[str, ...]]:
    trained = set(clients.ids("train"))
    chosen: list[str] = []
    passed = 0
    for client in clients.ids("test"):
        if len(chosen) == users:
            break
        passed += client not in trained
        if client in trained:
            chosen.append(client)
    if not chosen:
        raise ValueError(f"{path}: no client of the split 'test' is in 'train' too: is it the Stack Overflow file?")
    documents = []
    for client in chosen:
        for split, most in (("train", max_train), ("test", None)):
            for number, example in enumerate(clients.examples(split, client, most)):
                documents.append(_document(client, split == "test", example, f"{path}: example {number} of {client!r}"))
    return documents, (f"passed over {passed} client ids without training documents",) if passed else ()


def _document(client: str, test: bool, example: dict[str, Any], where: str) -> Document:
    texts = {}
    for name in ("tokens", "title", "tags"):
        if name not in example:
            raise ValueError(f"{where} has no {name!r}: is it the Stack Overflow file?")
        texts[name] = b" ".join(example[name]).decode("utf-8", errors="replace")
    return Document(client, test, f"{texts['tokens']} {texts['title']}", texts["tags"])


def _bags(
    documents: list[Document], vocabulary: list[str], labels: list[str], source: str, notes: tuple[str, ...]
) -> PerUser:
    x = _counted((document.words.split() for document in documents), vocabulary)
    y = _counted((document.tags.split("|") for document in documents), labels)
    y.data[:] = 1.0
    lengths = np.array([max(len(document.words.split()), 1) for document in documents])
    raw = Raw(
        source=source,
        user=np.array([document.user for document in documents], dtype=object),
        x=mean_of_one_hots(x, lengths),
        y=y,
        test=np.array([document.test for document in documents]),
        feature_names=tuple(vocabulary),
        target_names=tuple(labels),
        notes=notes,
    )
    return raw.assemble("multi-label")


def _counted(texts: Iterator[list[str]], vocabulary: list[str]) -> sparse.csr_array:
    """Documents × vocabulary: how often each word occurs; others are left out."""
    number = {word: place for place, word in enumerate(vocabulary)}
    starts, places = [0], []
    for words in texts:
        places += [number[word] for word in words if word in number]
        starts.append(len(places))
    ones: NDArray[np.float64] = np.ones(len(places))
    indices = np.array(places, dtype=np.int64), np.array(starts, dtype=np.int64)
    table = sparse.csr_array((ones, *indices), shape=(len(starts) - 1, len(vocabulary)))
    table.sum_duplicates()
    return table


def _count(texts: Iterator[list[str]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for words in texts:
        counts.update(word for word in words if word)
    return counts


def _most_frequent(counts: Counter[str], size: int) -> list[str]:
    """Ties go by the alphabet, so that the order does not hang on the file's."""
    return [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:size]]


def _read_counts(path: Path) -> Counter[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as text ({error}): give a file of lines 'word count'") from None
    if text.lstrip().startswith("{"):
        try:
            return Counter({str(word): int(count) for word, count in json.loads(text).items()})
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: cannot be read as JSON ({error}): give one object of word: count") from None
    counts: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), start=1):
        parts = line.split()
        if len(parts) != 2 or not parts[1].isdecimal():
            raise ValueError(f"{path}: line {number} is not 'word count': {line[:40]!r}: correct it")
        counts[parts[0]] = int(parts[1])
    return counts
