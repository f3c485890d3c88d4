"""Columns of known kinds as the features of a model.

A schema decides everything: nothing is inferred from the rows, and hashes are public.
"""

import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.checks import printable
from flwr_ppsgd.lab.schema import (
    BUCKETS,
    CATEGORY,
    FLAG,
    HASHED,
    MOST_DENSE,
    SPARSE,
    TEXT,
    Column,
    Schema,
)
from flwr_ppsgd.lab.tables import GAPS, RawTable, Values, as_number

MOST_LISTED = 8
MOST_LETTERS = 80  # of a name in a list
LARGEST = np.float64(1e60)  # of a number: products of squares are finite
WORD = re.compile(r"\w+")
PLAIN_NUMBER = re.compile(r"-?[1-9][0-9]*|0")
TRUTH = {"true": 1.0, "false": 0.0}


# --- values


def as_texts(values: Values) -> tuple[list[str], NDArray[np.intp]]:
    """The distinct values as text, and for each row the place of its value; −1 is a gap.

    Spaces around a text are removed; whole numbers have no decimals.
    """
    import pandas

    codes, different = pandas.factorize(values)
    words = [_text_of(value) for value in different.tolist()]
    places = np.asarray(codes, dtype=np.intp)
    empty = [place for place, word in enumerate(words) if not word]
    return words, np.where(np.isin(places, empty), -1, places)


def map_texts(values: Values, function: Callable[[str], Any], gap: Any) -> NDArray[Any]:
    """``function`` of each row's text, called once for each distinct text; ``gap`` for gaps."""
    words, codes = as_texts(values)
    results = [function(word) for word in words]
    return np.array([*results, gap])[codes]


def _text_of(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return str(value).strip()


def as_numbers(values: Values, decimal: str = ".") -> NDArray[np.float64]:
    """float64, with true as 1 and false as 0; NaN for gaps, words and numbers above ``LARGEST``."""

    def number_of(word: str) -> float:
        if word in GAPS:
            return np.nan
        if word.lower() in TRUTH:
            return TRUTH[word.lower()]
        number = as_number(word.replace(decimal, "."))
        return np.nan if number is None else number

    is_plain = isinstance(getattr(values, "dtype", None), np.dtype)
    if is_plain and values.dtype.kind in "biuf":
        numbers = np.array(values, dtype=np.float64)
    else:
        numbers = map_texts(values, number_of, np.nan)
    numbers[~is_usable(numbers)] = np.nan
    return numbers


def is_usable(numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """Which numbers are not NaN and not beyond ``LARGEST``."""
    return np.asarray((numbers >= -LARGEST) & (numbers <= LARGEST))


def is_text(values: Values) -> bool:
    """Whether a column holds words, and not numbers or dates."""
    return np.ndim(values) == 1 and str(values.dtype.kind) in "OUST"


def stack_targets(table: RawTable, targets: Sequence[str]) -> Values:
    """Target columns side by side."""
    first = table.columns[targets[0]]
    if sparse.issparse(first):
        return first
    if np.ndim(first) == 2:
        return np.asarray(first, dtype=np.float64)
    parts = [as_numbers(table.columns[name], table.decimal) for name in targets]
    return np.stack(parts, axis=1)


def sorted_labels(labels: set[str]) -> tuple[str, ...]:
    """Sorted as numbers if all are whole numbers without leading zeros, else as text."""
    if all(PLAIN_NUMBER.fullmatch(label) for label in labels):
        return tuple(sorted(labels, key=int))
    return tuple(sorted(labels))


# --- words for people


def count_of(number: int, noun: str) -> str:
    """The number with its noun, as in 1 user and 2,000 users."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def list_names(names: Sequence[str], most: int = MOST_LISTED) -> str:
    """The first names and, if there are more, their number; printable on a terminal."""
    shown = ", ".join(printable(name, MOST_LETTERS) for name in names[:most])
    if len(names) <= most:
        return shown
    return f"{shown}, … ({len(names):,} in all)"


# --- features of known kinds


def encode_columns(table: RawTable, schema: Schema) -> Values:
    """rows × features, dense or CSR; NaN for gaps and for what is not a number.

    A single array keeps its type: bytes stay bytes.
    """
    used = schema.used_columns
    blocks = [_encode_column(table, column) for column in used]
    if len(used) == 1 and np.ndim(table.columns[used[0].name]) == 2:
        return blocks[0]
    encoded = sum(column.features for column in used if column.kind in (CATEGORY, HASHED, TEXT))
    if encoded > MOST_DENSE or any(column.kind == SPARSE for column in used):
        rows = [sparse.csr_array(block) for block in blocks]
        return sparse.csr_array(sparse.hstack(rows))
    dense = [block.toarray() if sparse.issparse(block) else block for block in blocks]
    return np.hstack(dense)


def _encode_column(table: RawTable, column: Column) -> Values:
    """The features of one column: rows × ``column.features``."""
    values = table.columns[column.name]
    if np.ndim(values) == 2:
        if values.shape[1] != column.width:
            what = f"{column.name!r} has {values.shape[1]} columns"
            remedy = "give a file of that form, or another schema"
            raise table.refuse(f"{what} and the schema says {column.width}", remedy)
        if not sparse.issparse(values) and values.dtype.kind not in "biuf":
            raise table.refuse(f"x has type {values.dtype}", "features must be real numbers")
        return values
    if column.kind == TEXT:
        return _shares_of_words(values)
    if column.kind == HASHED:
        return _one_hot(map_texts(values, bucket_of, -1), BUCKETS)
    if column.kind == CATEGORY:
        order = {word: place for place, word in enumerate(column.words)}
        places = map_texts(values, lambda word: order.get(word, -1), -1)
        return _one_hot(places, len(column.words))
    numbers = as_numbers(values, table.decimal)
    if column.kind == FLAG:
        numbers = np.clip(numbers, 0.0, 1.0)
    return numbers[:, None]


def _one_hot(places: NDArray[np.intp], width: int) -> sparse.csr_array:
    """A 1 in each row's place; zeros where it is −1, for a gap or a word that is not listed."""
    rows = np.flatnonzero(places >= 0)
    entries = (np.ones(len(rows)), (rows, places[rows]))
    return sparse.csr_array(entries, shape=(len(places), width))


def bucket_of(word: str) -> int:
    """The public hash of a word."""
    return zlib.crc32(word.encode()) % BUCKETS


def _shares_of_words(values: Values) -> sparse.csr_array:
    """The share of each word's bucket among the words of a row."""
    texts, codes = as_texts(values)
    ends = [0]
    places: list[int] = []
    shares: list[float] = []
    for text in (*texts, ""):  # the last one is for gaps, −1
        words = WORD.findall(text.lower())
        places += [bucket_of(word) for word in words]
        shares += [1 / len(words) for _ in words]
        ends.append(len(places))
    table = sparse.csr_array((shares, places, ends), shape=(len(texts) + 1, BUCKETS))
    table.sum_duplicates()
    return table[codes]
