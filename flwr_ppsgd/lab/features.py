"""Columns as features: what kind each one is, and the numbers that a model sees.

``find_columns`` looks at everybody's rows to find the kinds, so that what it finds is a condition
of any promise; ``encode_columns`` applies kinds that are known and looks at nothing. Hashes are
public.
"""

import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.lab.data_options import DataOptions
from flwr_ppsgd.lab.schema import (
    BUCKETS,
    CATEGORY,
    FLAG,
    HASHED,
    LEFT_OUT,
    MOST_DENSE,
    NUMBER,
    PICTURE,
    SPARSE,
    TEXT,
    Column,
    Schema,
)
from flwr_ppsgd.lab.tables import GAPS, RawTable, Values, as_number, is_number_or_gap
from flwr_ppsgd.models.representation import looks_like_images
from flwr_ppsgd.settings import spans_of, split_names

MOST_WORDS = 64  # of a column that is taken as categories without being asked
MOST_ONE_HOT = 1000  # words of a category that was asked for; beyond, they are hashed
FEWEST_NUMBERED = 10  # rows, to take 1, 2, 3, … as row ids
DATES_LOOKED_AT = 100
MOST_LISTED = 8
WORD = re.compile(r"\w+")
ID = re.compile(
    r"(^|[_\W])(id|ID|Id|index|code)$|[a-z]I[dD]$"
    r"|^column \d+$|^Unnamed: \d+$|^__index_level_\d+__$"  # without a name, perhaps in pandas
)
MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ].*)?"  # 2024-01-31, with a time or without
    r"|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}( .*)?"  # 31.1.2024
    rf"|([a-z]+,? )?(\d\d?\.?[- ]{MONTH}|{MONTH} \d\d?),?[- ]\d{{2,4}}( .*)?"  # 31 Jan 2024
    r"|\d\d?:\d\d(:\d\d)?",  # 12:30
    re.IGNORECASE,
)
LIKE_NUMBER = re.compile(r"[-+$€£]*[\d.,' ]*\d[\d.,' ]*%?")  # 1234.5, but $1,234 and 5 % too
TRUTH = {"true": 1.0, "false": 0.0}
FIRST_SECOND, LAST_SECOND = 9e8, 2.3e9  # of timestamps: 1998 to 2042
SECONDS = (1.0, 1e3, 1e6, 1e9)  # in the units of timestamps
LARGEST = np.float64(1e60)  # of a number: products of squares are finite
USE = "--set feature-columns= uses it"
REASONS = {  # why a column is left out, and the option that changes it
    "date": "dates (--set time-column= tests on each user's last rows)",
    "timestamp": f"timestamps (--set time-column= tests on each user's last rows, {USE})",
    "row id": f"row ids ({USE})",
    "words": "many words (--categorical or --set text-columns= uses them)",
    "mixed": "not plain numbers (leave cells empty for gaps, write 1234.5; --categorical uses "
    "them)",
    "nested": "nested (write one column for each number)",
    "empty": "empty",
    "huge": f"numbers beyond {LARGEST:g}",
    "constant": "the same in every row",
    "picture": f"beside pictures ({USE} instead)",
    "excluded": "",
    "not named": "",
}


# --- values


def as_texts(values: Values) -> tuple[list[str], NDArray[np.intp]]:
    """The different values as text, and for each row which one it has; −1 is a gap.

    Text stays as it is written, without spaces around it; whole numbers have no decimals.
    """
    import pandas

    codes, found = pandas.factorize(values)
    words = [_label(value) for value in found.tolist()]
    places = np.asarray(codes, dtype=np.intp)
    empty = [place for place, word in enumerate(words) if not word]
    return words, np.where(np.isin(places, empty), -1, places)


def map_texts(values: Values, function: Callable[[str], Any], gap: Any) -> NDArray[Any]:
    """``function`` of each row's text, called once for each different one; ``gap`` for gaps."""
    words, codes = as_texts(values)
    found = [function(word) for word in words]
    return np.array([*found, gap])[codes]


def _label(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return str(value).strip()


def as_numbers(values: Values, decimal: str = ".") -> NDArray[np.float64]:
    """float64, with NaN for gaps, for what is no number and for what is beyond ``LARGEST``; true
    and false are 1 and 0."""
    if getattr(values.dtype, "kind", "O") in "biuf" and isinstance(values.dtype, np.dtype):
        numbers = np.array(values, dtype=np.float64)
    else:
        numbers = map_texts(values, lambda word: _number_of_word(word, decimal), np.nan)
    numbers[~is_usable(numbers)] = np.nan
    return numbers


def is_usable(numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """Which numbers are there, and not beyond ``LARGEST``."""
    return np.asarray((numbers >= -LARGEST) & (numbers <= LARGEST))


def _number_of_word(word: str, decimal: str) -> float:
    if word in GAPS:
        return np.nan
    truth = TRUTH.get(word.lower())
    number = as_number(word.replace(decimal, ".")) if truth is None else truth
    return np.nan if number is None else number


def is_text(values: Values) -> bool:
    """Whether a column holds words, and not numbers or dates."""
    return np.ndim(values) == 1 and str(values.dtype.kind) in "OUST"


# --- looking for kinds


def find_columns(
    table: RawTable, options: DataOptions, special: set[str]
) -> tuple[tuple[Column, ...], list[str]]:
    """The kind of each column that is not special, found by looking; and notes, one for each kind
    of decision."""
    asked = dict.fromkeys(split_names(options.categorical or ""), CATEGORY)
    asked |= dict.fromkeys(split_names(options.text or ""), TEXT)
    features = split_names(options.features or "")
    exclude = split_names(options.exclude or "")
    for name in (*asked, *features, *exclude):
        table.column(name)
    pictures = [name for name in table.shapes if name in table.columns and name not in special]
    found: list[Column] = []
    left_out: dict[str, list[str]] = {}
    for name, values in table.columns.items():
        if name in special or (table.only_x and name != "x"):
            continue
        reason = ""
        if name in exclude:
            reason = "excluded"
        elif features and name not in features and name not in asked:
            reason = "not named"
        elif pictures and not features and name not in (*pictures, *asked):
            reason = "picture"
        elif name in asked:
            found.append(_asked_column(name, values, asked[name]))
            continue
        elif not features:
            reason = _reason_against(name, values, table.decimal)
        if reason:
            shown = repr(name)
            if reason == "mixed":
                shown = f"{name!r} (as {_odd_word(values, table.decimal)!r})"
            left_out.setdefault(reason, []).append(shown)
            found.append(Column(name, LEFT_OUT))
        else:
            found.append(_found_column(table, name, values))
    return tuple(found), _column_notes(found, left_out)


def _asked_column(name: str, values: Values, kind: str) -> Column:
    if kind == TEXT:
        return Column(name, TEXT)
    words = sorted({word for word in as_texts(values)[0] if word})
    if len(words) > MOST_ONE_HOT or not words:
        return Column(name, HASHED)
    return Column(name, CATEGORY, tuple(words))


def _reason_against(name: str, values: Values, decimal: str) -> str:
    """Why a column is not used unless it is asked for; empty if it is."""
    if np.ndim(values) == 2:
        return ""
    if values.dtype.kind in "Mm":
        return "date"
    if is_text(values):
        first = next((value for value in values if value is not None), None)
        if isinstance(first, list | dict | np.ndarray | bytes):
            return "nested"
        if not _is_truth(values):
            return _reason_against_words(values, decimal)
    numbers = as_numbers(values)
    there = numbers[np.isfinite(numbers)]
    if not len(there):
        return "empty" if np.isnan(values).all() else "huge"
    return _reason_against_numbers(name, there, len(numbers))


def _reason_against_numbers(name: str, there: NDArray[np.float64], rows: int) -> str:
    if len(there) == rows and there.min() == there.max():
        return "constant"
    if (there != np.rint(there)).any():
        return ""
    for second in SECONDS:
        if there.min() / second >= FIRST_SECOND and there.max() / second <= LAST_SECOND:
            return "timestamp"
    if _are_days(there):
        return "date"
    return "row id" if _are_row_ids(name, there) else ""


def _is_truth(values: Values) -> bool:
    words = {word.lower() for word in as_texts(values)[0] if word}
    return bool(words) and words <= set(TRUTH)


def _odd_word(values: Values, decimal: str) -> str:
    """The first word that is neither a number nor a gap; empty if there is none."""
    words = as_texts(values)[0]
    odd = [word for word in words if not is_number_or_gap(word, decimal)]
    return odd[0] if odd else ""


def _reason_against_words(values: Values, decimal: str) -> str:
    words, codes = as_texts(values)
    there = [word for word in words if word]
    if not there:
        return "empty"
    looked_at = there[:DATES_LOOKED_AT]
    dates = [word for word in looked_at if DATE.fullmatch(word)]
    if len(dates) > 0.9 * len(looked_at):
        return "date"
    if len(there) == 1 and (codes >= 0).all():
        return "constant"
    if len(there) <= MOST_WORDS and 2 * len(there) <= len(codes):
        return ""
    like_numbers = [word for word in there if LIKE_NUMBER.fullmatch(word)]
    mixed = 2 * len(like_numbers) > len(there) and _odd_word(values, decimal)
    return "mixed" if mixed else "words"


def _are_days(numbers: NDArray[np.float64]) -> bool:
    """Whether whole numbers are dates as in 20240131."""
    if numbers.min() < 19000101 or numbers.max() > 21001231:
        return False
    month = numbers // 100 % 100
    day = numbers % 100
    is_month = (month >= 1) & (month <= 12)
    is_day = (day >= 1) & (day <= 31)
    return bool((is_month & is_day).all())


def _are_row_ids(name: str, numbers: NDArray[np.float64]) -> bool:
    """Whether whole numbers count the rows, or are all different and named like an id."""
    if len(numbers) < 2:
        return False
    if len(numbers) >= FEWEST_NUMBERED and (np.diff(numbers) == 1).all():
        return True
    return ID.search(name) is not None and len(np.unique(numbers)) == len(numbers)


def _found_column(table: RawTable, name: str, values: Values) -> Column:
    """The kind of a column that is used, if nothing was said about it."""
    if np.ndim(values) == 2:
        return _found_array(table, name, values)
    if is_text(values) and not _is_truth(values):
        return _asked_column(name, values, CATEGORY)
    return Column(name, FLAG if is_flag(as_numbers(values)) else NUMBER)


def _found_array(table: RawTable, name: str, values: Values) -> Column:
    width = int(values.shape[1])
    if sparse.issparse(values):
        return Column(name, SPARSE, width=width)
    shape = table.shapes.get(name, ())
    if values.dtype.kind in "biuf" and looks_like_images(values, shape):
        side = round(width**0.5)
        return Column(name, PICTURE, width=width, shape=shape or (side, side))
    flags = [place for place in range(width) if is_flag(values[:, place])]
    if values.dtype == np.uint8:
        flags = list(range(width))  # bytes: a model sees x/255
    return Column(name, NUMBER, width=width, flags=spans_of(flags))


def is_flag(values: NDArray[Any]) -> bool:
    """Whether all values that are there are 0 and 1."""
    there = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    return bool(((there == 0) | (there == 1)).all())


def _column_notes(found: Sequence[Column], left_out: dict[str, list[str]]) -> list[str]:
    notes = []
    words = []
    for column in found:
        if column.kind == CATEGORY:
            words.append(f"{column.name!r} ({len(column.words)} words)")
    if words:
        notes.append(f"taken as categories: {list_names(words)} (--exclude leaves them out)")
    for kind in (HASHED, TEXT):
        names = [repr(column.name) for column in found if column.kind == kind]
        if names:
            notes.append(f"{kind}, in {BUCKETS:,} columns each: {list_names(names)}")
    for reason, names in left_out.items():
        if REASONS[reason]:
            notes.append(f"left out, {REASONS[reason]}: {list_names(names)}")
    return notes


def count_of(number: int, noun: str) -> str:
    """The number with its noun, as in 1 user and 2,000 users."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def list_names(names: Sequence[str], most: int = MOST_LISTED) -> str:
    """The first names, and how many there are if those are not all."""
    shown = ", ".join(names[:most])
    return f"{shown}, … ({len(names):,} in all)" if len(names) > most else shown


# --- features of known kinds


def encode_columns(table: RawTable, schema: Schema) -> Values:
    """rows × features, dense or CSR; gaps and what is no number are NaN."""
    used = schema.used_columns
    blocks = []
    for column in used:
        values = table.columns[column.name]
        if np.ndim(values) == 2:
            blocks.append(_array(table, column))
        elif column.kind == TEXT:
            blocks.append(_shares_of_words(values))
        elif column.kind in (CATEGORY, HASHED):
            blocks.append(_one_hot(values, column))
        else:
            numbers = as_numbers(values, table.decimal)
            if column.kind == FLAG:
                numbers = np.clip(numbers, 0.0, 1.0)
            blocks.append(numbers[:, None])
    if len(blocks) == 1 and np.ndim(table.columns[used[0].name]) == 2:
        return blocks[0]  # as it is stored: bytes stay bytes
    encoded = sum(column.features for column in used if column.kind in (CATEGORY, HASHED, TEXT))
    if encoded > MOST_DENSE or any(column.kind == SPARSE for column in used):
        return sparse.csr_array(sparse.hstack([sparse.csr_array(block) for block in blocks]))
    dense = [block.toarray() if sparse.issparse(block) else block for block in blocks]
    return np.hstack(dense)


def _array(table: RawTable, column: Column) -> Values:
    values = table.columns[column.name]
    if values.shape[1] != column.width:
        raise table.refuse(
            f"{column.name!r} has {values.shape[1]} columns and the schema says {column.width}",
            "give a file of that form, or another schema",
        )
    if not sparse.issparse(values) and values.dtype.kind not in "biuf":
        raise table.refuse(f"x has type {values.dtype}", "features must be real numbers")
    return values


def _one_hot(values: Values, column: Column) -> sparse.csr_array:
    """One column for each word, or for each bucket of a hash; a gap or another word has none."""
    order = {word: place for place, word in enumerate(column.words)}
    if column.kind == HASHED:
        places = map_texts(values, bucket_of, -1)
    else:
        places = map_texts(values, lambda word: order.get(word, -1), -1)
    rows = np.flatnonzero(places >= 0)
    entries = (np.ones(len(rows)), (rows, places[rows]))
    return sparse.csr_array(entries, shape=(len(places), column.features))


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
