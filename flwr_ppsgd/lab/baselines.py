"""What α is compared with, at the same clip norm, noise and charge: fine-tuning after global
learning, and local steps (private FedAvg).

Local learning (α = 0) and global learning (α = ∞) are settings of the algorithm itself. Solved
personal models, around any w or around none, are those of ``evaluation``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from flwr_ppsgd.algorithm import Vector, clip_scales
from flwr_ppsgd.lab.engine import Engine, Indices, Setting, State
from flwr_ppsgd.lab.linear_engine import (
    SAMPLES_AT_ONCE,
    Batch,
    Floats,
    Population,
    Table,
    subtract_product,
)
from flwr_ppsgd.lab.measures import badness, for_choosing, measure_of, on_test, summary
from flwr_ppsgd.learner import minibatch_rows
from flwr_ppsgd.models.additive_linear import Matrix, predict

COLUMNS_AT_ONCE = 4096


class LocalStepsEngine(Engine):
    """Private FedAvg: users send the mean gradient along k local steps, (w − w_k)/(s·k), and w
    moves by s·k times the noisy mean of what they send.

    It is clipped, summed and charged like a single gradient; with k = 1 this is global learning. As
    in ``LinearEngine``, users move in their own coordinates.

    Args:
        population: everyone's data.
        settings: they share the kind of cohort and M; only s = ``steps.shared`` is used.
        seed: as in ``LinearEngine``.
        local_steps: k, the number of local steps in a round; each has a minibatch of its own.
        dtype: the precision of w.
    """

    def __init__(
        self,
        population: Population,
        settings: Sequence[Setting],
        *,
        seed: int | None,
        local_steps: int,
        dtype: DTypeLike,
    ) -> None:
        super().__init__(len(population), settings, seed, population.most_visits)
        self.population = population
        self._count = local_steps
        self._dtype = np.dtype(dtype)
        self._step = np.array([setting.steps.shared for setting in settings], self._dtype)
        self._clip = np.array([setting.release.clip_norm for setting in settings])
        self._noise_std = np.array([setting.release.usual_noise_std for setting in settings])
        columns = len(settings) * population.outputs
        self._w: Floats = np.zeros((population.features, columns), self._dtype)

    def advance(self) -> None:
        """One round of every setting."""
        users = self.next_cohort()
        at_once = max(1, SAMPLES_AT_ONCE // (self._count * self.population.batch_size))
        moved = np.zeros_like(self._w)  # −s·k·(Σ_i clip(g_i) + noise)/D
        with np.errstate(all="ignore"):  # a step too large ends in infinity, not in a warning
            for start in range(0, len(users), at_once):
                self._add_clipped(moved, users[start : start + at_once])
            if self._noise_std.any():
                self._add_noise(moved)
            self._w += moved

    def _server_step(self) -> Vector:
        """s·k/D of every setting."""
        return self._step * self._count / self.settings[0].release.denominator

    def _add_noise(self, moved: Floats) -> None:
        outputs = self.population.outputs
        normals = self.normals(self.population.features * outputs)
        scales = self._server_step() * self._noise_std
        noise = normals.reshape(-1, 1, outputs) * scales[:, None]  # d × settings × K
        moved -= noise.reshape(moved.shape).astype(self._dtype)

    def _add_clipped(self, moved: Floats, users: Indices) -> None:
        """Take all local steps of these users, and add what they send."""
        batches: list[Batch] = []
        residuals: list[Floats] = []
        gradients = [np.zeros((width, self._w.shape[1])) for width in self.population.widths[users]]
        for step in range(1, self._count + 1):
            visits = (self.visits[users] - 1) * self._count + step
            batch = self.population.batch(users, visits, self._dtype)
            residual = self._residual(batch, gradients)
            for at, (_, own_samples, own) in enumerate(batch.slices()):
                gradients[at] += own.T @ residual[own_samples]
            batches.append(batch)
            residuals.append(residual)
        factors = self._scales(gradients) * self._server_step()  # users × settings
        for batch, residual in zip(batches, residuals, strict=True):
            by_sample = np.repeat(factors, batch.counts, axis=0)
            by_column = np.repeat(by_sample, self.population.outputs, axis=1)
            subtract_product(moved, batch.x, residual * by_column.astype(self._dtype))

    def _residual(self, batch: Batch, gradients: Sequence[Floats]) -> Floats:
        """R/(m_i·k) at w − s·k·g_i, g_i being the mean so far: samples × columns."""
        steps = np.repeat(self._count * self._step, self.population.outputs)
        scores = np.asarray(batch.x @ self._w)
        for gradient, (_, own_samples, own) in zip(gradients, batch.slices(), strict=True):
            scores[own_samples] -= (own @ gradient) * steps
        by_setting = scores.reshape(len(scores), len(self.settings), -1)
        residual = predict(by_setting, self.population.loss) - batch.y[:, None, :]
        shares = 1 / (self._count * np.repeat(batch.counts, batch.counts))
        residual *= shares[:, None, None].astype(self._dtype)
        return np.asarray(residual).reshape(scores.shape)

    def _scales(self, gradients: Sequence[Floats]) -> Vector:
        """The factors that clip what each user sends: users × settings."""
        squares = np.array([np.einsum("rc,rc->c", g, g) for g in gradients])
        by_setting = squares.reshape(len(gradients), len(self.settings), -1)
        return clip_scales(np.sqrt(by_setting.sum(axis=2)), self._clip)

    def w(self, place: int) -> Vector:
        """w of one setting, as a flat vector."""
        own = self._w.reshape(len(self._w), len(self.settings), -1)[:, place]
        return own.reshape(-1).astype(np.float64)

    def measures(self, *, final: bool = False) -> dict[int, dict[str, float]]:
        """All measures of every setting that is still trained, by place."""
        with np.errstate(all="ignore"):
            found = self.population.measures(self._w, None, len(self.settings), final=final)
        return self.by_place(found)

    def by_user(self) -> dict[int, Vector]:
        """The main measure of each measured user, for every setting that is still trained."""
        with np.errstate(all="ignore"):
            found = self.population.by_user(self._w, None, len(self.settings))
        return self.users_by_place(found)

    def changing(self) -> State:
        """The arrays that rounds change."""
        return {"w": self._w}


class Tuned(NamedTuple):
    """The result of fine-tuning one w.

    Args:
        step: the best of the steps that were tried.
        by_user: the main measure of each measured user.
        measures: all measures, over all measured users.
    """

    step: float
    by_user: Vector
    measures: dict[str, float]


def fine_tune(table: Table, w: Matrix, steps: Sequence[float], passes: float) -> list[Tuned]:
    """For each w, the θ_i that each user trains alone on top of it, with the best of ``steps``.

    Free of charge: it uses the published w and the user's own data (billboard lemma).

    Args:
        table: everyone's data, with test rows.
        w: d × settings × K.
        steps: the step sizes to try.
        passes: the number of passes over each user's own rows.
    """
    at_once = max(1, COLUMNS_AT_ONCE // (len(steps) * table.outputs))
    found: list[Tuned] = []
    for start in range(0, w.shape[1], at_once):
        tuning = _Tuning(table, w[:, start : start + at_once], np.asarray(steps), passes)
        found += tuning.results()
    return found


@dataclass(frozen=True, eq=False)
class _Tuning:
    """Fine-tuning of some w, with every step; the arguments are those of ``fine_tune``."""

    table: Table
    w: Matrix
    steps: Vector
    passes: float

    def results(self) -> list[Tuned]:
        """The best step of each w, chosen on validation rows if there are any."""
        by_user = self._by_user()
        overall = self._overall("test", by_user["test"])
        if "validation" in by_user:
            choosing = self._overall("validation", by_user["validation"])
            overall = {**for_choosing(choosing), **overall}
        chosen_by = measure_of(overall)
        tried = overall[chosen_by].reshape(-1, len(self.steps))  # settings × steps
        found = []
        for at, values in enumerate(tried):
            errors = [badness(chosen_by, float(value)) for value in values]
            best = int(np.argmin(np.nan_to_num(errors, nan=np.inf)))
            column = at * len(self.steps) + best
            measures = {name: float(values[column]) for name, values in overall.items()}
            own = by_user["test"][on_test(chosen_by)][:, column]
            found.append(Tuned(float(self.steps[best]), own, measures))
        return found

    def _overall(self, name: str, by_user: dict[str, Floats]) -> dict[str, Vector]:
        part = self.table.parts[name]
        return summary(by_user, part.sizes[part.measured].astype(np.float64))

    def _by_user(self) -> dict[str, dict[str, Floats]]:
        """Part → measure → measured users × (settings·steps)."""
        found: dict[str, dict[str, list[Vector]]] = {name: {} for name in self.table.parts}
        for user in range(len(self.table)):
            with np.errstate(all="ignore"):  # a step too large ends in infinity
                theta = self._theta(user)
                for place, name in enumerate(self.table.parts):
                    if self.table.parts[name].sizes[user]:
                        for measure, values in self._measured(user, theta, place, name).items():
                            found[name].setdefault(measure, []).append(values)
        return {
            name: {measure: np.array(values) for measure, values in measures.items()}
            for name, measures in found.items()
        }

    def _theta(self, user: int) -> Floats:
        """θ_i after all visits, in own coordinates: r_i × (settings·steps·K)."""
        table = self.table
        own = table.coordinates(user, self.w.dtype).rows
        scores = self._around(table.own(user))  # n × settings·steps × K
        count = len(own)
        size = min(table.batch_size, count)
        steps = np.tile(self.steps / size, self.w.shape[1])
        theta = np.zeros((own.shape[1], scores[0].size), self.w.dtype)
        for visit in range(1, max(1, round(self.passes * count / size)) + 1):
            rows = minibatch_rows(table.seed, user, visit, count, size)
            personal = (own[rows] @ theta).reshape(size, *scores.shape[1:])
            y = table.y[table.offsets[user] + rows]
            residual = predict(scores[rows] + personal, table.loss) - y[:, None, :]
            residual *= steps[:, None]
            theta -= own[rows].T @ residual.reshape(size, -1)
        return theta

    def _around(self, x: Floats) -> Floats:
        """x w, the same for each step: rows × settings·steps × K."""
        scores = np.asarray(x @ self.w.reshape(len(self.w), -1))
        by_setting = scores.reshape(scores.shape[0], -1, self.table.outputs)
        return np.repeat(by_setting, len(self.steps), axis=1)

    def _measured(self, user: int, theta: Floats, place: int, name: str) -> dict[str, Vector]:
        part = self.table.parts[name]
        own = self.table.coordinates(user, self.w.dtype).parts[place]
        scores = self._around(part.x[part.own(user)])
        scores += (own @ theta).reshape(scores.shape)
        return self.table.user_measures(scores, name, user)
