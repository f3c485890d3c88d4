"""Per-user data in .csv and .parquet files, by way of Arrow."""

import codecs
import csv
import importlib
import io
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.checks import printable
from flwr_ppsgd.lab.data.columns import Columns, known
from flwr_ppsgd.lab.data.raw import Origin

Frame: TypeAlias = Any  # a pyarrow.Table, which has no types
Column: TypeAlias = Any  # a pyarrow.ChunkedArray

GAPS = ["", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "#N/A", "?", "-", "."]
SEPARATORS = (";", "\t", "|", ",")
FIRST_BYTES = 1 << 16
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
MOST_LETTERS = 200  # of another library's error
DECIMAL_COMMA = re.compile(r"(?:^|;)-?\d+,\d+(?=;|$)", re.MULTILINE)
DECIMAL_POINT = re.compile(r"(?:^|;)-?\d+\.\d+(?=;|$)", re.MULTILINE)


def frame_of(path: Path, columns: Columns | None = None) -> tuple[Frame, tuple[str, ...]]:
    """An Arrow table with one column for each name, and notes on the names that were changed.

    Args:
        path: a .csv or .parquet file.
        columns: how it is written. Of a .csv, users are read as text, so that 007 and 7 stay two.
    """
    columns = columns or Columns()
    if path.suffix.lower() == ".parquet":
        need_module("pyarrow", f"{path}: a .parquet file")
        frame = _parquet(path)
        names, notes = _distinct(frame.column_names)
        return frame.rename_columns(names), notes
    need_module("pyarrow", f"{path}: a {path.suffix} file")
    start = _start_of(path)
    first = _first_text(start, columns, path)
    skipped = _comments(first)
    header = _header("\n".join(first.splitlines()[skipped:]), columns, path)
    names, notes = _distinct(header)
    comma = _has_decimal_comma(first, columns)
    if comma:
        notes = (*notes, "numbers have a decimal comma")
    file = _Csv(path, columns, tuple(names), "," if comma else ".", skipped + 1)
    return file.read(first), notes


def origin_of(path: Path) -> Origin:
    """How messages about a file count rows: in a .csv by lines, below the header."""
    if path.suffix.lower() == ".csv":
        return Origin(str(path), "line", 2)
    return Origin(str(path))


def need_module(name: str, for_what: str) -> ModuleType:
    """An optional package; ValueError with the pip command if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(
            f"{for_what} needs the package {name!r}, which is not installed: pip install "
            "'flwr-ppsgd[data]'"
        ) from None


def _parquet(path: Path) -> Frame:
    from pyarrow import parquet

    try:
        return parquet.read_table(path)
    except Exception as error:  # Arrow has errors of several kinds
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: object, remedy: str = "export the file again") -> ValueError:
    reason = printable(error, MOST_LETTERS)
    return ValueError(f"{path}: cannot be read as {path.suffix[1:]}: {reason}: {remedy}")


def _start_of(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file: check the name")
    with path.open("rb") as file:
        return file.read(FIRST_BYTES)


def _first_text(start: bytes, columns: Columns, path: Path) -> str:
    """The beginning of a .csv as text."""
    try:
        decoder = codecs.getincrementaldecoder(columns.encoding)()
        text = decoder.decode(start).removeprefix("\ufeff")
    except LookupError:
        raise ValueError(
            f"{path}: there is no encoding {columns.encoding!r}: try utf-8, latin-1 or utf-16"
        ) from None
    except UnicodeDecodeError as error:
        line = start.count(b"\n", 0, error.start) + 1
        raise _wrongly_encoded(path, columns, f"line {line}", start) from None
    if not text.strip():
        raise ValueError(f"{path}: cannot be read as csv: it is empty: export the file again")
    return text


def _wrongly_encoded(path: Path, columns: Columns, where: str, start: bytes = b"") -> ValueError:
    likely = "utf-16" if start.startswith(UTF_16) else "latin-1"
    return ValueError(
        f"{path}: cannot be read as csv: {where} is not {columns.encoding}: name its encoding, as "
        f"in --encoding {likely}"
    )


def _comments(text: str) -> int:
    """The number of lines at the top that begin with #."""
    lines = text.splitlines()
    return next((at for at, line in enumerate(lines) if not line.startswith("#")), 0)


def _header(text: str, columns: Columns, path: Path) -> list[str]:
    """The names in the first line; ValueError if another character seems to separate them."""
    names = _split(text, columns.sep)
    if columns.user not in names:
        for sep in SEPARATORS:
            others = _split(text, sep)
            if len(others) > len(names):
                shown = "\\t" if sep == "\t" else sep
                raise ValueError(
                    f"{path}: line 1 has {len(names)} column(s) if {columns.sep!r} separates them "
                    f"and {len(others)} with {shown!r}: add --sep '{shown}'"
                )
    return names


def _split(text: str, sep: str) -> list[str]:
    first = next(csv.reader(io.StringIO(text), delimiter=sep), [])
    return [name.strip() for name in first]


def _has_decimal_comma(text: str, columns: Columns) -> bool:
    if columns.sep != ";":
        return False
    return bool(DECIMAL_COMMA.search(text)) and not DECIMAL_POINT.search(text)


def _distinct(names: Iterable[str]) -> tuple[list[str], tuple[str, ...]]:
    """Each name once: a column without a name is called by its place, a second one of a name by
    both."""
    found: list[str] = []
    notes = []
    for place, name in enumerate(names, 1):
        own = name or f"column {place}"
        if own in found:
            own = f"{name} ({place})"
            notes.append(f"column {place} is the second one called {name!r}: named {own!r} here")
        found.append(own)
    return found, tuple(notes)


@dataclass(frozen=True)
class _Csv:
    """A .csv without its header.

    Args:
        path: the file.
        columns: how it is written.
        names: of its columns.
        decimal_point: "." or ",".
        above: the number of lines above the first row.
    """

    path: Path
    columns: Columns
    names: tuple[str, ...]
    decimal_point: str
    above: int

    def read(self, start: str) -> Frame:
        """The whole file, whose beginning is ``start``.

        Columns are expected to go on as they start: Arrow keeps the text of the whole file as long
        as the type of one column is open. If one does not, or a row is cut short by a newline
        inside quotes, the file is read again without such expectations.
        """
        arrow = need_module("pyarrow", str(self.path))
        try:
            return self._checked(self._parsed(self.path, self._expected(start)))
        except UnicodeDecodeError as error:
            where = f"a value at byte {error.start} of a block"
            raise _wrongly_encoded(self.path, self.columns, where) from None
        except arrow.ArrowException as error:
            first = error
        try:
            return self._checked(self._parsed(self.path, {}, newlines=True))
        except arrow.ArrowException:
            raise self._cut_short() or _unreadable(self.path, first) from None

    def _cut_short(self) -> ValueError | None:
        """An error that names the first line with another number of values; None if all agree."""
        with self.path.open(encoding=self.columns.encoding, newline="") as file:
            rows = csv.reader(file, delimiter=self.columns.sep)
            for row in itertools.islice(rows, self.above, None):
                if row and len(row) != len(self.names):
                    return ValueError(
                        f"{self.path}: cannot be read as csv: line {rows.line_num} has {len(row)} "
                        f"values and there are {len(self.names)} columns: correct that line, or "
                        "name another separator by --sep"
                    )
        return None

    def _expected(self, start: str) -> dict[str, Any]:
        """The types of columns at the start of the file. Features are real numbers even if they
        start with whole ones or with gaps."""
        import pyarrow

        kept = {*self.columns.target.split(","), "test", self.columns.test, self.columns.time}
        whole_lines = start[: start.rfind("\n") + 1]
        if whole_lines.count("\n") <= self.above:
            return {}
        found = {}
        in_utf_8 = replace(self, columns=replace(self.columns, encoding="utf-8"))
        for field in in_utf_8._parsed(io.BytesIO(whole_lines.encode()), {}).schema:
            whole = pyarrow.types.is_integer(field.type) and field.name not in kept
            real = whole or pyarrow.types.is_null(field.type)
            found[field.name] = pyarrow.float64() if real else field.type
        return found

    def _parsed(self, file: Any, types: Mapping[str, Any], newlines: bool = False) -> Frame:
        import pyarrow
        from pyarrow import csv as reader

        types = {**types, self.columns.user: pyarrow.string()}
        return reader.read_csv(
            file,
            reader.ReadOptions(
                column_names=list(self.names), skip_rows=self.above, encoding=self.columns.encoding
            ),
            reader.ParseOptions(delimiter=self.columns.sep, newlines_in_values=newlines),
            reader.ConvertOptions(
                column_types=types, null_values=GAPS, decimal_point=self.decimal_point
            ),
        )

    def _checked(self, frame: Frame) -> Frame:
        """The same; ValueError if a column is not text in this encoding."""
        from pyarrow import types

        for name in frame.column_names:
            if types.is_binary(frame.column(name).type):
                row = _first_undecoded(frame.column(name), self.columns.encoding)
                where = f"column {name!r} in line {row + self.above + 1}"
                raise _wrongly_encoded(self.path, self.columns, where)
        return frame


def _first_undecoded(column: Column, encoding: str) -> int:
    """The first row whose bytes are no text in this encoding."""
    for row, value in enumerate(column.to_pylist()):
        try:
            (value or b"").decode(encoding)
        except UnicodeDecodeError:
            return row
    return 0


def kind_of(column: Column) -> str:
    """What a column holds: "number", "text", "date", "nested", or Arrow's own name."""
    from pyarrow import types

    held = column.type
    if types.is_dictionary(held):
        held = held.value_type
    kinds = {
        "number": (types.is_boolean, types.is_integer, types.is_floating, types.is_decimal),
        "text": (types.is_string, types.is_large_string, types.is_string_view),
        "date": (types.is_temporal,),
        "nested": (types.is_nested,),
        "empty": (types.is_null,),
    }
    for kind, tests in kinds.items():
        if any(test(held) for test in tests):
            return kind
    return str(held)


def numbers(column: Column) -> NDArray[np.float64]:
    """A column of numbers as float64, with gaps as NaN."""
    import pyarrow

    real = column.cast(pyarrow.float64(), safe=False)
    return np.asarray(real.to_numpy(zero_copy_only=False), dtype=np.float64)


def plain(column: Column) -> NDArray[Any]:
    """Whole numbers and truth values as such if there are no gaps; numbers with gaps as float64;
    all else as objects, with gaps as None."""
    if kind_of(column) in ("number", "empty"):
        values: NDArray[Any] = column.to_numpy()
        return values if values.dtype.kind in "biuf" else numbers(column)
    return np.array([*column.to_pylist(), None], dtype=object)[:-1]


def first_word(column: Column, origin: Origin) -> str:
    """The first value that is not a number, and where it is."""
    for row, value in enumerate(column.to_pylist()):
        try:
            float(value)
        except (TypeError, ValueError):
            shown = printable(value, 30)
            return f"{shown!r}{origin.at(row)}"
    return f"type {column.type}"


def times(column: Column, name: str, origin: Origin) -> NDArray[np.float64]:
    """Numbers, or dates as numbers; a gap is NaN."""
    import pyarrow

    kind = kind_of(column)
    if kind == "number":
        return numbers(column)
    if kind == "text":
        column = _dates(column, name, origin)
    elif kind != "date":
        raise origin.refuse(
            f"column {name!r} is not a time but {column.type}", "write 2024-01-31 or a number"
        )
    since_1970 = column.cast(pyarrow.timestamp("ns"), safe=False)
    return numbers(since_1970.cast(pyarrow.int64()))


def _dates(column: Column, name: str, origin: Origin) -> Column:
    import pyarrow

    try:
        return column.cast(pyarrow.timestamp("ns", tz="UTC"))
    except pyarrow.ArrowException:
        pass
    try:
        return column.cast(pyarrow.timestamp("ns"))
    except pyarrow.ArrowException:
        row = _first_undated(column)
        value = column[row].as_py()
        raise origin.refuse(
            f"column {name!r} is not a time ({value!r})", "write 2024-01-31 or a number", row
        ) from None


def _first_undated(column: Column) -> int:
    import pyarrow

    for row in range(len(column)):
        try:
            column[row : row + 1].cast(pyarrow.timestamp("ns"))
        except pyarrow.ArrowException:
            return row
    return 0


def give_back_memory() -> None:
    """Arrow keeps the memory of tables that are gone; the system can use it."""
    import pyarrow

    pyarrow.default_memory_pool().release_unused()


def lookup(frame: Frame, name: str, path: Path) -> Column:
    """The column of this name; ValueError with the nearest name if there is none."""
    return frame.column(known(name, frame.column_names, path, "column"))
