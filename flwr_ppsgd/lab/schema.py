"""A schema: what is public about a file of users' rows, that is the form of a model and how rows
are read.

``ppsgd look FILE --write schema.toml`` writes a schema; its author reads it, corrects it and
declares it to be public. A run with a schema infers nothing from the rows: a category or a class
that is not listed affects only the rows of the user who has it.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_type_hints

from flwr_ppsgd.checks import one_of
from flwr_ppsgd.database import PRIVATE_FILE
from flwr_ppsgd.settings import (
    check_known,
    key_of,
    keys_of,
    name_of,
    places_in,
    read_toml,
    typed_value,
)

TaskName: TypeAlias = Literal["classification", "multi-label", "regression"]
TASKS = ("classification", "multi-label", "regression")
NUMBER = "number"  # scaled on each device by the user's own mean and deviation
FLAG = "flag"  # 0 and 1, used as it is
CATEGORY = "category"  # one feature for each of its words, all 0 for another word
HASHED = "hashed"  # a category with a public hash in place of its words
TEXT = "text"  # the share of each word among the words of a row, hashed
SPARSE = "sparse"  # columns that most users lack
PICTURE = "picture"  # pixels
LEFT_OUT = "left out"  # not used
PLAIN = (NUMBER, FLAG, HASHED, TEXT, LEFT_OUT)  # kinds that a schema file names by a word alone
ARRAY_KINDS = (NUMBER, SPARSE, PICTURE)  # of an array of several columns
BUCKETS = 4096  # features of a hashed column
MOST_DENSE = 64  # words of a category; with more its columns are sparse
OWN_MEAN = "own-mean"
ZERO = "zero"
MISSING = {OWN_MEAN: "the mean of the user's own training rows, else 0", ZERO: "0"}
OWN = "own"
SCALING = (OWN, "none")
ALL = "all"
WRITTEN = """\
# What is public about {name}. It was written by looking at users' rows: read it, take out what
# only few users' rows show (a rare word, a class), and declare the rest to be public.
# Then: ppsgd run --data {name} --schema FILE
"""
OF_COLUMNS = (
    '[columns]  # in order: "number", "flag" (0 and 1), "text", "hashed", "left out", '
    "or a list of words"
)


@dataclass(frozen=True)
class Column:
    """A column of a file, or an array of several.

    Args:
        name: in the file.
        kind: one of the eight words above.
        words: of a category, in order.
        width: the number of columns of an array; of a picture, of its pixels.
        flags: of an array of numbers, the places of columns of 0 and 1, as in 3-5,9.
        shape: of a picture, such as (28, 28).
    """

    name: str
    kind: str
    words: tuple[str, ...] = ()
    width: int = 1
    flags: str = ""
    shape: tuple[int, ...] = ()

    @property
    def features(self) -> int:
        """The number of features of this column in a model."""
        if self.kind == LEFT_OUT:
            return 0
        if self.kind == CATEGORY:
            return len(self.words)
        return BUCKETS if self.kind in (HASHED, TEXT) else self.width

    def feature_names(self) -> list[str]:
        """A name for each feature; none for an array."""
        if self.kind == CATEGORY:
            return [f"{self.name}={word}" for word in self.words]
        if self.kind in (HASHED, TEXT):
            return [f"{self.name}#{bucket}" for bucket in range(BUCKETS)]
        return [self.name] if self.kind in (NUMBER, FLAG) else []

    def model_kinds(self) -> list[str]:
        """The kind of each feature, as in ``AdditiveLinear``."""
        if self.kind == NUMBER:
            kinds = ["number"] * self.width
            for place in places_in(self.flags):
                kinds[place] = "as-is"
            return kinds
        rare = self.kind in (HASHED, TEXT, SPARSE) or len(self.words) > MOST_DENSE
        return ["sparse" if rare else "as-is"] * self.features

    def to_toml(self) -> str:
        """Its value in a schema file: a kind, a list of words, or a table."""
        if self.kind == CATEGORY:
            return _toml(self.words)
        if self.kind in PLAIN and self.width == 1:
            return _toml(self.kind)
        parts = [f"kind = {_toml(self.kind)}, width = {self.width}"]
        if self.flags:
            parts.append(f"flags = {_toml(self.flags)}")
        if self.shape:
            parts.append(f"shape = {_toml(self.shape)}")
        return "{" + ", ".join(parts) + "}"


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The form of a model and how rows are read.

    Args:
        user: the column that names a row's user.
        enrolled: the ids of the users who take part; None: all ids in the file.
        target: the columns to predict.
        task: "classification", "multi-label" or "regression".
        classes: of classification, or the labels, in order; of an array of amounts, their names.
        columns: all others, in order.
        missing: the value of a missing feature, one of ``MISSING``.
        test: the column that marks test rows; "" for a share of each user's rows.
        time: the column that orders a user's rows: the last ones are test rows.
        test_fraction: each user's test part, unless a column marks it.
        split_seed: decides which rows, unless there is a time column.
        representation: what a linear model sees of a row, as in ``Problem``.
        representation_features: the number of features of a random one; None: its own default.
        representation_seed: of a random one.
        scaling: "own": each user's own mean and deviation, on the device; or "none".
        dtype: of the features.
        separator: of a .csv, between values.
        decimal: of a .csv, "." or ",".
        encoding: of a .csv.
        sha256: of the file that it was read from, or of the text that ``to_toml`` gives.
    """

    user: str
    enrolled: tuple[str, ...] | None = None
    target: tuple[str, ...]
    task: TaskName
    classes: tuple[str, ...] = ()
    columns: tuple[Column, ...]
    missing: str = OWN_MEAN
    test: str = ""
    time: str = ""
    test_fraction: float = 0.2
    split_seed: int = 0
    representation: str = "none"
    representation_features: int | None = None
    representation_seed: int = 0
    scaling: str = OWN
    dtype: str = "float64"
    separator: str = ""
    decimal: str = ""
    encoding: str = ""
    sha256: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        one_of("task", self.task, TASKS)
        one_of("missing", self.missing, MISSING)
        one_of("scaling", self.scaling, SCALING)
        one_of("dtype", self.dtype, ("float64", "uint8"))
        if self.task != "regression" and len(self.classes) < 2:
            raise ValueError(f"classes must be at least 2, got {len(self.classes)}: list them")
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("classes has a name twice: list each once")
        if not 0 < self.test_fraction < 1:
            raise ValueError(f"test-fraction must be between 0 and 1, got {self.test_fraction}")
        if not any(column.features for column in self.columns):
            raise ValueError("columns must have one at least that is not left out: add one")

    @property
    def outputs(self) -> int:
        """K."""
        return len(self.classes) or len(self.target)

    @property
    def used_columns(self) -> tuple[Column, ...]:
        """The columns that are not left out."""
        return tuple(column for column in self.columns if column.features)

    @property
    def picture(self) -> Column | None:
        """The column of pictures, if there is one."""
        return next((column for column in self.columns if column.kind == PICTURE), None)

    def feature_names(self) -> tuple[str, ...]:
        """A name for each feature; none if one is an array."""
        names = [name for column in self.used_columns for name in column.feature_names()]
        features = sum(column.features for column in self.used_columns)
        return tuple(names) if len(names) == features else ()

    def model_kinds(self) -> tuple[str, ...]:
        """The kind of each feature, as in ``AdditiveLinear``."""
        kinds = [kind for column in self.used_columns for kind in column.model_kinds()]
        if self.scaling != OWN:
            kinds = ["as-is" if kind == "number" else kind for kind in kinds]
        return tuple(kinds)

    def special_columns(self) -> set[str]:
        """Columns that are never features."""
        return {self.user, *self.target, self.test, self.time} - {""}

    def to_toml(self, name: str = "the data") -> str:
        """The text of a schema file about a file of this name."""
        lines = []
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "enrolled":
                value = ALL if value is None else list(value)
            if one.name in ("columns", "sha256") or value in (None, "", ()):
                continue
            key = key_of(one.name)
            lines.append(f"{key} = {_toml(value)}{_HINTS.get(key, '')}")
        lines.append(OF_COLUMNS)
        for column in self.columns:
            lines.append(f"{_toml(column.name)} = {column.to_toml()}")
        return WRITTEN.format(name=name) + "\n".join(lines) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a file; ValueError in one line that names it."""
        found = read_toml(path, "correct it, or check the name")
        for key in found:
            check_known(key, KEYS, str(path))
        for key in ("user", "target", "task", "columns"):
            if key not in found:
                raise ValueError(f"{path}: {key!r} is missing: add it, or write the schema anew")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        try:
            values = {name_of(key): _value_of(key, value) for key, value in found.items()}
            return cls(**values, sha256=digest)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def with_hash(self) -> Self:
        """The same with the hash of its text."""
        digest = hashlib.sha256(self.to_toml().encode()).hexdigest()
        return replace(self, sha256=digest)


_HINTS = {
    "enrolled": '  # "all" ids in the file, or a list of them',
    "classes": "  # in order; a row with another one is dropped",
    "missing": '  # "own-mean" (of the user\'s training rows, else 0) or "zero"',
    "scaling": '  # "own": each user\'s own mean and deviation; or "none"',
}
KEYS = [key for key in keys_of(Schema) if key != "sha256"]  # of a schema file


def _value_of(key: str, value: Any) -> Any:
    """The field of ``Schema`` for a value of a schema file; ValueError for a wrong type."""
    if key == "columns":
        columns = typed_value(key, value, dict)
        return tuple(_read_column(name, kind) for name, kind in columns.items())
    if key == "enrolled" and value == ALL:
        return None
    if key == "target" and isinstance(value, str):
        return (value,)
    if key in ("target", "classes", "enrolled"):
        return _tuple_of_texts(key, value)
    if key == "task":
        return value
    return typed_value(key, value, get_type_hints(Schema)[name_of(key)])


def _tuple_of_texts(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f'{key} must be a list of texts, as in ["a", "b"], got {value!r}')
    return tuple(value)


def _read_column(name: str, value: Any) -> Column:
    """A column from its value in a schema file."""
    where = f"column {name!r}"
    if isinstance(value, list):
        words = _tuple_of_texts(where, value)
        if not words or len(set(words)) < len(words):
            raise ValueError(f'{where} must list each word once: correct it, or say "left out"')
        return Column(name, CATEGORY, words)
    if isinstance(value, str):
        one_of(where, value, PLAIN)
        return Column(name, value)
    if not isinstance(value, dict) or value.get("kind") not in ARRAY_KINDS:
        kinds = ", ".join((*PLAIN, *ARRAY_KINDS[1:]))
        raise ValueError(f"{where} must be a kind ({kinds}) or a list of words, got {value!r}")
    more = dict(value)
    more["shape"] = tuple(more.get("shape", ()))
    try:
        made = Column(name, **more)
        made.model_kinds()
        return made
    except (TypeError, IndexError, ValueError) as error:
        raise ValueError(f"{where}: {error}: correct it") from None


def write_schema(schema: Schema, path: Path, name: str) -> None:
    """Write a new file that only its owner may read; ValueError if it exists.

    Args:
        schema: what to write.
        path: the file.
        name: of the data.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror}): choose another name, or remove it"
        ) from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(schema.to_toml(name))


def _toml(value: Any) -> str:
    """A text, a number, or a list of them as TOML, in which JSON writes them too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
