"""The data and the model of an experiment: their flat keys, and the users of a file."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_type_hints

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.checks import require
from flwr_ppsgd.settings import key_of, name_of, part_of, to_flat, typed_value, with_keys

if TYPE_CHECKING:
    from flwr_ppsgd.lab.per_user import PerUser
    from flwr_ppsgd.lab.schema import Schema

SYNTHETIC = "synthetic"
LINEAR = "linear"
CNN = "cnn"
DROP = "drop"
IMPUTE = (DROP, "own-mean", "zero")
WORDS = {
    "task": ("", "classification", "multi-label", "regression"),
    "impute": ("", *IMPUTE),
    "model": (LINEAR, CNN),
    "loss": ("squared", "softmax"),
    "scale": ("none", "own", "device"),
    "select_on": ("validation", "test"),
}
AUTO_REPRESENTATION = "auto"
DEVICE = "device"  # the scale of the recipe: each device scales its own rows
NO_REPRESENTATION = "none"
LEAST = {"representation_features": 1, "users": 1, "min_train": 1, "features": 5, "batch_size": 1}
CHECKSUM_LETTERS = 16
BY_SCHEMA = (  # keys that a schema replaces
    "users",
    "min_train",
    "user_column",
    "target_column",
    "test_column",
    "time_column",
    "feature_columns",
    "exclude_columns",
    "categorical_columns",
    "text_columns",
    "encoding",
    "impute",
    "test_fraction",
    "task",
)
# keys that do not change the rows as a model sees them, and more that do not change those read
NOT_SEEN = ("data_checksum", "features", "batch_size", "loss", "target_shift")
NOT_READ = (
    *("select_on", "validation_fraction", "scale", "bias", "model"),
    *("representation", "representation_features", "representation_seed"),
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A data set, how it is read, and the model.

    Columns that are not named are found in the file. Several columns are separated by commas.

    Args:
        data: "synthetic"; a .npz, .csv or .parquet file; "flwrlabs/femnist" or another data set of
            the hub; a folder of .parquet files, in LEAF's layout, or of pictures by user and class;
            a SQLite file of TensorFlow Federated.
        data_checksum: of that file, filled in when it is read. Other contents under the same name
            are refused.
        schema: a file that ``ppsgd look --write`` has written and its author has read. It replaces
            all keys below about columns, and nothing is inferred from the rows.
        schema_checksum: of that file, likewise.
        users: the largest number of users; the first ones are taken.
        min_train: leave out users with fewer training rows.
        user_column: names the user; "user" by default.
        target_column: the columns to predict; "y" by default.
        test_column: 1 marks test rows; "test" by default.
        time_column: orders a user's rows: the last ones are test rows.
        feature_columns: the columns to predict from; all others by default.
        exclude_columns: columns that are not used.
        categorical_columns: columns of categories.
        text_columns: columns of text, made shares of hashed words.
        encoding: of a .csv.
        impute: for gaps: drop (the row), zero or own-mean.
        test_fraction: each user's test part, if no column marks it.
        task: classification, regression or multi-label; found in the values by default.
        select_on: "validation" sets a part of each user's training rows apart, on which settings
            are compared; test rows are then measured once, at the end. "test" compares on test
            rows, as the paper does.
        validation_fraction: the share of a user's training rows that is set apart.
        scale: "own" (each user's own mean and deviation, on the device) or "none"; "device" is what
            method = "auto" does: raw rows, which the personal model scales, and images of unit
            length.
        bias: add a column of ones.
        data_seed: of the synthetic problem, of the test part, of minibatches and of a network's
            first values.
        features: the number of features of the synthetic problem.
        batch_size: the number of samples that a user draws per round.
        model: "linear", or "cnn" for images of 28 × 28 pixels, with its own loss.
        loss: "squared" or "softmax".
        target_shift: what is subtracted from targets: .1 in the paper, a public centre for amounts.
        representation: what a linear model sees of a row: "none" (its columns),
            "random-convolution" for images, "random-fourier" for tables, "module:factory" (a frozen
            torch network), or "auto": random convolutions if the rows are images, else "none".
        representation_features: the number of features of those that are random; their own default
            if it is not given.
        representation_seed: of those that are random. Public.
    """

    data: str = SYNTHETIC
    data_checksum: str = ""
    schema: str = ""
    schema_checksum: str = ""
    users: int | None = None
    min_train: int = 1
    user_column: str = ""
    target_column: str = ""
    test_column: str = ""
    time_column: str = ""
    feature_columns: str = ""
    exclude_columns: str = ""
    categorical_columns: str = ""
    text_columns: str = ""
    encoding: str = ""
    impute: str = ""
    test_fraction: float | None = None
    select_on: str = "test"
    validation_fraction: float = 0.2
    task: str = ""
    scale: str = "none"
    bias: bool = False
    data_seed: int = 0
    features: int = 100
    batch_size: int = 10
    model: str = LINEAR
    loss: str = "squared"
    target_shift: float = 0.0
    representation: str = NO_REPRESENTATION
    representation_features: int | None = None
    representation_seed: int = 0

    def __post_init__(self) -> None:
        """Check all that does not need the file."""
        for name, allowed in WORDS.items():
            word = getattr(self, name)
            quoted = [repr(one) for one in allowed if one]
            if word not in allowed:
                raise ValueError(f"{name} must be {' or '.join(quoted)}, got {word!r}")
        for name, least in LEAST.items():
            value = getattr(self, name)
            rule = f"{key_of(name)} must be at least {least}"
            require(value is None or value >= least, rule, value, "raise it")
        for name in ("test_fraction", "validation_fraction"):
            value = getattr(self, name)
            rule = f"{key_of(name)} must be between 0 and 1"
            require(value is None or 0 < value < 1, rule, value, "try 0.2")
        if self.test_column and (self.time_column or self.test_fraction is not None):
            raise ValueError(
                f"a test column ({self.test_column!r}) and a time column or test fraction are both "
                "given: either one decides the test part, so give one of them"
            )
        changed = [name for name in BY_SCHEMA if getattr(self, name) != _DEFAULTS[name]]
        if self.schema and changed:
            key = key_of(changed[0])
            raise ValueError(f"{key} is for data without a schema, which decides it: leave it out")
        if self.representation in (AUTO_REPRESENTATION, NO_REPRESENTATION):
            return
        from flwr_ppsgd.models.representation import representation_of

        if self.model != LINEAR:
            raise ValueError(
                f"representation is for linear models, got {self.representation!r} with model = "
                f"{self.model!r}: leave one of them out"
            )
        representation_of(self.representation)

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> Self:
        """From flat settings, which may hold other keys too."""
        hints = get_type_hints(cls)
        values = {}
        for key, value in part_of(with_keys(flat), cls).items():
            name = name_of(key)
            values[name] = typed_value(key, value, hints[name])
        return cls(**values)

    def to_flat(self) -> dict[str, Any]:
        """The flat keys that are given."""
        return to_flat(self)

    def changed_keys(self) -> list[str]:
        """The keys that differ from their defaults."""
        changed = [field for field in fields(self) if getattr(self, field.name) != field.default]
        return [key_of(field.name) for field in changed]

    def check_squared(self) -> None:
        """ValueError unless w is of the squared loss, as personal models need it."""
        if self.loss != "squared":
            raise ValueError(
                f"personal models are made around a w of the squared loss, and this one is of "
                f"{self.loss}: train with loss = 'squared'"
            )

    def with_checksums(self) -> "Problem":
        """With absolute paths, checksums, and the representation that a schema names.

        ValueError if the file or the schema has changed.
        """
        data = place_of(self.data)
        checksum = _checksum(data)
        if self.data_checksum not in ("", checksum):
            raise ValueError(
                f"{data}: the file has changed since it was used here (checksum {checksum}, then "
                f"{self.data_checksum}): put the old one back, or begin anew without data-checksum"
            )
        found = replace(self, data=data, data_checksum=checksum)
        if not self.schema:
            return found
        from flwr_ppsgd.lab.schema import Schema

        path = Path(self.schema).resolve()
        schema = Schema.read(path)
        if self.schema_checksum not in ("", schema.sha256):
            raise ValueError(
                f"{self.schema}: the schema has changed since it was used here: put the old one "
                "back, or begin anew"
            )
        return replace(
            found,
            schema=str(path),
            schema_checksum=schema.sha256,
            representation=schema.representation,
            representation_features=schema.representation_features,
            representation_seed=schema.representation_seed,
        )

    def as_by_default(self) -> "Problem":
        """With the scale and the bias that ``ppsgd run --data`` uses by default."""
        raw = replace(self, scale=DEVICE)
        return replace(raw, bias=raw.per_user().task != "regression")

    def written_schema(self) -> "Schema":
        """The schema, given or found, with the chosen representation."""
        schema = self.per_user().schema
        if self.schema:
            return schema
        return replace(
            schema,
            representation=self.chosen_representation(),
            representation_features=self.representation_features,
            representation_seed=self.representation_seed,
        ).with_hash()

    def chosen_representation(self) -> str:
        """The representation; if it is "auto", random convolutions for pictures, else none."""
        if self.representation != AUTO_REPRESENTATION:
            return self.representation
        from flwr_ppsgd.models.representation import RANDOM_CONVOLUTION

        is_picture = self.model == LINEAR and self.file_rows().schema.picture is not None
        return RANDOM_CONVOLUTION if is_picture else NO_REPRESENTATION

    def per_user(self) -> "PerUser":
        """The users, as a model sees them; the latest ones are cached."""
        return _model_rows(self._without(NOT_SEEN))

    def file_rows(self) -> "PerUser":
        """The users, with their rows as they are in the source."""
        return _load_rows(self._without((*NOT_SEEN, *NOT_READ)))

    def _without(self, names: tuple[str, ...]) -> "Problem":
        defaults = {name: _DEFAULTS[name] for name in names}
        return replace(self, data=place_of(self.data), **defaults)

    def visits_in(self, passes: float | None) -> NDArray[np.intp] | None:
        """How often each user draws a whole minibatch in ``passes`` over the own samples.

        Samples left over are never used. None without a limit.
        """
        if passes is None:
            return None
        sizes = self.per_user().train_sizes
        minibatch = np.minimum(sizes, self.batch_size)
        whole = passes * sizes // minibatch
        return np.asarray(np.maximum(1, whole), dtype=np.intp)


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Problem)}


@functools.lru_cache(maxsize=2)
def _load_rows(problem: Problem) -> "PerUser":
    from flwr_ppsgd.lab.loading import load

    return load(problem)


@functools.lru_cache(maxsize=4)
def _model_rows(problem: Problem) -> "PerUser":
    """The rows of a file as a model sees them; ``problem`` has the defaults of ``NOT_SEEN``."""
    from flwr_ppsgd.lab.scaling import scale_own_rows, with_kinds

    data = problem.file_rows()
    if problem.select_on == "validation":
        data = data.with_validation(problem.validation_fraction, problem.data_seed + 1)
    data = _with_representation(data, problem)
    if problem.scale == DEVICE:
        data = with_kinds(data)
    elif problem.scale == "own":
        data = scale_own_rows(data)
    return replace(data, bias=problem.bias)


def _with_representation(data: "PerUser", problem: Problem) -> "PerUser":
    """With Φ, if a representation is chosen, and a note that says so."""
    from flwr_ppsgd.models.representation import (
        RANDOM_CONVOLUTION,
        representation_of,
        unit_rows,
    )

    name = problem.chosen_representation()
    representation = representation_of(
        name, problem.representation_features, problem.representation_seed, data.shape
    )
    is_picture = problem.model == LINEAR and data.schema.picture is not None
    if is_picture and name == NO_REPRESENTATION and problem.scale == DEVICE:
        representation = unit_rows
    if representation is None:
        return data
    if data.is_sparse:
        raise ValueError(
            f"{data.source}: x is sparse and a representation would fill it: use "
            "representation = 'none'"
        )
    if name == RANDOM_CONVOLUTION:
        data = replace(data, divisor=255.0)  # pixels: no user scales them column by column
    data = replace(data, representation=representation)
    note = f"a model sees {data.width:,} features of each row: {name}"
    if problem.representation == AUTO_REPRESENTATION:
        note += ", since rows look like images (representation = 'none' for the pixels)"
    return replace(data, notes=(*data.notes, note))


def place_of(data: str) -> str:
    """An absolute path if it is a file: workers may run in another directory."""
    from flwr_ppsgd.lab.public import is_hub_name

    if is_hub_name(data):
        return data
    return str(Path(data).resolve())


def _checksum(data: str) -> str:
    """SHA-256 of a file, or of all files of a folder; empty if there is none."""
    path = Path(data)
    files = [path]
    if path.is_dir():
        files = sorted(path.rglob("*.parquet")) or sorted(path.rglob("*"))
    digests = ""
    for file in files:
        if file.is_file():
            facts = file.stat()
            digests += _file_hash(file, facts.st_size, facts.st_mtime_ns)
    if not digests:
        return ""
    return hashlib.sha256(digests.encode()).hexdigest()[:CHECKSUM_LETTERS]


@functools.lru_cache(maxsize=1024)
def _file_hash(file: Path, size: int, changed: int) -> str:  # noqa: ARG001 - they make up the key
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
