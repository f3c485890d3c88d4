"""A network together with one user's data."""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from flwr_ppsgd.algorithm import Reduction, Vector
from flwr_ppsgd.learner import Batches, Rows, Solution, all_rows
from flwr_ppsgd.models.batch import as_tensor, named_parts, over_parts
from flwr_ppsgd.models.blocks import Shapes
from flwr_ppsgd.models.head import LinearHead
from flwr_ppsgd.models.linear import solver
from flwr_ppsgd.models.loaders import LoaderBatches, joined
from flwr_ppsgd.models.logistic import Logistic
from flwr_ppsgd.models.ridge import Ridge
from flwr_ppsgd.models.torch_optimizer import PersonalTraining
from flwr_ppsgd.models.twin import Places, Twin
from flwr_ppsgd.wire import Order

if TYPE_CHECKING:
    from flwr_ppsgd.models.split import SplitModel

log = logging.getLogger("flwr.ppsgd")

MOST_BYTES = 2**29  # of rows or features that a user's θ is solved on
ROWS_AT_ONCE = 256


def _count(test: tuple[Rows, Rows] | LoaderBatches | None) -> int:
    """The number of rows on which a user measures."""
    if test is None:
        return 0
    return test.num_examples if isinstance(test, LoaderBatches) else len(test[0])


class SplitLearner:
    """A ``SplitModel`` together with one user's data; made by ``SplitModel.learner``."""

    def __init__(
        self,
        model: "SplitModel",
        batches: Batches | LoaderBatches,
        test: tuple[Rows, Rows] | LoaderBatches | None,
        training: PersonalTraining,
        full_batch: bool,
    ) -> None:
        self._model = model
        self._batches = batches
        self._test = test
        self._training = training
        self._full_batch = full_batch
        self.num_examples = batches.num_examples
        self.num_tested = _count(test)
        self.takes_float32 = model.takes_float32

    def initial_theta(self) -> Vector:
        """θ as the module has it."""
        return self._model.initial_theta()

    def check_shared(self, shapes: Shapes) -> None:
        """ValueError unless the server's arrays are this model's shared parameters."""
        self._model.check_shared(shapes)

    def gradients(
        self,
        w: Vector,
        theta: Vector,
        order: Order,
    ) -> tuple[Vector, Vector]:
        """(∇_w, ∇_θ) of the loss over the minibatch of this visit, or over all rows."""
        if self._full_batch or order.full_batch:
            return self._full_gradients(w, theta, order.reduction)
        rows = self._batches(order.visit)
        return self._model.gradients(
            w,
            theta,
            rows,
            order.reduction,
        )

    def training_measures(
        self,
        w: Vector,
        theta: Vector,
        order: Order,
    ) -> dict[str, float]:
        """Loss, and accuracy for classes, on the rows of this visit."""
        if self._full_batch or order.full_batch:
            return self._model.evaluate_over(w, theta, self._epoch())
        rows = self._batches(order.visit)
        return self._model.evaluate(w, theta, rows)

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:
        """The same on the test part; nothing if there is none."""
        if self._test is None:
            return {}
        if isinstance(self._test, LoaderBatches):
            return self._model.evaluate_over(w, theta, self._test.epoch())
        return self._model.evaluate(w, theta, self._test)

    def _full_gradients(
        self,
        w: Vector,
        theta: Vector,
        reduction: Reduction,
    ) -> tuple[Vector, Vector]:
        """The gradients over all rows, one batch at a time in memory."""
        return self._model.gradients_over(w, theta, self._epoch(), reduction)

    def _epoch(self) -> Iterator[tuple[Rows, Rows]]:
        if isinstance(self._batches, LoaderBatches):
            yield from self._batches.epoch()
            return
        x, y = all_rows(self._batches)
        for start in range(0, len(y), ROWS_AT_ONCE):
            yield x[start : start + ROWS_AT_ONCE], y[start : start + ROWS_AT_ONCE]

    def solve(self, w: Vector) -> Solution:
        """The best θ for this w.

        A personal block that is one linear layer at the end, with squared error or cross-entropy,
        is solved on the features before it: see ``ridge`` and ``logistic``. Anything else is
        trained with the user's optimizer: see ``twin``.
        """
        solution = self._solved_head(w)
        return self._trained(w) if solution is None else solution

    def own_size(self) -> float:
        """The root mean square of the user's own head, if w is nothing but a head; else 0."""
        head = self._model.head()
        if head is None or not self._model.is_all_head:
            return 0.0
        found = self._head_solver(head, self._model.initial_w())
        return 0.0 if found is None else found.own_size()

    def anchor(self, w: Vector, theta: Vector, order: Order) -> Vector:  # noqa: ARG002
        """θ at which the gradient of w is taken while θ is solved.

        0 if θ is added to w. Else θ = 0 is no model: a linear layer is solved for this w, and any
        other block is trained on from the kept θ for one epoch.
        """
        if self._model.additive:
            return self.initial_theta()
        solution = self._solved_head(w)
        if solution is not None:
            return solution.theta
        twin = self._twin(w)
        _, trained = next(twin.trained(theta, np.arange(twin.rows), max(twin.steps())))
        return trained

    def _solved_head(self, w: Vector) -> Solution | None:
        """θ if it is a linear layer at the end of the network; else None."""
        head = self._model.head()
        found = None if head is None else self._head_solver(head, w)
        if head is None or found is None:
            return None
        shared = head.matrix(self._model.shared_head(w))
        solution = found.solve(shared.reshape(-1))
        own = solution.theta.reshape(shared.shape)
        if not self._model.additive:
            own = shared + own
        return Solution(head.theta(own), solution.chosen)

    def _head_solver(self, head: LinearHead, w: Vector) -> Ridge | Logistic | None:
        """The last layer with this user's rows; None if it cannot be solved."""
        parts = []
        taken = 0
        for rows in self._epoch():
            part = self._model.head_rows(head, w, rows)
            if part is None:
                return None
            parts.append(part)
            taken += part[1].nbytes
            if taken > MOST_BYTES:
                log.warning(
                    "The head is solved on this user's first rows: all take too much memory"
                )
                break
        loss = parts[0][0]
        features = np.concatenate([part[1] for part in parts])
        targets = np.concatenate([part[2] for part in parts])
        return solver(features, targets, loss)

    def _trained(self, w: Vector) -> Solution:
        starts = [self.initial_theta()]
        if self._model.additive:
            starts.append(self._model.local_start(w))
        return self._twin(w).solve(starts)

    def _twin(self, w: Vector) -> Twin:
        """The training of θ at this w, on rows that fit in memory."""
        batches = []
        taken = 0
        for x, y in self._epoch():
            tensors = over_parts(x, as_tensor)
            batches.append((tensors, as_tensor(y, "y")))
            taken += sum(part.nbytes for part in named_parts(tensors).values())
            if taken > MOST_BYTES:
                log.warning("θ is trained on this user's first rows: all take too much memory")
                break
        x, y = joined(batches)

        def at(places: Places) -> tuple[Rows, Rows]:
            chosen = torch.from_numpy(places)
            return over_parts(x, lambda part, _: part[chosen]), y[chosen]

        return Twin(
            self._training,
            self._model.personal_shapes,
            lambda theta, places: self._model.personal_gradient(w, theta, at(places), "mean"),
            lambda theta, places: self._model.evaluate(w, theta, at(places))["loss"],
            len(y),
        )


class TrainedSplitLearner(SplitLearner):
    """A ``SplitLearner`` whose user trains θ with an optimizer of their own."""

    def personal_step(self, w: Vector, theta: Vector, order: Order) -> Vector:
        """θ after this visit, in place of θ − s_θ·g_θ."""

        def gradient(theta: Vector, minibatch: int) -> tuple[float, Vector]:
            rows = self._batches(minibatch)
            return self._model.personal_gradient(w, theta, rows, order.reduction)

        return self._training.train(
            theta,
            self._model.personal_shapes,
            gradient,
            step=order.step,
            visit=order.visit,
        )
