"""The paper's synthetic problem, and one of its users as a learner."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.learner import generator, reseed
from flwr_ppsgd.models.additive_linear import AdditiveLinear
from flwr_ppsgd.recipe import Matrix

DIFFERING = 5  # the last coordinates, in which users differ


@dataclass(frozen=True, eq=False)
class Synthetic:
    """The paper's regression (Section 6): θ_i* = θ_0 plus small differences in 5 coordinates.

    θ_0 ~ N(0, 10² I), the differences ~ N(0, .01²), x ~ N(0, diag(1/k)), label noise .01.

    Args:
        optima: θ_i*, one row per user.
        seed: decides all samples.
        label_noise: τ, the standard deviation of y around xᵀθ_i*.
    """

    optima: NDArray[np.float64]
    seed: int
    label_noise: float = 0.01

    @classmethod
    def draw(cls, users: int, features: int, seed: int) -> "Synthetic":
        """A problem whose optima and samples follow from the seed."""
        truth = generator("synthetic", seed)
        common = truth.normal(0, 10, features)
        optima = np.tile(common, (users, 1))
        last = optima[:, -DIFFERING:]
        last += truth.normal(0, 0.01, last.shape)
        return cls(optima, seed)

    @property
    def variances(self) -> Vector:
        """The diagonal of Σ: 1, 1/2, …, 1/d."""
        return 1 / np.arange(1, self.optima.shape[1] + 1)

    def batch(self, user: int, visit: int, size: int) -> tuple[Matrix, Matrix]:
        """Fresh samples, which follow from (seed, user, visit)."""
        x, y = self.batches(np.array([user]), np.array([visit]), size)
        return x[0], y[0]

    def batches(
        self, users: NDArray[np.intp], visits: NDArray[np.intp], size: int
    ) -> tuple[Matrix, Matrix]:
        """The same for many users at once: users × size × d, and users × size × 1."""
        features = self.optima.shape[1]
        values = size * features
        source = generator()
        drawn = np.empty((len(users), values + size))
        for row, user, visit in zip(drawn, users.tolist(), visits.tolist(), strict=True):
            reseed(source, "sample", self.seed, user, visit)
            source.standard_normal(out=row)
        standard = drawn[:, :values].reshape(-1, size, features)  # users × size × d
        x = standard * np.sqrt(self.variances)
        y = np.matmul(x, self.optima[users][:, :, None])  # users × size × 1
        y += self.label_noise * drawn[:, values:, None]
        return x, y

    def excess_risk(self, user: int, parameters: Vector) -> float:
        """‖w + θ_i − θ_i*‖²_Σ, twice f_i − f_i* of the ½-squared loss."""
        squares = (parameters - self.optima[user]) ** 2
        return float(np.dot(self.variances, squares))


class FreshSamples:
    """An endless stream of one user's samples of the synthetic problem."""

    def __init__(self, problem: Synthetic, user: int, size: int) -> None:
        self._problem = problem
        self._user = user
        self.num_examples = size

    def __call__(self, visit: int) -> tuple[Matrix, Matrix]:
        return self._problem.batch(self._user, visit, self.num_examples)

    def everything(self) -> tuple[Matrix, Matrix]:
        """The samples of visit 0, which training never uses: the stream itself has no end."""
        return self(0)


class SyntheticLearner(AdditiveLinear):
    """An additive linear learner that is measured by the excess risk."""

    def __init__(self, problem: Synthetic, user: int, batch_size: int) -> None:
        samples = FreshSamples(problem, user, batch_size)
        super().__init__(samples, problem.optima.shape[1])
        self._truth = problem
        self._user = user

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:
        """The excess risk of w + θ."""
        return {"excess_risk": self._truth.excess_risk(self._user, w + theta)}
