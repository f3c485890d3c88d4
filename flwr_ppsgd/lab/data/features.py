"""Columns as features: numbers as they are, categories as one-hot columns, text as words.

Nothing here is learned from users except which categories there are, and a note says so. Hashes are
public.
"""

import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.lab.data.columns import Columns, known
from flwr_ppsgd.lab.data.frames import Column, Frame, first_word, kind_of, lookup, numbers
from flwr_ppsgd.lab.data.per_user import Table
from flwr_ppsgd.lab.data.raw import Origin

MOST_ONE_HOT = 1000  # categories of a column; beyond, they are hashed
MOST_DENSE = 64  # one-hot columns; beyond, the table is sparse
BUCKETS = 4096
ROWS_AT_ONCE = 1 << 14
WORD = re.compile(r"\w+")
LOOKED = "chosen by looking at data: not covered"
NAMED_ROWS = re.compile(r"column \d+|index|Unnamed: \d+|__index_level_\d+__")

Block: TypeAlias = tuple[sparse.csr_array, list[str]]


@dataclass(frozen=True)
class Features:
    """What a model can be given.

    Args:
        x: rows × d, dense, or CSR if there are many one-hot columns.
        names: "age", or "genre=drama" and "genre#17" for a category and a hashed one.
        notes: what was left out and why.
    """

    x: Table
    names: tuple[str, ...]
    notes: tuple[str, ...]


def features_of(
    frame: Frame, columns: Columns, special: Iterable[str | None], origin: Origin
) -> Features:
    """The features of a table.

    Args:
        frame: all columns.
        columns: which of them are features, and of which kind.
        special: columns that are never features: user, target, test and time.
        origin: the file, for messages.
    """
    path = Path(origin.source)
    for name in (*columns.exclude, *columns.categorical, *columns.text):
        known(name, frame.column_names, path, "column")
    encoded = {*columns.categorical, *columns.text}
    if columns.features is None:
        away = {*special, *columns.exclude}
        candidates = [name for name in frame.column_names if name not in away]
        numeric, notes = _numeric(frame, candidates, encoded, origin)
    else:
        numeric = _asked_for(frame, columns, encoded, origin)
        notes = []
    blocks = [_one_hot(frame, name, notes) for name in columns.categorical]
    blocks += [_words(frame, name, notes) for name in columns.text]
    x, names = _joined(frame, numeric, blocks)
    return Features(x, names, tuple(notes))


def is_encoded(name: str) -> bool:
    """Whether a feature of this name is a category or a word, and not a number."""
    return "=" in name or "#" in name


def category_of(name: str) -> str:
    """The column that a one-hot feature, or a hashed one, comes from."""
    return re.split("[=#]", name, maxsplit=1)[0]


def _numeric(
    frame: Frame, candidates: Sequence[str], encoded: set[str], origin: Origin
) -> tuple[list[str], list[str]]:
    """The names of the columns of numbers that are used, and a note on all that are left out."""
    used = []
    left_out: dict[str, list[str]] = {}
    for name in candidates:
        if name in encoded:
            continue
        column = frame.column(name)
        reason, shown = _reason_against(name, column, origin)
        if reason:
            left_out.setdefault(reason, []).append(shown)
        else:
            used.append(name)
    notes = [f"left out, {reason}: {', '.join(shown)}" for reason, shown in left_out.items()]
    return used, notes


def _reason_against(name: str, column: Column, origin: Origin) -> tuple[str, str]:
    """Why a column is no feature by itself, and how a note names it; empty if it is one."""
    kind = kind_of(column)
    if kind == "number":
        return _reason_against_numbers(name, column)
    if kind == "text":
        word = first_word(column, origin)
        return "not numeric (use --categorical or --text to add them)", f"{name!r} ({word})"
    if kind == "date":
        return "a date (use --time to test on each user's last rows)", repr(name)
    if kind == "nested":
        return "nested (write one column for each number)", f"{name!r} ({column.type})"
    return "without numbers", f"{name!r} ({kind})"


def _reason_against_numbers(name: str, column: Column) -> tuple[str, str]:
    from pyarrow import compute

    ends = compute.min_max(column).as_py()
    low = ends["min"]
    high = ends["max"]
    if low is None:
        return "empty", repr(name)
    if low == high and not column.null_count:
        return "the same in every row", f"{name!r} ({low:g})"
    if NAMED_ROWS.fullmatch(name) and _counts_rows(column, low, high):
        return "an index of rows", repr(name)
    return "", ""


def _counts_rows(column: Column, low: float, high: float) -> bool:
    """Whether a column is 0, 1, 2, … or 1, 2, 3, …"""
    rows = len(column)
    if low not in (0, 1) or high - low != rows - 1:
        return False
    return bool((numbers(column) == np.arange(low, low + rows)).all())


def _asked_for(frame: Frame, columns: Columns, encoded: set[str], origin: Origin) -> list[str]:
    """The feature columns that were named; ValueError if one is not numeric."""
    used = []
    for name in columns.features or ():
        column = lookup(frame, name, Path(origin.source))
        if name in encoded:
            continue
        if kind_of(column) != "number":
            word = first_word(column, origin)
            raise origin.refuse(
                f"feature column {name!r} is not numeric, {word}",
                f"encode it as numbers, or add --categorical {name}",
            )
        used.append(name)
    return used


def _joined(
    frame: Frame, numeric: Sequence[str], blocks: Sequence[Block]
) -> tuple[Table, tuple[str, ...]]:
    """Numbers first, then what was encoded. It is sparse if that is wide."""
    names = [*numeric]
    for _, own in blocks:
        names += own
    added = len(names) - len(numeric)
    if added > MOST_DENSE:
        parts = [block for block, _ in blocks]
        if numeric:
            parts.insert(0, sparse.csr_array(_dense(frame, numeric, 0)))
        return sparse.csr_array(sparse.hstack(parts)), tuple(names)
    x = _dense(frame, numeric, added)
    place = len(numeric)
    for block, own in blocks:
        x[:, place : place + len(own)] = block.toarray()
        place += len(own)
    return x, tuple(names)


def _dense(frame: Frame, names: Sequence[str], more: int) -> NDArray[np.float64]:
    """Columns of numbers side by side, with room for ``more``; few rows at a time, which fit the
    cache."""
    x = np.empty((frame.num_rows, len(names) + more))
    start = 0
    for batch in frame.select(names).to_batches(max_chunksize=ROWS_AT_ONCE):
        stop = start + batch.num_rows
        for place, column in enumerate(batch.columns):
            x[start:stop, place] = numbers(column)
        start = stop
    return x


def _texts(frame: Frame, name: str) -> tuple[list[str], NDArray[np.intp]]:
    """The different values of a column as text, and for each row which one it has; −1 is a gap."""
    coded = frame.column(name).combine_chunks().dictionary_encode()
    values = ["" if value is None else _shown(value) for value in coded.dictionary.to_pylist()]
    codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return values, codes.astype(np.intp)


def _shown(value: Any) -> str:
    """A category as text; 3.0 is 3."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


def _one_hot(frame: Frame, name: str, notes: list[str]) -> Block:
    """One column for each category, or for each bucket of a hash; a gap has none."""
    values, codes = _texts(frame, name)
    categories = sorted({value for value in values if value})
    if len(categories) > MOST_ONE_HOT:
        notes.append(
            f"column {name!r} has {len(categories):,} categories: hashed into {BUCKETS:,} columns"
        )
        names = [f"{name}#{bucket}" for bucket in range(BUCKETS)]
        places = [bucket_of(value) if value else -1 for value in values]
    else:
        notes.append(f"one-hot: {name!r} ({len(categories)} categories, {LOOKED})")
        names = [f"{name}={value}" for value in categories]
        order = {value: place for place, value in enumerate(categories)}
        places = [order.get(value, -1) for value in values]
    return _indicators(np.array([*places, -1])[codes], len(names)), names


def bucket_of(word: str) -> int:
    """The public hash of a word."""
    return zlib.crc32(word.encode()) % BUCKETS


def _indicators(places: NDArray[np.intp], width: int) -> sparse.csr_array:
    """A one in each row at its place; −1 is nowhere."""
    rows = np.flatnonzero(places >= 0)
    entries = (np.ones(len(rows)), (rows, places[rows]))
    return sparse.csr_array(entries, shape=(len(places), width))


def _words(frame: Frame, name: str, notes: list[str]) -> Block:
    """The share of each word's bucket among the words of a row."""
    notes.append(f"text: the words of {name!r}, hashed into {BUCKETS:,} columns")
    values, codes = _texts(frame, name)
    table = _bags(values, bucket_of)
    names = [f"{name}#{bucket}" for bucket in range(BUCKETS)]
    empty = sparse.csr_array((1, BUCKETS))
    return sparse.csr_array(sparse.vstack([table, empty], format="csr"))[codes], names


def _bags(texts: Sequence[str], bucket: Callable[[str], int]) -> sparse.csr_array:
    """One row for each text: how often each bucket occurs in it, divided by its length."""
    ends = [0]
    places: list[int] = []
    shares: list[float] = []
    for text in texts:
        words = WORD.findall(text.lower())
        places += [bucket(word) for word in words]
        shares += [1 / len(words) for _ in words]
        ends.append(len(places))
    table = sparse.csr_array((shares, places, ends), shape=(len(texts), BUCKETS))
    table.sum_duplicates()
    return table


def features_like(frame: Frame, names: Sequence[str], columns: Columns, origin: Origin) -> Table:
    """Rows of another file with the features of a model, in the model's order: CSR.

    Args:
        frame: all columns of the file.
        names: of the model's features.
        columns: as the model's own file was read; words and categories are told apart by it.
        origin: the file, for messages.
    """
    path = Path(origin.source)
    parts = []
    for name, group in itertools.groupby(names, key=lambda one: _source_of(one, columns)):
        own = list(group)
        column = lookup(frame, name, path)
        if is_encoded(own[0]):
            parts.append(_encoded_like(frame, name, own, columns))
        else:
            values = _numbers_of(column, name, origin)
            parts.append(sparse.csr_array(values[:, None]))
    return sparse.csr_array(sparse.hstack(parts))


def _encoded_like(
    frame: Frame, name: str, features: Sequence[str], columns: Columns
) -> sparse.csr_array:
    """A column of text or categories; a category that was not there before is none of them."""
    if name in columns.text:
        return _words(frame, name, [])[0]
    values, codes = _texts(frame, name)
    if features[0].startswith(f"{name}#"):
        places = [bucket_of(value) if value else -1 for value in values]
    else:
        order = {one.removeprefix(f"{name}="): place for place, one in enumerate(features)}
        places = [order.get(value, -1) for value in values]
    return _indicators(np.array([*places, -1])[codes], len(features))


def _source_of(name: str, columns: Columns) -> str:
    """The column that a feature was made from."""
    for source in (*columns.categorical, *columns.text):
        if name.startswith((f"{source}=", f"{source}#")):
            return source
    return name


def _numbers_of(column: Column, name: str, origin: Origin) -> NDArray[np.float64]:
    if kind_of(column) not in ("number", "empty"):
        word = first_word(column, origin)
        raise origin.refuse(
            f"column {name!r} is not numeric, {word}", "it was numeric in the training"
        )
    return numbers(column)
