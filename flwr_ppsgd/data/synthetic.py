"""One user's data, given a data set and a user."""

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike, NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.models.split import AdditiveLinear, Matrix, Rows, as_array
from flwr_ppsgd.theory import Constants, Minimiser, squared_loss_smoothness


class _NoSeed(ISeedSequence):
    """For a generator that is seeded afterwards: numpy's own seeds take most of the time of making one."""

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> NDArray[Any]:
        return np.zeros(n_words, dtype)


def generator(*labels: object) -> np.random.Generator:
    """A generator for data, decided by its labels alone. Never for cohorts or noise: those are secret."""
    source = np.random.Generator(np.random.PCG64(_NoSeed()))  # type: ignore[arg-type]  # its stub knows one class only
    reseed(source, *labels)
    return source


def reseed(source: np.random.Generator, *labels: object) -> None:
    """Begin the stream of these labels: the state of PCG64 is their hash. Much faster than a new generator."""
    digest = hashlib.sha256(repr(labels).encode()).digest()
    state = {"state": int.from_bytes(digest[:16]), "inc": int.from_bytes(digest[16:]) | 1}
    source.bit_generator.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}


@functools.lru_cache(maxsize=4096)
def _shuffle(seed: int, user: int, epoch: int, length: int) -> NDArray[np.intp]:
    return generator("epoch", seed, user, epoch).permutation(length)


class Minibatches:
    """A user's own rows, shuffled anew for each epoch: fresh samples first, then further epochs.

    Visit v takes rows (v−1)·m … v·m−1 of the endless sequence of epochs, so every row is used and every minibatch has
    the same size m_i = min(size, rows). Which rows they are is decided by (seed, user, visit) alone.
    """

    def __init__(self, x: Rows, y: Rows, size: int, *, seed: int, user: int) -> None:
        if not len(x) or len(x) != len(y) or size < 1:
            raise ValueError(
                f"a user needs at least one row and as many x as y, got {len(x)} and {len(y)}, size {size}"
            )
        self._x, self._y = as_array(x), as_array(y)
        self._size = min(size, len(x))
        self._seed, self._user = seed, user
        self.num_examples = len(x)

    def __call__(self, visit: int) -> tuple[NDArray[Any], NDArray[Any]]:
        rows = self.rows(visit)
        return self._x[rows], self._y[rows]

    def rows(self, visit: int) -> NDArray[np.intp]:
        return minibatch_rows(self._seed, self._user, visit, self.num_examples, self._size)


def minibatch_rows(seed: int, user: int, visit: int, length: int, size: int) -> NDArray[np.intp]:
    """Rows (v−1)·m … v·m−1 of the endless sequence of shuffled epochs, with m = min(size, length)."""
    size = min(size, length)
    epoch, offset = divmod((visit - 1) * size, length)
    here = _shuffle(seed, user, epoch, length)[offset : offset + size]
    if len(here) == size:
        return here
    return np.concatenate([here, _shuffle(seed, user, epoch + 1, length)[: size - len(here)]])


@dataclass(frozen=True, eq=False)
class Synthetic:
    """The paper's synthetic regression (Section 6): θ_i* = θ_0 plus a little in the last 5 coordinates.

    θ_0 ~ N(0, 10² I), the differences ~ N(0, .01²), x ~ N(0, diag(1/k)), label noise .01.
    """

    optima: NDArray[np.float64]  # θ_i*, one row a user
    seed: int
    label_noise: float = 0.01

    @classmethod
    def draw(cls, users: int, features: int, seed: int) -> "Synthetic":
        truth = generator("synthetic", seed)
        optima = np.tile(truth.normal(0, 10, features), (users, 1))
        optima[:, -5:] += truth.normal(0, 0.01, optima[:, -5:].shape)
        return cls(optima, seed)

    @property
    def variances(self) -> Vector:
        """The diagonal of Σ: 1, 1/2, …, 1/d."""
        return 1 / np.arange(1, self.optima.shape[1] + 1)

    def batch(self, user: int, visit: int, size: int) -> tuple[Matrix, Matrix]:
        """Fresh samples, decided by (seed, user, visit) alone."""
        x, y = self.batches(np.array([user]), np.array([visit]), size)
        return x[0], y[0]

    def batches(self, users: NDArray[np.intp], visits: NDArray[np.intp], size: int) -> tuple[Matrix, Matrix]:
        """The same for many users at once: users × size × d, and users × size × 1."""
        features, source = self.optima.shape[1], generator()
        drawn = np.empty((len(users), size * (features + 1)))
        for row, user, visit in zip(drawn, users.tolist(), visits.tolist(), strict=True):
            reseed(source, "sample", self.seed, user, visit)
            source.standard_normal(out=row)
        x = drawn[:, : size * features].reshape(-1, size, features) * np.sqrt(self.variances)
        y = np.matmul(x, self.optima[users][:, :, None])
        y += self.label_noise * drawn[:, size * features :, None]
        return x, y

    def constants(self) -> Constants:
        """What the paper's bounds ask about it. The truth behind the data is known here, and nobody's.

        σ² = τ²·tr Σ (Section 4). Gaussian features have no largest norm: L = 2R² with R² three standard deviations
        above the mean of ‖x‖², and G the gradient at the start of a sample with ‖x‖ = R along θ_0.
        """
        trace, spread = self.variances.sum(), math.sqrt(2 * (self.variances**2).sum())
        squared_radius, minimiser = trace + 3 * spread, Minimiser.additive(self.optima)
        return Constants(
            smoothness=squared_loss_smoothness(math.sqrt(squared_radius)),
            variance_w=self.label_noise**2 * trace,
            variance_theta=self.label_noise**2 * trace,
            gradient_bound=squared_radius * math.sqrt(minimiser.shared),
            minimiser=minimiser,
            dimension=self.optima.shape[1],
        )

    def excess_risk(self, user: int, parameters: Vector) -> float:
        """‖w + θ_i − θ_i*‖²_Σ, twice f_i − f_i* of the ½-squared loss."""
        return float(np.dot(self.variances, (parameters - self.optima[user]) ** 2))


class FreshSamples:
    """An endless stream of one user's samples of the synthetic problem."""

    def __init__(self, problem: Synthetic, user: int, size: int) -> None:
        self._problem, self._user, self._size = problem, user, size
        self.num_examples = size

    def __call__(self, visit: int) -> tuple[Matrix, Matrix]:
        return self._problem.batch(self._user, visit, self._size)


class SyntheticLearner(AdditiveLinear):
    """An additive linear learner that is measured against the truth behind its data."""

    def __init__(self, problem: Synthetic, user: int, batch_size: int) -> None:
        super().__init__(FreshSamples(problem, user, batch_size), problem.optima.shape[1])
        self._problem, self._user = problem, user

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:
        return {"excess_risk": self._problem.excess_risk(self._user, w + theta)}
