"""The personal part of any network: trained by a twin that is judged on rows it has not seen.

A twin trains on four fifths of a user's rows, with the user's optimizer, and the last fifth judges
where to begin, how large the steps are and when to stop; "not at all" is among the answers. Then
θ is trained in that way on all rows. All of it stays with the user.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.learner import Solution, generator
from flwr_ppsgd.models.torch_optimizer import PersonalTraining

Places: TypeAlias = NDArray[np.intp]
# (θ, places of rows) → (loss, ∇_θ)
Gradient: TypeAlias = Callable[[Vector, Places], tuple[float, Vector]]
Judge: TypeAlias = Callable[[Vector, Places], float]

FOLDS = 5
BATCH = 32
EPOCHS = (1, 2, 4, 8, 16, 32)
MOST_STEPS = 600  # of one twin
STEPS = (0.001, 0.01)  # for an optimizer whose learning rate nobody chose


@dataclass(frozen=True, eq=False)
class Twin:
    """How a user's θ is trained, and how that is judged.

    Args:
        training: the user's optimizer.
        shapes: of the personal parameters.
        gradient: of the loss on some rows.
        loss: the mean loss on some rows, in evaluation.
        rows: n.
    """

    training: PersonalTraining
    shapes: Sequence[torch.Size]
    gradient: Gradient
    loss: Judge
    rows: int

    def solve(self, starts: Sequence[Vector]) -> Solution:
        """The θ of the best judged start, step and length.

        Args:
            starts: where training may begin. The first one is the answer if training does not help,
                and for a user with a single row, who cannot judge.
        """
        if self.rows < 2:
            return Solution(starts[0])
        order = generator("twin", self.rows).permutation(self.rows)
        held = order[: max(1, self.rows // FOLDS)]
        seen = order[len(held) :]
        alone = self._judged(starts[0], held)
        best = (alone, 0, 0, 0.0)
        for place, step in itertools.product(range(len(starts)), self.steps()):
            for epochs, theta in self.trained(starts[place], seen, step):
                best = min(best, (self._judged(theta, held), epochs, place, step))
        judged, epochs, place, step = best
        theta = self._after(starts[place], epochs, step)
        chosen = {"epochs": float(epochs), "step": step, "loo": judged, "loo-shared": alone}
        return Solution(theta, chosen)

    def steps(self) -> tuple[float, ...]:
        """The learning rates to try: one that means nothing if the optimizer has its own."""
        made = self.training.optimizer
        if made is None or isinstance(made, type):
            return STEPS
        return (1.0,)

    def trained(self, theta: Vector, rows: Places, step: float) -> Iterator[tuple[int, Vector]]:
        """(epochs, θ) along one training on these rows."""
        before = 0
        for epochs in EPOCHS:
            per_epoch = math.ceil(len(rows) / BATCH)
            if epochs > 1 and epochs * per_epoch > MOST_STEPS:
                return
            theta = self._moved(theta, rows, step, before, epochs)
            before = epochs
            yield epochs, theta

    def _after(self, theta: Vector, epochs: int, step: float) -> Vector:
        everything = np.arange(self.rows)
        for done, trained in self.trained(theta, everything, step) if epochs else ():
            theta = trained
            if done == epochs:
                break
        return theta

    def _moved(self, theta: Vector, rows: Places, step: float, first: int, last: int) -> Vector:
        """θ after the epochs from ``first`` to ``last``."""
        batches: list[Places] = []
        for epoch in range(first, last):
            shuffled = rows[generator("twin", epoch, len(rows)).permutation(len(rows))]
            batches += np.array_split(shuffled, math.ceil(len(rows) / BATCH))
        optimizer = self.training.optimizer or torch.optim.Adam
        training = replace(self.training, optimizer=optimizer, steps=len(batches), schedule=None)
        return training.train(
            theta,
            self.shapes,
            lambda now, number: self.gradient(now, batches[number - 1]),
            step=step,
            visit=1,
        )

    def _judged(self, theta: Vector, rows: Places) -> float:
        """The loss; infinite if it is no number."""
        if not np.isfinite(theta).all():
            return math.inf
        loss = self.loss(theta, rows)
        return loss if math.isfinite(loss) else math.inf
