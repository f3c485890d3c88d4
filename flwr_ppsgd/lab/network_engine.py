"""The cohort engine for networks: the gradients of a whole cohort in one call of the network."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from flwr_ppsgd.algorithm import Reduction, Vector, clip_scales, server_step
from flwr_ppsgd.lab.engine import TEST, Engine, EngineSetting, Indices
from flwr_ppsgd.learner import Batches, Rows
from flwr_ppsgd.models.torch_model import SplitModel
from flwr_ppsgd.recipe import Matrix

# users, and x and y of their minibatches
UserGroup: TypeAlias = tuple[Indices, tuple[Tensor, Tensor]]


class NetworkEngine(Engine):
    """``SplitModel`` or ``AdditiveHead`` for all users and several settings, one round at a time.

    w and θ are float64, as on every engine; the network computes in its own precision. Rows of all
    users have one shape.

    Args:
        model: the network, and which of its parameters are personal.
        batches: the training minibatches of every user, by visit.
        settings: as in ``LinearEngine``.
        seed: as in ``LinearEngine``.
        average: as in ``LinearEngine``.
        tests: the test rows (x, y) of every user; empty if nobody measures.
        validation: the validation rows of every user; empty if there are none.
        most_visits: the number of visits after which each user drops out; None: never.
    """

    def __init__(
        self,
        model: SplitModel,
        batches: Sequence[Batches],
        settings: Sequence[EngineSetting],
        *,
        seed: int | None,
        average: bool = False,
        tests: Sequence[tuple[Rows, Rows]] = (),
        validation: Sequence[tuple[Rows, Rows]] = (),
        most_visits: Indices | None = None,
    ) -> None:
        super().__init__(len(batches), settings, seed, most_visits)
        self._model = model
        self._batches = batches
        self._parts = {TEST: tests, "validation": validation}
        self._average = average
        w = model.initial_w()
        theta = model.initial_theta()
        self._w: Matrix = np.tile(w, (len(settings), 1))  # settings × w
        # settings × users × personal parameters
        self._thetas: Matrix = np.tile(theta, (len(settings), len(batches), 1))
        if average:  # Σ_t w_t and Σ_t t·(θ_t − θ_{t−1})
            self._w_sum = np.zeros_like(self._w)
            self._theta_moments = np.zeros_like(self._thetas)

    def advance(self) -> None:
        """One round of every setting."""
        users = self.next_cohort()
        if self._average:
            self._w_sum += self._w
        groups = self._groups_by_size(users)
        normals = self.normals(self._w.shape[1])
        with np.errstate(all="ignore"):  # a step too large ends in infinity, not in a warning
            for place in self.places:
                self._step(place, groups, normals)

    def _groups_by_size(self, users: Indices) -> list[UserGroup]:
        """The users with minibatches of each size m, and those minibatches: users × m × …"""
        by_size: dict[int, list[tuple[int, Rows, Rows]]] = {}
        for user in users.tolist():
            x, y = self._batches[user](int(self.visits[user]))
            by_size.setdefault(len(x), []).append((user, x, y))
        groups = []
        for size in sorted(by_size):
            own, xs, ys = zip(*by_size[size], strict=True)
            x = self._model.tensor(np.stack(xs))
            y = self._model.tensor(np.stack(ys))
            groups.append((np.array(own), (x, y)))
        return groups

    def _step(self, place: int, groups: Sequence[UserGroup], normals: Vector) -> None:
        """Move θ_i of everyone in the cohort, and w by the noisy sum of clipped gradients."""
        release = self.settings[place].release
        steps = self.settings[place].steps
        w = self._w[place]
        total = release.usual_noise_std * normals
        for users, rows in groups:
            thetas = self._thetas[place, users]  # users × personal parameters
            g_w, g_theta = cohort_gradients(self._model, w, thetas, rows, self.reduction)
            norms = np.linalg.norm(g_w, axis=1)
            scales = clip_scales(norms, release.clip_norm)
            total += scales @ g_w
            moves = steps.personal * g_theta
            self._thetas[place, users] = thetas - moves
            if self._average:
                self._theta_moments[place, users] -= self.round * moves
        if steps.publishes:
            self._w[place] = server_step(w, total, release, steps.shared)

    def w(self, place: int) -> Vector:
        """w of one setting, or its average iterate."""
        if self._average and self.round:
            return np.asarray(self._w_sum[place] / self.round)
        return np.array(self._w[place])

    def theta(self, place: int, user: int) -> Vector:
        """θ_i of one setting and user, or its average iterate."""
        return np.asarray(self._personal(place)[user])

    def _personal(self, place: int) -> Matrix:
        """θ of everyone, or their average iterates: users × personal parameters.

        (1/n)·Σ_{t<n} θ_t = θ_n − (1/n)·Σ_t t·(θ_t − θ_{t−1}).
        """
        thetas: Matrix = self._thetas[place]
        if self._average and self.round:
            return np.asarray(thetas - self._theta_moments[place] / self.round)
        return thetas

    def measure_users(self, part: str) -> tuple[dict[str, Matrix], Vector]:
        """Each measure, measured users × settings, and the number of rows of each user; NaN for
        settings that are no longer trained."""
        measured = [user for user, (x, _) in enumerate(self._parts[part]) if len(x)]
        if not measured:
            return {}, np.empty(0)
        shape = (len(measured), len(self.settings))
        found: dict[str, Matrix] = {}
        for place in self.places:
            w = self.w(place)
            thetas = self._personal(place)
            for row, user in enumerate(measured):
                rows = self._parts[part][user]
                measures = self._model.evaluate(w, thetas[user], rows)
                for name, value in measures.items():
                    if name not in found:
                        found[name] = np.full(shape, np.nan)
                    found[name][row, place] = value
        sizes = [len(self._parts[part][user][0]) for user in measured]
        return found, np.array(sizes, dtype=np.float64)


def cohort_gradients(
    model: SplitModel, w: Vector, thetas: Matrix, rows: tuple[Tensor, Tensor], reduction: Reduction
) -> tuple[Matrix, Matrix]:
    """(∇_w, ∇_θ) of many users, users × parameters each, in float64.

    Args:
        model: the network.
        w: the shared parameters.
        thetas: users × personal parameters.
        rows: x and y of the users' minibatches, users × m × …
        reduction: mean or sum over a minibatch.
    """

    def loss(
        shared: dict[str, Tensor], personal: dict[str, Tensor], x: Tensor, y: Tensor
    ) -> Tensor:
        return model.loss(shared, personal, (x, y), reduction)

    of_one_user = torch.func.grad(loss, argnums=(0, 1))
    of_all = torch.func.vmap(of_one_user, in_dims=(None, 0, 0, 0), randomness="different")
    g_w, g_theta = of_all(model.shared_tensors(w), model.personal_tensors(thetas), *rows)
    return _gradients_by_user(g_w), _gradients_by_user(g_theta)


def _gradients_by_user(gradients: dict[str, Tensor]) -> Matrix:
    """users × parameters, in float64."""
    parts = [part.flatten(1).double() for part in gradients.values()]
    return torch.cat(parts, dim=1).cpu().numpy()
