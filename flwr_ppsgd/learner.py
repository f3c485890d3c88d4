"""A model together with one user's data: what a learner is, and the minibatches it draws."""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.wire import Order

Ability = TypeVar("Ability")
Rows: TypeAlias = Any  # an array or a torch tensor: this module does not load torch


LOCAL = "local_"  # before the name of a measure: of a model from own rows alone
SHARED = "shared_"  # of w alone
OWN_W = "ppsgd-own-w"  # of a personal model's arrays: the w that it belongs to
OWN_THETA = "ppsgd-own-theta"  # its θ, if there is one


class Learner(Protocol):
    """A model together with one user's data.

    A complete one, for the mean of a user's numbers, f_i(w, θ) = ½·mean((w + θ − y)²)::

        class MeanLearner:
            def __init__(self, y):
                self.y = y
                self.num_examples = len(y)

            def initial_theta(self):
                return np.zeros(1)

            def gradients(self, w, theta, order):
                g = np.array([np.mean(w + theta - self.y)])
                return g, g

            def evaluate(self, w, theta):
                return {"mse": float(np.mean((w + theta - self.y) ** 2))}
    """

    num_examples: int

    def initial_theta(self) -> Vector:
        """θ before the first visit."""
        ...

    def gradients(self, w: Vector, theta: Vector, order: Order) -> tuple[Vector, Vector]:
        """(g_w, g_θ), both at (w, θ), over the minibatch of ``order.visit``.

        Reduced as ``order.reduction`` says.
        """
        ...

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:
        """Measures of (w, θ) on this user's data.

        They are outside the guarantee once they leave the node.
        """
        ...


# --- what a learner may offer besides


def offers(learner: object, ability: Callable[..., Ability]) -> TypeGuard[Ability]:
    """Whether a learner has every member of a protocol declared here.

    The same as ``isinstance``, which lists the protocol's members again in every call.
    """
    return all(getattr(learner, name, None) is not None for name in _members(ability))


@functools.cache
def _members(protocol: Callable[..., Any]) -> tuple[str, ...]:
    declared = {**vars(protocol), **protocol.__annotations__}
    return tuple(name for name in declared if not name.startswith("_"))


@runtime_checkable
class SharedChecker(Protocol):
    """A learner, or what makes one, that knows its shared parameters."""

    def check_shared(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """ValueError unless the server's arrays, shapes by name, are the shared parameters."""
        ...


@runtime_checkable
class PersonalStepper(Protocol):
    """A learner that trains θ in its own way: that costs no privacy."""

    def personal_step(self, w: Vector, theta: Vector, order: Order) -> Vector:
        """θ after this visit, instead of θ − s_θ·g_θ."""
        ...


@runtime_checkable
class TrainingMeasurer(Protocol):
    """A learner with private training metrics."""

    def training_measures(self, w: Vector, theta: Vector, order: Order) -> dict[str, float]:
        """Measures of (w, θ) on the minibatch of the visit."""
        ...


@runtime_checkable
class SinglePrecision(Protocol):
    """A learner that says whether w may be a float32 vector if it travels as one."""

    takes_float32: bool


@runtime_checkable
class TestedRowCounter(Protocol):
    """A learner that knows on how many rows it evaluates: the weight of its measures."""

    num_tested: int


# --- for ``PPSGD.auto``


class OwnModel(Protocol):
    """A user's personal model, on the device."""

    def measures(self) -> dict[str, float]:
        """On the user's test rows; ``local_…`` of own rows alone, ``shared_…`` of w alone."""
        ...

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything that predicts, for the device's own disk."""
        ...


@runtime_checkable
class DescribedModel(Protocol):
    """A personal model that says what it is made of."""

    @property
    def choices(self) -> Mapping[str, float]:
        """Numbers with names, such as how much the user trusts w."""
        ...


@runtime_checkable
class Solver(Protocol):
    """A learner that can take part in ``PPSGD.auto``."""

    task: str

    def solution(self, w: Vector, order: Order) -> Vector:
        """What the user would add to w, by own rows alone; ``order.unit`` is the public unit."""
        ...

    def spread(self) -> float:
        """The standard deviation of the user's own targets; NaN if there is none."""
        ...

    def own_columns(self) -> Vector:
        """1 for each sparse column that the user has, else 0; empty without sparse columns."""
        ...

    def personal_model(self, w: Vector, variance: Vector, order: Order) -> OwnModel:
        """The user's own model around w, whose noise has this variance."""
        ...


@runtime_checkable
class OriginProvider(Protocol):
    """A learner of ``PPSGD.auto`` for which w = 0 is not a model."""

    def origin(self, w: Vector) -> Vector:
        """The w at which the length of a first solution is asked."""
        ...


# --- minibatches


class Batches(Protocol):
    """One user's minibatches, by visit."""

    num_examples: int

    def __call__(self, visit: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """(x, y) of the given visit, counted from 1; one row per sample."""
        ...


@runtime_checkable
class AllRows(Protocol):
    """Minibatches that can give all rows at once."""

    def everything(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """(x, y) of all rows."""
        ...


def all_rows(batches: Batches) -> tuple[NDArray[Any], NDArray[Any]]:
    """(x, y) of all rows of a user.

    By ``everything`` if there is such a method; else from as many minibatches as an epoch has.
    """
    if isinstance(batches, AllRows):
        return batches.everything()
    xs = []
    ys = []
    missing = batches.num_examples
    visit = 0
    while missing > 0:
        visit += 1
        x, y = batches(visit)
        xs.append(as_array(x)[:missing])
        ys.append(as_array(y)[:missing])
        missing -= max(1, len(y))
    return np.concatenate(xs), np.concatenate(ys)


class Minibatches:
    """A user's own rows, shuffled anew for each epoch: fresh samples first, then further epochs.

    Visit v takes rows (v−1)·m … v·m−1 of the endless sequence of epochs, so every row is used and
    every minibatch has the same size m_i = min(size, rows). Which rows they are is decided by
    (seed, user, visit) alone.

    Args:
        x: the user's rows: an array or a torch tensor.
        y: their targets, one for each row.
        size: the number of rows in a minibatch.
        seed: of the shuffling.
        user: whose rows they are: users shuffle differently.
    """

    def __init__(self, x: Rows, y: Rows, size: int, *, seed: int, user: int) -> None:
        if not len(x) or len(x) != len(y) or size < 1:
            raise ValueError(
                f"a user needs at least one row and as many x as y, got {len(x)} and {len(y)}, "
                f"size {size}"
            )
        self._x = as_array(x)
        self._y = as_array(y)
        self._size = min(size, len(x))
        self._seed = seed
        self._user = user
        self.num_examples = len(x)

    def __call__(self, visit: int) -> tuple[NDArray[Any], NDArray[Any]]:
        rows = self.rows(visit)
        return self._x.take(rows, axis=0), self._y.take(rows, axis=0)  # faster than [rows]

    def everything(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """All rows, as they came."""
        return self._x, self._y

    def rows(self, visit: int) -> NDArray[np.intp]:
        """The places of the rows of a visit."""
        return minibatch_rows(self._seed, self._user, visit, self.num_examples, self._size)


def minibatch_rows(seed: int, user: int, visit: int, length: int, size: int) -> NDArray[np.intp]:
    """Rows (v−1)·m … v·m−1 of the sequence of shuffled epochs, with m = min(size, length)."""
    size = min(size, length)
    epoch, offset = divmod((visit - 1) * size, length)
    here = epoch_order(seed, user, epoch, length)[offset : offset + size]
    missing = size - len(here)
    if not missing:
        return here
    following = epoch_order(seed, user, epoch + 1, length)
    return np.concatenate([here, following[:missing]])


@functools.lru_cache(maxsize=4096)
def epoch_order(seed: int, user: int, epoch: int, length: int) -> NDArray[np.intp]:
    """The order of a user's rows in one epoch."""
    return generator("epoch", seed, user, epoch).permutation(length)


def as_array(values: Rows) -> NDArray[Any]:
    """A torch tensor or an array as an array, without a copy if none is needed."""
    if type(values) is np.ndarray:
        return values
    if hasattr(values, "detach"):
        tensor: NDArray[Any] = values.detach().cpu().numpy()
        return tensor
    return np.asarray(values)


def generator(*labels: object) -> np.random.Generator:
    """A generator for data, decided by its labels alone.

    Never for cohorts or noise: those are secret.
    """
    source = np.random.Generator(np.random.PCG64(0))
    reseed(source, *labels)
    return source


def reseed(source: np.random.Generator, *labels: object) -> None:
    """Begin the stream of these labels: the state of PCG64 is their hash.

    Much faster than a new generator.
    """
    digest = hashlib.sha256(repr(labels).encode()).digest()
    state = int.from_bytes(digest[:16])
    increment = int.from_bytes(digest[16:]) | 1
    source.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": state, "inc": increment},
        "has_uint32": 0,
        "uinteger": 0,
    }
