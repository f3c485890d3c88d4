"""Read files of users' rows as columns: .csv by pandas, .parquet by Arrow, .npz by numpy.

Users and categories are text: 007 is not 7, and NA may be a name. The separator and the decimal
comma of a .csv are found in its head.
"""

import codecs
import csv
import io
import itertools
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.checks import nearest, printable

Values: TypeAlias = Any  # a pandas.Series, an array, or a scipy.sparse.csr_array: none has types
Arrays: TypeAlias = dict[str, NDArray[Any]]

GAPS = ["", "NA", "N/A", "n/a", "NaN", "nan", "<NA>", "NULL", "null", "None", "#N/A", "?", "-", "."]
SEPARATORS = (",", ";", "\t", "|")
HEAD_BYTES = 1 << 16
HEAD_ROWS = 1000
UTF_8 = "utf-8-sig"
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
WIDE = ("utf-16", "utf-32", "utf_16", "utf_32")  # encodings in which letters have zero bytes
DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
DECIMAL_POINT = re.compile(r"-?\d+\.\d+")
MOST_SHOWN = 12  # names in an error
MOST_LETTERS = 200  # of another library's error
ENDINGS = (".csv", ".tsv", ".txt", ".parquet", ".npz")
COLUMN_OPTIONS = {"user": " (--user names the column)", "y": " (--target names the column)"}
BAG_OF_WORDS = {  # arrays of an .npz that hold x or labels in CSR
    *("indptr", "indices", "counts", "data", "shape", "length", "vocab"),
    *("tag_indptr", "tag_indices", "tag_names"),
}


@dataclass(frozen=True)
class CsvFormat:
    """How a .csv is written.

    Args:
        path: the file.
        encoding: of its text.
        separator: between values.
        decimal: "." or ",".
        names: of its columns.
        above: the number of records above the first row.
    """

    path: Path
    encoding: str
    separator: str
    decimal: str
    names: tuple[str, ...]
    above: int

    def records(self) -> Iterator[tuple[int, list[str]]]:
        """The line and the values of each row that is not empty."""
        with self.path.open(encoding=self.encoding, newline="", errors="replace") as file:
            reader = csv.reader(file, delimiter=self.separator)
            for record in itertools.islice(reader, self.above, None):
                if record:
                    yield reader.line_num, record

    def line(self, row: int) -> int:
        """The line in which a row ends; approximate if pandas and ``csv`` disagree on rows."""
        rest = itertools.islice(self.records(), row, None)
        line, _ = next(rest, (row + self.above + 1, []))
        return line

    def refuse_ragged(self) -> None:
        """ValueError that names the first line that is too short or too long, if there is one."""
        counts = [(line, len(record)) for line, record in self.records()]
        wrong = [(line, count) for line, count in counts if count != len(self.names)]
        if not wrong:
            return
        line, count = wrong[0]
        more = f" (and {len(wrong) - 1:,} more lines are wrong)" if len(wrong) > 1 else ""
        raise ValueError(
            f"{self.path}: line {line} has {count} values and there are {len(self.names)} "
            f"columns{more}: correct it, and quote values that contain {self.separator!r}"
        )


@dataclass(frozen=True, eq=False)
class RawTable:
    """The columns of a file.

    Args:
        source: the file, for messages.
        columns: by name, one value per row; an array may have several columns.
        shapes: of pictures and of arrays with more than two axes, by column.
        only_x: whether all features are in the column x; other columns are ignored.
        feature_names: of the columns of an array x, if the file names them.
        classes: the names of all classes or labels, if the source lists them.
        notes: what was changed.
        lines: the format of a .csv, with which messages count lines; None for other files.
    """

    source: str
    columns: Mapping[str, Values]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    only_x: bool = False
    feature_names: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lines: CsvFormat | None = None

    @property
    def rows(self) -> int:
        """The number of rows."""
        first = next(iter(self.columns.values()))
        return int(first.shape[0])

    @property
    def decimal(self) -> str:
        """The decimal point or comma of numbers in text."""
        return self.lines.decimal if self.lines else "."

    def column(self, name: str) -> Values:
        """The column of this name; ValueError with the nearest name if there is none."""
        if name in self.columns:
            return self.columns[name]
        what = "array" if self.source.endswith(".npz") else "column"
        raise ValueError(f"{self.source}: {missing_name(name, self.columns, what)}")

    def refuse(self, what: str, remedy: str, row: int | None = None) -> ValueError:
        """An error in one line: the file, the problem, the row, the remedy."""
        where = ""
        if row is not None:
            where = f" in row {row}" if self.lines is None else f" in line {self.lines.line(row)}"
        return ValueError(f"{self.source}: {what}{where}: {remedy}")

    def refuse_first(self, wrong: Values, what: str, remedy: str) -> None:
        """``refuse`` with the first row that is wrong in a series by row, if there is one."""
        if wrong.any():
            raise self.refuse(what, remedy, int(wrong.idxmax()))


def missing_name(name: str, names: Iterable[Any], what: str) -> str:
    """An error text with the names of a file and the nearest one."""
    known = [str(other) for other in names]
    shown = printable(", ".join(known[:MOST_SHOWN]), MOST_LETTERS)
    if len(known) > MOST_SHOWN:
        shown += ", …"
    problem = f"there is no {what} {name!r} among {shown}"
    if all(as_number(other) is not None for other in known):
        return f"{problem}: the first line must name the columns"
    return f"{problem}: did you mean {nearest(name, known)!r}?{COLUMN_OPTIONS.get(name, '')}"


def read_table_file(
    path: Path,
    text: Collection[str] | None = (),
    encoding: str = "",
    separator: str = "",
    decimal: str = "",
) -> RawTable:
    """The columns of a .csv, .parquet or .npz file.

    Args:
        path: the file.
        text: columns of a .csv that are text, whatever their values; None: all of them.
        encoding: of a .csv; by default that of a byte order mark, else UTF-8.
        separator: between the values of a .csv; found in its head by default.
        decimal: "." or ","; likewise.
    """
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise ValueError(
            f"{path}: data must be a file that ends in {', '.join(ENDINGS)}: convert it to one"
        )
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file: check the name")
    if ending == ".npz":
        return _read_npz(path)
    if ending == ".parquet":
        return read_parquet([path], str(path))
    return _read_csv(path, text, encoding, separator, decimal)


# --- .csv


def _read_csv(
    path: Path, text: Collection[str] | None, encoding: str, separator: str, decimal: str
) -> RawTable:
    import pandas

    encoding, head = _head_of(path, encoding)
    lines = head.splitlines(keepends=True)
    above = 0
    while not lines[above].strip() or lines[above].startswith("#"):  # empty, or a comment
        above += 1
    head = "".join(lines[above:])
    separator = separator or max(SEPARATORS, key=lambda one: _rows_agree(head, one))
    header, *rows = _records(head, separator)
    names, notes = distinct_names([name.strip() for name in header])
    if not decimal:
        decimal = "," if separator != "," and _has_decimal_comma(rows) else "."
    if decimal == ",":
        notes.append("numbers have a decimal comma")
    written = CsvFormat(path, encoding, separator, decimal, tuple(names), above + 1)

    numbers: list[str] = []
    if text is not None:
        for place, name in enumerate(names):
            cells = [row[place].strip() for row in rows if place < len(row)]
            if name not in text and all(is_number_or_gap(cell, decimal) for cell in cells):
                numbers.append(name)
    try:
        frame = _parse_csv(written, numbers)
        still = [name for name in numbers if frame[name].dtype.kind in "iufb"]
        if still != numbers:  # a column has words below the head
            frame = _parse_csv(written, still)
    except UnicodeDecodeError:
        raise _wrongly_encoded(path, encoding) from None
    except (pandas.errors.ParserError, pandas.errors.ParserWarning) as error:
        written.refuse_ragged()
        reason = printable(error, MOST_LETTERS)
        raise ValueError(f"{path}: cannot be read as csv ({reason}): export it again") from None
    last = frame[names[-1]]
    if last.isna().any() or last.eq("").any():
        written.refuse_ragged()
    return RawTable(str(path), dict(frame.items()), notes=tuple(notes), lines=written)


def _parse_csv(written: CsvFormat, numbers: Collection[str]) -> Any:
    """The data frame, in which all columns but ``numbers`` are text."""
    import pandas

    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        return pandas.read_csv(
            written.path,
            sep=written.separator,
            decimal=written.decimal,
            encoding=written.encoding,
            header=None,
            names=list(written.names),
            skiprows=written.above,
            index_col=False,
            dtype={name: str for name in written.names if name not in numbers},
            na_values=dict.fromkeys(numbers, GAPS),
            keep_default_na=False,
            skipinitialspace=True,
            engine="c",
            low_memory=False,
        )


def _head_of(path: Path, encoding: str) -> tuple[str, str]:
    """The encoding of a file, and its first lines."""
    with path.open("rb") as file:
        start = file.read(HEAD_BYTES)
    if not encoding:
        encoding = "utf-16" if start.startswith(UTF_16) else UTF_8
    if b"\0" in start and not encoding.startswith(WIDE):
        raise ValueError(f"{path}: not a text file, whatever its name says: export it as csv")
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(start)
    except LookupError:
        raise ValueError(f"{path}: there is no encoding {encoding!r}: try latin-1") from None
    except UnicodeDecodeError:
        raise _wrongly_encoded(path, encoding) from None
    if not text.strip():
        raise ValueError(f"{path}: cannot be read as csv, since it is empty: export it again")
    if len(start) == HEAD_BYTES:
        text = text[: text.rfind("\n") + 1] or text
    return encoding, text


def _wrongly_encoded(path: Path, encoding: str) -> ValueError:
    name = "utf-8" if encoding == UTF_8 else encoding
    return ValueError(
        f"{path}: the text is not {name}: save it as UTF-8, or name its encoding, as in --set "
        "encoding=latin-1"
    )


def _records(text: str, separator: str) -> list[list[str]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    filled = (record for record in reader if record)
    return list(itertools.islice(filled, HEAD_ROWS + 1))


def _rows_agree(text: str, separator: str) -> tuple[bool, int]:
    """Whether most rows have as many values as the header, and how many those are."""
    header, *rows = _records(text, separator)
    same = sum(len(row) == len(header) for row in rows)
    return 2 * same >= len(rows) and len(header) > 1, len(header)


def _has_decimal_comma(rows: Iterable[Sequence[str]]) -> bool:
    """Whether more values look like 1,5 than like 1.5: a user may be called 1.0."""
    commas = 0
    points = 0
    for cell in itertools.chain.from_iterable(rows):
        commas += DECIMAL_COMMA.fullmatch(cell.strip()) is not None
        points += DECIMAL_POINT.fullmatch(cell.strip()) is not None
    return commas > points


def is_number_or_gap(word: str, decimal: str) -> bool:
    """Whether a word is a number or a gap."""
    return word in GAPS or as_number(word.replace(decimal, ".")) is not None


def as_number(text: str) -> float | None:
    """The number that a text stands for; None if it is not one."""
    if "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def distinct_names(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Distinct names, and notes: a column without a name gets its place as one, and a repeated name
    gets its place appended."""
    found: list[str] = []
    notes = []
    for place, name in enumerate(names, 1):
        own = name or f"column {place}"
        if own in found:
            own = f"{name} ({place})"
            notes.append(f"column {place} is the second one called {name!r}: named {own!r} here")
        found.append(own)
    return found, notes


# --- .parquet


def read_parquet(files: Sequence[Path], source: str) -> RawTable:
    """The columns of .parquet files, one below the other; pictures as grey bytes."""
    import pyarrow
    from pyarrow import parquet

    try:
        tables = [parquet.read_table(file) for file in files]
        table = pyarrow.concat_tables(tables, promote_options="default")
    except Exception as error:  # Arrow has errors of several kinds
        reason = printable(error, MOST_LETTERS)
        raise ValueError(f"{source}: cannot be read as parquet ({reason}): export it") from None
    return table_of(table, source)


def table_of(table: Any, source: str) -> RawTable:
    """The columns of an Arrow table."""
    import pyarrow

    names, notes = distinct_names(table.column_names)
    table = table.rename_columns(names)
    for place, (name, column) in enumerate(zip(names, table.columns, strict=True)):
        if pyarrow.types.is_decimal(column.type):
            table = table.set_column(place, name, column.cast(pyarrow.float64()))
    frame = table.to_pandas(ignore_metadata=True)
    columns: dict[str, Values] = dict(frame.items())
    shapes = {}
    for name, values in columns.items():
        if values.dtype == object and len(values):
            pixels = _pixels_of(values.tolist(), f"{source}: column {name!r}")
            if pixels is not None:
                shapes[name] = pixels.shape[1:]
                columns[name] = pixels.reshape(len(pixels), -1)
    return RawTable(source, columns, shapes=shapes, notes=tuple(notes))


def _pixels_of(values: Sequence[Any], where: str) -> NDArray[np.uint8] | None:
    """Pictures that are stored as bytes, or in a field "bytes"; None if they are not."""
    contents: list[Any] = [
        value.get("bytes") if isinstance(value, dict) else value for value in values
    ]
    if not all(isinstance(content, bytes) for content in contents):
        return None
    pictures = []
    for row, content in enumerate(contents):
        file = io.BytesIO(content)
        pictures.append(grey_picture(file, f"{where}, row {row}", "the column, or the row"))
    return stack_pictures(pictures, where)


def grey_picture(file: Any, where: str, remove: str = "it") -> NDArray[np.uint8]:
    """The grey bytes of a picture; an error says what to remove."""
    from PIL import Image

    try:
        with Image.open(file) as picture:
            return np.asarray(picture.convert("L"), dtype=np.uint8)
    except OSError:
        raise ValueError(f"{where}: cannot be read as a picture: remove {remove}") from None


def stack_pictures(pictures: Sequence[NDArray[np.uint8]], where: str) -> NDArray[np.uint8]:
    """Pictures of one size in one array: pictures × height × width."""
    first = pictures[0].shape
    for place, picture in enumerate(pictures):
        if picture.shape != first:
            raise ValueError(
                f"{where}: picture {place} has {picture.shape} pixels and the first one "
                f"{first}: bring all of them to one size"
            )
    return np.stack(pictures)


# --- .npz


def _read_npz(path: Path) -> RawTable:
    """The arrays of an .npz: ``user``, ``y`` and ``test``; x dense, or CSR in ``indptr``,
    ``indices`` and ``counts`` or ``data``; several labels per row in ``tag_indptr`` and
    ``tag_indices``."""
    arrays = _arrays_of(path)
    columns: dict[str, Values] = {}
    shapes = {}
    for name, array in arrays.items():
        if name not in BAG_OF_WORDS:
            columns[name] = array
    words = tuple(str(word) for word in arrays.get("vocab", ()))
    labels = tuple(str(name) for name in arrays.get("tag_names", ()))
    if "x" in columns and columns["x"].ndim > 2:
        shapes["x"] = columns["x"].shape[1:]
        columns["x"] = columns["x"].reshape(len(columns["x"]), -1)
    elif "indptr" in arrays:
        width = int(arrays["shape"][1]) if "shape" in arrays else len(words)
        values = "counts" if "counts" in arrays else "data"
        columns["x"] = _csr(path, arrays, "indptr", "indices", values, width=width)
        if values == "counts":
            columns["x"] = mean_of_one_hots(columns["x"], arrays.get("length"))
    if "y" not in columns and "tag_indptr" in arrays:
        columns["y"] = _csr(path, arrays, "tag_indptr", "tag_indices", width=len(labels))
    return RawTable(str(path), columns, shapes, True, words, labels)


def _arrays_of(path: Path) -> Arrays:
    """All arrays of an .npz file, by name."""
    arrays: Arrays = {}
    name = ""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            for name in file.files:
                arrays[name] = file[name]
    except Exception as error:  # numpy and zipfile have errors of several kinds
        if "pickle" in str(error) and name:
            raise ValueError(
                f"{path}: array {name!r} holds Python objects, which are never read (reading them "
                "would run code from the file): save it as numbers or text, as in "
                f"numpy.array({name}, dtype=str)"
            ) from None
        raise ValueError(
            f"{path}: cannot be read as npz ({error}): save it again with numpy.savez"
        ) from None
    return arrays


def mean_of_one_hots(
    counts: sparse.csr_array, lengths: NDArray[Any] | None = None
) -> sparse.csr_array:
    """Counts divided by the document's length: the paper's features of a bag of words.

    Args:
        counts: documents × vocabulary.
        lengths: the number of words of each document, including words that are not in the
            vocabulary. If they are unknown, the sum of the counts is taken.
    """
    if lengths is None:
        lengths = counts.sum(axis=1)
    totals = np.asarray(lengths, dtype=np.float64)
    words = np.diff(counts.indptr)
    shares = counts.data / np.repeat(totals, words)
    return sparse.csr_array((shares, counts.indices, counts.indptr), shape=counts.shape)


def _csr(path: Path, arrays: Arrays, *names: str, width: int) -> sparse.csr_array:
    """A CSR table from its arrays, checked.

    Args:
        path: the file, for messages.
        arrays: all arrays of the file.
        names: of the arrays: indptr, indices, and the values unless all of them are 1.
        width: the number of columns; 0 if the largest index decides.
    """
    for name in names:
        if name not in arrays:
            raise ValueError(f"{path}: {missing_name(name, arrays, 'array')}")
    starts = arrays[names[0]].astype(np.int64)
    places = arrays[names[1]].astype(np.int64)
    values = np.ones(len(places))
    if len(names) > 2:
        values = arrays[names[2]].astype(np.float64)
    columns = width or int(places.max(initial=-1)) + 1
    try:
        table = sparse.csr_array((values, places, starts), shape=(len(starts) - 1, columns))
        table.check_format(full_check=True)
    except ValueError as error:
        raise ValueError(
            f"{path}: {', '.join(names)} are not those of one CSR matrix ({error}): save them again"
        ) from None
    table.sum_duplicates()
    return table
