"""Flat settings, as Flower's users write them: ``clip-norm = 10.0``. One line each, no nesting.

A run config, an experiment file and ``--set`` have the same keys, defaults and errors.

``Settings`` and ``training.Training`` are two values: a person writes ε, rounds and steps, which a
sweep replaces one by one and of which most are never trained; a Training has the noise that was
calibrated for them, which takes seconds, and has forgotten what it was calibrated for.
"""

import math
import re
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Self, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np

from flwr_ppsgd.algorithm import Cohort, FixedSize, Poisson, Release, SecureSum, Steps
from flwr_ppsgd.checks import is_whole, misspelt, nearest, one_of, printable, require
from flwr_ppsgd.recipe import Recipe, Task, noise_alone, recipe, rounds_for
from flwr_ppsgd.training import Enrolled, Training

OWN_PREFIX = "ppsgd-"
RUN_KEYS = ("ppsgd-run", "local-step", "local-steps", "out")  # of a run config, beside settings
NODE_KEYS = ("ppsgd-state-dir", "ppsgd-user", "partition-id", "num-partitions")
MOST_PLACES = 10_000_000  # of columns
LONGEST_SHOWN = 80  # characters of a wrong value that an error shows
_SPAN = re.compile(r"([0-9]{1,8})(?:-([0-9]{1,8}))?")
LARGEST_WHOLE = 10**300  # beyond it a whole number stands for an infinite float
ALTERNATIVES = (
    ("rate", "cohort-size"),
    ("rate", "cohort-mean"),
    ("cohort-size", "cohort-mean"),
    ("noise-multiplier", "epsilon"),
    ("rounds", "passes"),
    ("evaluate-every", "evaluations"),
)
PAPER = "paper"
AUTO = "auto"
METHODS = (PAPER, AUTO)
NEEDED_BY_PAPER = ("clip_norm", "step", "alpha_q")
DECIDED_BY_AUTO = (
    *NEEDED_BY_PAPER,
    "cohort_size",
    "total_batch",
    "noise_multiplier",
    "average",
)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What makes up a training: population, release, steps, budget.

    Give ``rate`` (Poisson cohorts) or ``cohort-size`` (fixed size); ``noise-multiplier``, or
    ``epsilon``, which calibrates it for the planned ``rounds`` and is the budget too, unless
    ``max-epsilon`` is given. There is no default for noise, δ or a seed. ``enrolled`` lists the
    names of the registered nodes, with commas.

    ``secure-honest`` and ``secure-colluding`` make the sum of each round a secure one: see
    ``flwr_ppsgd.SecureSum``.

    ``method = "auto"`` is the recipe of ``flwr_ppsgd.recipe``: it needs ``epsilon`` and ``task``,
    and neither clip norm nor steps; ``sparse`` lists columns that most users lack, as in 3-5,9;
    everyone takes part in 2 to 8 rounds unless ``rate`` or ``rounds`` say otherwise.
    """

    population: int
    method: str = PAPER
    rate: float | None = None
    cohort_size: int | None = None
    clip_norm: float | None = None
    noise_multiplier: float | None = None
    epsilon: float | None = None
    total_batch: int | None = None
    step: float | None = None
    alpha_q: float | None = None
    delta: float
    rounds: int = 0
    task: str = ""
    sparse: str = ""
    max_epsilon: float | None = None
    evaluate_every: int = 0
    min_online: float = 0.5
    enrolled: str = ""
    wait_timeout: float = 600.0
    round_timeout: float = 3600.0
    replies: str = "gradient"
    average: bool = False
    checkpoint_dir: str = ""
    checkpoint_every: int = 1
    budget_dir: str = ""
    insecure_seed: int | None = None
    secure_honest: int | None = None
    secure_colluding: int | None = None
    secure_failure: float | None = None
    secure_neighbours: int | None = None

    def __post_init__(self) -> None:
        """Which keys go together; ``Training`` checks their values, with noise or without."""
        one_of("method", self.method, METHODS)
        if self.epsilon is not None:
            rule = "epsilon must be positive"
            require(self.epsilon > 0, rule, self.epsilon, "name the ε that you can afford")
        if self.automatic:
            self._check_automatic()
        else:
            self._check_paper()
        release = self._release(self.noise_multiplier or 0.0)
        Training.of(release=release, steps=self.steps(), **self._server_arguments())
        if self.epsilon is not None and not self.rounds:  # the recipe's number
            sigma = 0.0 if math.isinf(self.epsilon) else noise_alone(self.epsilon, self.delta)
            object.__setattr__(self, "rounds", rounds_for(self.population, sigma))

    def _check_paper(self) -> None:
        for name in NEEDED_BY_PAPER:
            if getattr(self, name) is None:
                raise _missing_key(name)
        self._check_one_of("rate", "cohort_size")
        self._check_one_of("noise_multiplier", "epsilon")
        require(self.rounds >= 1, "rounds must be at least 1", self.rounds, "plan at least one")

    def _check_one_of(self, first: str, second: str) -> None:
        has_first = getattr(self, first) is not None
        has_second = getattr(self, second) is not None
        if has_first == has_second:
            found = "both are set" if has_first else "neither is set"
            raise ValueError(f"give either {key_of(first)} or {key_of(second)}: {found}")

    def _check_automatic(self) -> None:
        """The recipe decides the rest."""
        for field in fields(self):
            if field.name in DECIDED_BY_AUTO and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{key_of(field.name)} is for method = {PAPER!r}, and {AUTO!r} decides it: "
                    "leave one of the two out"
                )
        if self.epsilon is None:
            raise _missing_key("epsilon")

    @property
    def automatic(self) -> bool:
        """Whether the recipe decides what is not given."""
        return self.method == AUTO

    @classmethod
    def read(cls, flat: Mapping[str, Any], where: str) -> Self:
        """From ``{"clip-norm": 10.0, …}``.

        Args:
            flat: keys and values. An unknown key and a value of the wrong type are refused.
            where: the file or the source, which errors name.
        """
        return build(cls, with_keys(flat), where)

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> Self:
        """From a Flower run config. It may hold keys of the app, but no misspelt ones of ours."""
        flat = with_keys(run_config)
        check_run_config(flat, keys_of(cls))
        return cls.read(part_of(flat, cls), where="run config")

    def to_flat(self) -> dict[str, Any]:
        """The settings that are given, by their flat keys."""
        return to_flat(self)

    def cohort(self) -> Cohort:
        """Who takes part in a round: Poisson cohorts, or cohorts of a fixed size."""
        if self.cohort_size is None:
            return Poisson(self.population, 1.0 if self.rate is None else self.rate)
        return FixedSize(self.population, self.cohort_size)

    def aggregation(self) -> SecureSum | None:
        """Whether the server sees sums only, and on which terms; None if it is trusted."""
        terms = {
            "honest": self.secure_honest,
            "colluding": self.secure_colluding,
            "failure": self.secure_failure,
            "neighbours": self.secure_neighbours,
        }
        given: dict[str, Any] = {name: term for name, term in terms.items() if term is not None}
        if not given:
            return None
        for name in ("honest", "colluding"):
            if name not in given:
                raise _missing_key(f"secure_{name}")
        return SecureSum(**given)

    def release(self) -> Release:
        """The release. If ``epsilon`` is given, its noise is calibrated for the planned rounds."""
        if self.automatic:
            return self.recipe().release
        if self.noise_multiplier is not None:
            return self._release(self.noise_multiplier)
        from flwr_ppsgd.ledger import calibrate_noise

        noise = calibrate_noise(
            epsilon=cast(float, self.epsilon),
            delta=self.delta,
            cohort=self.cohort(),
            rounds=self.rounds,
            aggregation=self.aggregation(),
        )
        return self._release(noise)

    def _release(self, noise: float) -> Release:
        clip_norm = 1.0 if self.clip_norm is None else self.clip_norm
        return Release(self.cohort(), clip_norm, noise, self.total_batch, self.aggregation())

    def recipe(self) -> Recipe:
        """Everything that ``method = "auto"`` decides."""
        return recipe(
            population=self.population,
            epsilon=cast(float, self.epsilon),
            delta=self.delta,
            task=cast(Task, self.task),
            sparse=places_in(self.sparse),
            rounds=self.rounds,
            rate=self.rate,
            aggregation=self.aggregation(),
        )

    def steps(self) -> Steps:
        """Both step sizes: the larger one is ``step``, their ratio is ``alpha-q``."""
        if self.step is None or self.alpha_q is None:
            return Steps(shared=1.0, personal=0.0)  # in place of the recipe's
        return Steps.from_ratio(self.step, self.alpha_q)

    def arguments(self) -> dict[str, Any]:
        """The arguments that the strategies of both APIs have in common."""
        if self.automatic:
            published = self.recipe().arguments()
        else:
            published = {"release": self.release(), "steps": self.steps()}
        return {**published, **self._server_arguments()}

    def _server_arguments(self) -> dict[str, Any]:
        """All but the release and the steps."""
        limit = self.max_epsilon
        if limit is None and self.epsilon != math.inf:
            limit = self.epsilon
        names = split_names(self.enrolled) or None
        return {
            "delta": self.delta,
            "max_epsilon": limit,
            "evaluate_every": self.evaluate_every,
            "enrolled": Enrolled(names, self.min_online, self.wait_timeout),
            "replies": self.replies,
            "average": self.average,
            "checkpoint_dir": self.checkpoint_dir or None,
            "checkpoint_every": self.checkpoint_every,
            "budget_dir": self.budget_dir or None,
            "round_timeout": self.round_timeout,
            "insecure_seed": self.insecure_seed,
        }


def _missing_key(name: str) -> ValueError:
    key = key_of(name)
    return ValueError(f"{key!r} is missing: add it, as in {key} = …")


def key_of(name: str) -> str:
    """The flat key of a field: ``clip-norm`` of ``clip_norm``."""
    return name.replace("_", "-")


def name_of(key: str) -> str:
    """The field of a flat key: ``clip_norm`` of ``clip-norm``."""
    return key.replace("-", "_")


def keys_of(*kinds: type) -> list[str]:
    """The flat keys of some dataclasses."""
    found: list[str] = []
    for kind in kinds:
        found += [key_of(field.name) for field in fields(kind)]
    return found


def with_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    """``flat`` with hyphens in its keys."""
    return {key_of(key): value for key, value in flat.items()}


def part_of(flat: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The keys of one dataclass, out of settings that hold others too."""
    own = set(keys_of(kind))
    return {key: value for key, value in flat.items() if key in own}


def to_flat(values: Any) -> dict[str, Any]:
    """A dataclass by its flat keys. What is None is left out: TOML has no null."""
    flat = {key_of(field.name): getattr(values, field.name) for field in fields(values)}
    return {key: value for key, value in flat.items() if value is not None}


def build(kind: type[T], flat: Mapping[str, Any], where: str) -> T:
    """A dataclass from its flat keys; errors name ``where``.

    An unknown, doubled or missing key and a value of the wrong type are refused.
    """
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key in flat:
        check_known(key, keys_of(kind), where)
        if name_of(key) in values:
            raise ValueError(f"{where}: {key_of(key)!r} is there twice: keep one")
        values[name_of(key)] = flat[key]
    try:
        for field in fields(kind):  # type: ignore[arg-type]
            if field.default is MISSING and field.name not in values:
                raise _missing_key(field.name)
        for name, value in values.items():
            values[name] = typed_value(key_of(name), value, hints[name])
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {in_keys(str(error), kind)}") from None


def check_known(key: str, known: Iterable[str], where: str) -> None:
    """ValueError, naming the nearest known key, unless ``key`` is one of them."""
    known = list(known)
    if key_of(key) not in known:
        meant = nearest(key_of(key), known)
        raise ValueError(f"{where}: unknown key {key!r}: did you mean {meant!r}?")


def check_run_config(flat: Mapping[str, Any], own: Iterable[str]) -> None:
    """Refuse keys that are meant for this package and that nobody would read.

    Args:
        flat: a run config, with hyphens in its keys.
        own: the keys that are going to be read from it, besides ``RUN_KEYS``.
    """
    known = [*own, *RUN_KEYS]
    exact = {*known, *NODE_KEYS}
    for key in flat:
        if key in exact:
            continue
        meant = misspelt(key, known)
        if meant is not None:
            raise ValueError(f"run config: unknown key {key!r}: did you mean {meant!r}?")
        if key.startswith(OWN_PREFIX):
            check_known(key, known, "run config")


def in_keys(message: str, kind: type) -> str:
    """A constructor's message in the words of the file: ``clip-norm`` for ``clip_norm``."""
    for field in fields(kind):
        message = message.replace(field.name, key_of(field.name))
    return message


def typed_value(key: str, value: Any, hint: Any) -> Any:
    """``value`` as the field's type; ValueError if it has another one.

    A whole number may stand for a float, and numpy's numbers for Python's. Nothing else is
    converted.
    """
    allowed = get_args(hint) if get_origin(hint) is types.UnionType else (hint,)
    if float in allowed and is_whole(value):
        return math.inf if abs(value) > LARGEST_WHOLE else float(value)
    if float in allowed and isinstance(value, float | np.floating):
        return float(value)
    if int in allowed and is_whole(value):
        return int(value)
    if type(value) in allowed:
        return value
    names = [kind.__name__ for kind in allowed if kind is not types.NoneType]
    raise ValueError(f"{key} must be of type {' or '.join(names)}, got {value!r}")


def split_names(text: str) -> list[str]:
    """The names in a text that separates them by commas."""
    names = [name.strip() for name in text.split(",")]
    return [name for name in names if name]


def spans_of(places: Sequence[int]) -> str:
    """Increasing places as text: ``(3, 4, 5, 9)`` is "3-5,9"."""
    spans: list[list[int]] = []
    for place in places:
        if spans and place == spans[-1][1] + 1:
            spans[-1][1] = place
        else:
            spans.append([place, place])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return ",".join(texts)


def places_in(text: str) -> tuple[int, ...]:
    """The places that ``spans_of`` wrote; ValueError unless they increase."""
    places: list[int] = []
    for span in text.split(",") if text else ():
        found = _SPAN.fullmatch(span)
        if found is None:
            shown = printable(text, LONGEST_SHOWN)
            raise ValueError(f"sparse must be places such as 3-5,9, got {shown!r}")
        first = int(found[1])
        last = int(found[2] or first)
        after = places[-1] if places else -1
        if not after < first <= last < MOST_PLACES:
            raise ValueError(f"sparse must be increasing places below {MOST_PLACES}, got {span}")
        places.extend(range(first, last + 1))
    return tuple(places)


def override(flat: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``flat`` with ``changes``; a change to one of two alternatives takes the other one out."""
    given = {key_of(key) for key in changes}
    replaced = set(given)
    for one, other in ALTERNATIVES:
        if one in given and other not in given:
            replaced.add(other)
        if other in given and one not in given:
            replaced.add(one)
    kept = {key: value for key, value in flat.items() if key_of(key) not in replaced}
    return {**kept, **changes}


def read_toml(path: Path | Traversable, remedy: str = "") -> dict[str, Any]:
    """The keys and values in a TOML file; ValueError in one line if it cannot be read.

    Args:
        path: the file.
        remedy: what to do about a file that cannot be read, for the error.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        advice = f": {remedy}" if remedy else ""
        raise ValueError(f"{path}: cannot be read: {error}{advice}") from None
