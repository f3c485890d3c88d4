"""Stack Overflow tags: each user's questions and answers as bags of words.

They are read from TensorFlow Federated's file.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.lab.data.cache import cache_folder, cached
from flwr_ppsgd.lab.data.npz import mean_of_one_hots
from flwr_ppsgd.lab.data.per_user import PerUser
from flwr_ppsgd.lab.data.raw import Raw
from flwr_ppsgd.lab.data.tff import Clients


class Document(NamedTuple):
    """One question or answer.

    Args:
        user: the client's id.
        test: whether it is in the test part.
        words: its tokens and its title, separated by spaces.
        tags: separated by "|".
    """

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
    """Words of tokens and title → tags, kept sparse: the mean of one-hots.

    There is no column for words that are out of the vocabulary.

    Args:
        path: ``stackoverflow.sqlite`` or ``.sqlite.lzma``.
        word_counts: a file of public counts, of which the most frequent words are taken: lines
            "word count", or a JSON object. Without it words are counted in these users' training
            documents, which no ε accounts for: a note says so.
        tag_counts: the same for tags.
        users: the number of users: the first client ids of the test split that have training
            documents too.
        words: the size of the vocabulary.
        tags: the number of tags.
        max_train: the most training documents per user, the first in the file.
        cache_dir: where what was read is kept.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"{path}: there is no such file: put TensorFlow Federated's stackoverflow.sqlite.lzma "
            "there"
        )
    vocabulary = _public(word_counts, words)
    labels = _public(tag_counts, tags)

    def make() -> PerUser:
        folder = cache_folder(path, cache_dir)
        with Clients.open(path, folder) as clients:
            documents, notes = _documents(
                clients,
                path,
                users,
                max_train,
            )
        notes += _counted_notes(vocabulary, labels)
        trained = [document for document in documents if not document.test]
        known_words = vocabulary or _most_frequent(_count(map(_words, trained)), words)
        known_tags = labels or _most_frequent(_count(map(_tags, trained)), tags)
        return _bags(
            documents,
            known_words,
            known_tags,
            str(path),
            notes,
        )

    options = ("stackoverflow", users, words, tags, max_train, vocabulary, labels)
    return cached(make, path, options, cache_dir)


def _public(counts: str | Path | None, size: int) -> list[str] | None:
    """The most frequent words of a file of public counts; None without such a file."""
    if counts is None:
        return None
    return _most_frequent(_read_counts(Path(counts)), size)


def _counted_notes(vocabulary: list[str] | None, labels: list[str] | None) -> tuple[str, ...]:
    counted = []
    if vocabulary is None:
        counted.append("vocabulary")
    if labels is None:
        counted.append("tags")
    if not counted:
        return ()
    what = " and ".join(counted)
    return (f"{what} counted in users' training documents: ε does not account for that",)


def _documents(
    clients: Clients,
    path: Path,
    users: int,
    max_train: int,
) -> tuple[list[Document], tuple[str, ...]]:
    """The documents of the first ``users`` clients, and a note on those who were passed over."""
    chosen, passed = _chosen(clients, users)
    if not chosen:
        raise ValueError(
            f"{path}: no client of the split 'test' is in 'train' too: is it the Stack Overflow "
            "file?"
        )
    documents = []
    for client in chosen:
        documents += _documents_of(
            clients,
            client,
            "train",
            max_train,
            path,
        )
        documents += _documents_of(
            clients,
            client,
            "test",
            None,
            path,
        )
    if not passed:
        return documents, ()
    return documents, (f"passed over {passed} client ids without training documents",)


def _chosen(clients: Clients, users: int) -> tuple[list[str], int]:
    """The first clients of the test split who train too, and how many were passed over."""
    trained = set(clients.ids("train"))
    chosen: list[str] = []
    passed = 0
    for client in clients.ids("test"):
        if len(chosen) == users:
            break
        if client in trained:
            chosen.append(client)
        else:
            passed += 1
    return chosen, passed


def _documents_of(
    clients: Clients,
    client: str,
    split: str,
    most: int | None,
    path: Path,
) -> list[Document]:
    documents = []
    for number, example in enumerate(clients.examples(split, client, most)):
        where = f"{path}: example {number} of {client!r}"
        tokens = _text(example, "tokens", where)
        title = _text(example, "title", where)
        tags = _text(example, "tags", where)
        documents.append(
            Document(
                client,
                split == "test",
                f"{tokens} {title}",
                tags,
            )
        )
    return documents


def _text(
    example: dict[str, Any],
    name: str,
    where: str,
) -> str:
    if name not in example:
        raise ValueError(f"{where} has no {name!r}: is it the Stack Overflow file?")
    return b" ".join(example[name]).decode("utf-8", errors="replace")


def _words(document: Document) -> list[str]:
    return document.words.split()


def _tags(document: Document) -> list[str]:
    return document.tags.split("|")


def _bags(
    documents: list[Document],
    vocabulary: list[str],
    labels: list[str],
    source: str,
    notes: tuple[str, ...],
) -> PerUser:
    counts = _counted(map(_words, documents), vocabulary)
    lengths = [max(len(_words(document)), 1) for document in documents]
    y = _counted(map(_tags, documents), labels)
    y.data[:] = 1.0
    raw = Raw(
        source=source,
        user=np.array([document.user for document in documents], dtype=object),
        x=mean_of_one_hots(counts, np.array(lengths)),
        y=y,
        test=np.array([document.test for document in documents]),
        feature_names=tuple(vocabulary),
        target_names=tuple(labels),
        notes=notes,
    )
    return raw.assemble("multi-label")


def _counted(texts: Iterable[list[str]], vocabulary: list[str]) -> sparse.csr_array:
    """Documents × vocabulary: how often each word occurs; other words are left out."""
    number = {word: place for place, word in enumerate(vocabulary)}
    starts = [0]
    places: list[int] = []
    for words in texts:
        places += [number[word] for word in words if word in number]
        starts.append(len(places))
    ones: NDArray[np.float64] = np.ones(len(places))
    indices = np.array(places, dtype=np.int64)
    indptr = np.array(starts, dtype=np.int64)
    shape = (len(starts) - 1, len(vocabulary))
    table = sparse.csr_array((ones, indices, indptr), shape=shape)
    table.sum_duplicates()
    return table


def _count(texts: Iterable[list[str]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for words in texts:
        counts.update(word for word in words if word)
    return counts


def _most_frequent(counts: Counter[str], size: int) -> list[str]:
    """The ``size`` most frequent words.

    Ties are ordered by the alphabet, so that the order does not depend on the file's.
    """
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [word for word, _ in ordered[:size]]


def _read_counts(path: Path) -> Counter[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: cannot be read as text ({error}): give a file of lines 'word count'"
        ) from None
    if text.lstrip().startswith("{"):
        return _json_counts(text, path)
    counts: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), start=1):
        parts = line.split()
        if len(parts) != 2 or not parts[1].isdecimal():
            raise ValueError(
                f"{path}: line {number} is not 'word count': {line[:40]!r}: correct it"
            )
        word, count = parts
        counts[word] = int(count)
    return counts


def _json_counts(text: str, path: Path) -> Counter[str]:
    try:
        pairs = json.loads(text).items()
        return Counter({str(word): int(count) for word, count in pairs})
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: cannot be read as JSON ({error}): give one object of word: count"
        ) from None
