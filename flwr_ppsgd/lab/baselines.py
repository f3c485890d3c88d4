"""Two baselines at the same clip norm, noise and charge: fine-tuning after global learning, and
local steps (private FedAvg).

Local learning (α = 0) and global learning (α = ∞) are settings of the algorithm itself. Solved
personal models are measured in ``evaluation``.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from flwr_ppsgd.algorithm import Poisson, Release, Steps
from flwr_ppsgd.lab.engine import EngineSetting, Indices
from flwr_ppsgd.lab.linear_engine import LinearEngine
from flwr_ppsgd.lab.measures import badness, measure_of
from flwr_ppsgd.lab.population import FinitePopulation, Floats, Population
from flwr_ppsgd.recipe import Matrix

NUMBERS_AT_ONCE = 1 << 25  # of all users' θ


class LocalStepsEngine(LinearEngine):
    """Private FedAvg: users send the mean gradient along k local steps, (w − w_k)/(s·k), and w
    moves by s·k times the noisy mean of what they send.

    The mean is clipped, summed and charged like a single gradient; with k = 1 this is global
    learning. There is no θ: w_k − w is dropped after each round.

    Args:
        population: everyone's data.
        settings: all with the same cohort and M; only s = ``steps.shared`` is used.
        seed: as in ``LinearEngine``.
        dtype: the precision of w.
        local_steps: k, the number of local steps in a round; each draws a new minibatch.
    """

    def __init__(
        self,
        population: Population,
        settings: Sequence[EngineSetting],
        *,
        seed: int | None,
        dtype: DTypeLike,
        local_steps: int = 5,
    ) -> None:
        alone = [
            EngineSetting(setting.release, Steps(setting.steps.shared, 0.0)) for setting in settings
        ]
        super().__init__(population, alone, seed=seed, dtype=dtype)
        self._count = local_steps
        self._noise_step *= local_steps
        steps = np.array([setting.steps.shared for setting in settings], self.dtype)
        self._local_step = np.repeat(steps, population.outputs)

    @property
    def samples_per_visit(self) -> int:
        """The most samples that a user draws in a round."""
        return self._count * self.population.batch_size

    def _step(self, users: Indices, target: Floats) -> None:
        """All local steps of these users, and target −= s·k·Σ_i clip(mean gradient, C)/D."""
        parts = []
        columns = len(self._local_step)
        widths = self.population.widths[users].tolist()
        sums = [np.zeros((width, columns), self.dtype) for width in widths]  # of each gradient
        for step in range(1, self._count + 1):
            visits = (self.visits[users] - 1) * self._count + step
            batch = self.population.batch(users, visits, self.dtype)
            moves = [-self._local_step * total for total in sums]
            residual = self._residual(batch, moves)
            for total, (samples, own) in zip(sums, batch.slices(), strict=True):
                total += own.T @ residual[samples]  # noqa: PLW2901 - in place
            parts.append((batch, residual))
        if self._publishes:
            norms = [np.einsum("rc,rc->c", total, total) for total in sums]
            squares = np.array(norms) / self._count**2  # ‖mean gradient‖², users × columns
            clipped = self._clipped_steps(squares)
            for batch, residual in parts:
                self._subtract_clipped(target, batch, residual, clipped)


def fine_tune(
    table: FinitePopulation, w: Matrix, steps: Sequence[float], passes: float = 5.0
) -> list[dict[str, float]]:
    """For each w, the measures after users train θ_i on top of it, with the best of ``steps``.

    The best step is chosen on validation rows if there are any. It costs no ε: it uses the
    published w and the user's own data (billboard lemma).

    Args:
        table: everyone's data, with test rows.
        w: d × settings × K.
        steps: the step sizes to try.
        passes: the number of passes over each user's own rows.
    """
    thetas = len(steps) * table.outputs  # columns of θ for each w
    numbers = int(table.widths.sum()) * thetas
    at_once = max(1, NUMBERS_AT_ONCE // numbers)
    found: list[dict[str, float]] = []
    for start in range(0, w.shape[1], at_once):
        some = w[:, start : start + at_once]
        measures = _measure_each_step(table, some, steps, passes)
        for first in range(0, len(measures), len(steps)):
            of_one_w = measures[first : first + len(steps)]
            found.append(_best_measures(of_one_w))
    return found


def _measure_each_step(
    table: FinitePopulation, w: Matrix, steps: Sequence[float], passes: float
) -> list[dict[str, float]]:
    """The measures of every w with every step; each pair is a setting of local learning."""
    silent = Release(Poisson(len(table), 1.0), clip_norm=1.0, noise_multiplier=0.0)
    settings = [EngineSetting(silent, Steps(0.0, step)) for step in steps] * w.shape[1]
    start = np.repeat(w, len(steps), axis=1)
    engine = LinearEngine(table, settings, seed=0, dtype=w.dtype, w=start)
    visits = passes * table.sizes / table.counts
    most = np.maximum(1, np.rint(visits))
    for visit in range(1, int(most.max()) + 1):
        engine.visits[:] = visit
        engine.visit(np.flatnonzero(most >= visit))
    measures = engine.measures(final=True)
    return [measures[place] for place in range(len(settings))]


def _best_measures(measures: Sequence[dict[str, float]]) -> dict[str, float]:
    """The best by ``measure_of``; NaN is never the best."""
    name = measure_of(measures[0])
    errors = np.array([badness(name, each[name]) for each in measures])
    errors = np.nan_to_num(errors, nan=np.inf)
    return measures[int(np.argmin(errors))]
