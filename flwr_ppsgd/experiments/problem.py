"""Which data and which model an experiment is about: flat keys, and what follows from the users that a file holds."""

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.data import Columns, PerUser, Split, load, public_statistics
from flwr_ppsgd.data.emnist import HUB
from flwr_ppsgd.data.per_user import Task
from flwr_ppsgd.models.split import Loss
from flwr_ppsgd.settings import key_of, typed

SYNTHETIC = "synthetic"
BATCH_SIZE = 10
DERIVED = {"passes": "rounds", "cohort-mean": "rate", "evaluations": "evaluate-every"}  # what stands for what
WORDS = {"task": ("", *get_args(Task)), "model": ("linear", "cnn"), "loss": get_args(Loss)}
NEEDS = {"passes": (), "cohort-mean": ("population",), "evaluations": ("rounds",)}
ROUNDS_ARE_PUBLIC = "the number of rounds from passes takes the total number of samples, {:,}, to be public"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A data set, how it is read, and the model. Empty text is the reader's own choice.

    data: "synthetic"; a .npz, .csv or .parquet file; "flwrlabs/femnist" or a folder with its files; a SQLite file of
        TensorFlow Federated.
    data_checksum: of that file, filled in when it is read: other contents under the same name are refused.
    users: at most so many, the first ones. min_train: leave out users with fewer training rows.
    user_column, target_column, test_column, time_column, feature_columns: names in own files; several are separated by
        commas. test_fraction: each user's test part, the last rows where there is a time column.
    task: classification, regression or multi-label; detected where it is not given.
    standardise: a file of *public* means and standard deviations. bias: a column of ones.
    data_seed: of the synthetic problem, of the test part, of minibatches and of a network's first values.
    features: of the synthetic problem. batch_size: samples a user draws in a round.
    model: "linear", or "cnn" for images of 28 × 28 pixels, with its own loss. loss: "squared" or "softmax".
    target_shift: what is subtracted from targets: .1 in the paper, a public centre for amounts.
    """

    data: str = SYNTHETIC
    data_checksum: str = ""
    users: int | None = None
    min_train: int = 1
    user_column: str = ""
    target_column: str = ""
    test_column: str = ""
    time_column: str = ""
    feature_columns: str = ""
    test_fraction: float | None = None
    task: str = ""
    standardise: str = ""
    bias: bool = False
    data_seed: int = 0
    features: int = 100
    batch_size: int = BATCH_SIZE
    model: str = "linear"
    loss: str = "squared"
    target_shift: float = 0.0

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> Self:
        """From settings that hold other keys too."""
        return cls(**{f.name: flat[key_of(f.name)] for f in fields(cls) if key_of(f.name) in flat})

    def problem(self) -> "Problem":
        """These keys alone, where a value holds more."""
        return Problem(**{f.name: getattr(self, f.name) for f in fields(Problem)})

    def check(self) -> None:
        """Whatever can be told without the file."""
        if self.data == SYNTHETIC:
            given = [key_of(f.name) for f in fields(Problem) if getattr(self, f.name) != f.default]
            if foreign := [key for key in given if key not in ("data-seed", "features", "batch-size")]:
                raise ValueError(f"{foreign[0]} is for data of your own: leave it out, or give data = FILE")
        for name, allowed in WORDS.items():
            if (word := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} must be {' or '.join(map(repr, filter(None, allowed)))}, got {word!r}")
        for name, least in (("users", 1), ("min_train", 1), ("features", 5), ("batch_size", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{key_of(name)} must be at least {least}, got {value}: raise it")
        if self.model == "cnn" and (self.loss, self.target_shift) != ("squared", 0.0):
            raise ValueError(
                "the cnn has a loss of its own, with targets shifted by .1: leave out loss and target-shift"
            )

    @property
    def _columns(self) -> Columns | None:
        named = {"user": self.user_column, "target": self.target_column, "test": self.test_column}
        named |= {"time": self.time_column}
        given: dict[str, Any] = {key: value for key, value in named.items() if value}
        if self.feature_columns:
            given["features"] = tuple(name.strip() for name in self.feature_columns.split(","))
        return Columns(**given) if given else None

    @property
    def _split(self) -> Split | None:
        return None if self.test_fraction is None else Split(self.test_fraction, self.data_seed)

    def per_user(self) -> PerUser:
        """The users, as a model sees them. Read again, the same value comes from memory."""
        return _read(self)


@functools.lru_cache(maxsize=2)
def _read(problem: Problem) -> PerUser:
    task: Any = problem.task or None
    data = load(
        problem.data,
        problem._columns,
        split=problem._split,
        task=task,
        min_train=problem.min_train,
        users=problem.users,
    )
    if problem.standardise:
        data = data.standardised(*public_statistics(problem.standardise, data))
    return data.with_bias() if problem.bias else data


def resolved(flat: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``flat`` with all that follows from the data: its place, checksum and population, rounds, rate, evaluations."""
    flat = {key.replace("_", "-"): value for key, value in flat.items()}
    try:
        if flat.get("data", SYNTHETIC) != SYNTHETIC:
            flat = _with_population(flat)
        return _with_derived(flat)
    except ValueError as error:
        prefix = "" if str(error).startswith(_place(str(flat.get("data")))) else f"{where}: "
        raise ValueError(f"{prefix}{error}") from None


def _with_population(flat: dict[str, Any]) -> dict[str, Any]:
    flat = {**flat, "data": _place(str(flat["data"]))}
    if flat.get("standardise"):
        flat["standardise"] = str(Path(flat["standardise"]).resolve())
    found = _checksum(flat["data"])
    if flat.get("data-checksum") not in (None, "", found):
        raise ValueError(
            f"{flat['data']}: the file has changed since it was used here (checksum {found}, then "
            f"{flat['data-checksum']}): put the old one back, or begin anew without data-checksum"
        )
    flat["data-checksum"] = found
    problem = Problem.of(_typed(flat))
    problem.check()
    users = len(problem.per_user())
    if flat.get("population", users) != users:
        raise ValueError(
            f"population is {flat['population']} and {flat['data']} has {users} users: leave population out"
        )
    return {**flat, "population": users}


def _typed(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ``Problem`` alone, with values of their types."""
    hints = get_type_hints(Problem)
    return {key: typed(key, flat[key], hint) for name, hint in hints.items() if (key := key_of(name)) in flat}


def _place(data: str) -> str:
    """Absolute where it is a file: workers stand elsewhere."""
    return data if data == HUB and not Path(data).exists() else str(Path(data).resolve())


def _checksum(data: str) -> str:
    """SHA-256 of a file, or of all files of a folder; nothing where there is none."""
    path = Path(data)
    files = sorted(file for file in path.rglob("*.parquet") if file.is_file()) if path.is_dir() else [path]
    digests = [_digest(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16] if digests else ""


@functools.lru_cache(maxsize=1024)
def _digest(file: Path, size: int, changed: int) -> str:  # noqa: ARG001 - they make up the key
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _with_derived(flat: dict[str, Any]) -> dict[str, Any]:
    """Rate from the mean size of a cohort, rounds from passes, and how often to evaluate from how many times."""
    flat = _put(flat, "cohort-mean", lambda mean: mean / flat["population"])
    flat = _put(flat, "passes", lambda passes: rounds_of(flat, passes))
    return _put(flat, "evaluations", lambda times: math.ceil(flat["rounds"] / times))


def _put(flat: dict[str, Any], key: str, derive: Callable[[float], float]) -> dict[str, Any]:
    """What ``key`` stands for, filled in; where it is there already it must agree."""
    if key not in flat:
        return flat
    given, other = typed(key, flat[key], float), DERIVED[key]
    if not 0 < given < math.inf:
        raise ValueError(f"{key} must be positive and finite, got {given!r}")
    missing = [name for name in NEEDS[key] if name not in flat]
    if missing:
        raise ValueError(f"{missing[0]!r} is missing: {key} needs it")
    value = derive(given)
    if flat.get(other, value) != value:
        raise ValueError(
            f"{key} = {given:g} makes {other} {value:g} and it is given as {flat[other]}: keep one of them"
        )
    return {**flat, other: value}


def visits_in(problem: Problem, passes: float | None) -> NDArray[np.intp] | None:
    """How often each user draws a whole minibatch in so many passes; what is left over is never used."""
    if passes is None:
        return None
    sizes = problem.per_user().train_sizes
    return np.asarray(np.maximum(1, passes * sizes // np.minimum(sizes, problem.batch_size)), dtype=np.intp)


def rounds_of(flat: Mapping[str, Any], passes: float) -> int:
    """So many rounds that users draw each of their samples ``passes`` times, on average."""
    if flat.get("data", SYNTHETIC) == SYNTHETIC:
        raise ValueError("passes is for data with finitely many samples: give rounds")
    problem = Problem.of(_typed(flat))
    sizes = problem.per_user().train_sizes
    rate = float(flat["rate"] if "rate" in flat else flat["cohort-size"] / flat["population"])
    if flat.get("drop-exhausted"):
        visits = visits_in(problem, passes)
        assert visits is not None
        return math.ceil(float(visits.sum()) / (rate * len(sizes)))
    drawn = rate * np.minimum(sizes, flat.get("batch-size", BATCH_SIZE)).sum()
    return max(1, round(passes * float(sizes.sum() / drawn)))
