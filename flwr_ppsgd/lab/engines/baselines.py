"""What α is compared with, at the same clip norm, noise and charge: fine-tuning after global
learning, and local steps (private FedAvg).

Local learning (α = 0) and global learning (α = ∞) are settings of the algorithm itself.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike
from scipy import sparse

from flwr_ppsgd.algorithm import Vector, clip_scales
from flwr_ppsgd.lab.engines.batches import (
    Batch,
    Features,
    Floats,
    Indices,
    MeasuredRows,
    Population,
    Table,
    drawn,
    stacked,
)
from flwr_ppsgd.lab.engines.engine import (
    Setting,
    State,
    check_alike,
    dropped_since,
    progress,
    rows_by_place,
    users_by_place,
)
from flwr_ppsgd.lab.engines.linear import scaled, squared_norms
from flwr_ppsgd.lab.engines.measures import badness, for_choosing, measure_of, on_test, summary
from flwr_ppsgd.learner import minibatch_rows
from flwr_ppsgd.models.linear import Matrix, predict
from flwr_ppsgd.noise import coins_for

COLUMNS_AT_ONCE = 4096


class LocalStepsEngine:
    """Private FedAvg: users send the mean gradient along k local steps, (w − w_k)/(s·k), and w
    moves by s·k times the noisy mean of what they send.

    It is clipped, summed and charged like a single gradient; with k = 1 this is global learning. As
    in ``CohortEngine``, nothing of size d×K is formed for each user: after j steps a user predicts
    X w − s·Σ_{l<j} X X_lᵀR_l.

    Args:
        population: everyone's data.
        settings: they share the kind of cohort and M; only s = ``steps.shared`` is used.
        seed: as in ``CohortEngine``.
        local_steps: k, the number of local steps in a visit; each has a minibatch of its own.
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
        check_alike(len(population), settings)
        self.population = population
        self.settings = list(settings)
        self.places = list(range(len(settings)))
        self.round = 0
        self._cohort = settings[0].release.cohort
        self._seed = seed
        self._count = local_steps
        self._dtype = np.dtype(dtype)
        self._visits = np.zeros(len(population), dtype=np.intp)
        shape = (population.features, len(settings), population.outputs)
        self._w = np.zeros(shape, self._dtype)

    def advance(self) -> None:
        """One round of every setting."""
        self.round += 1
        users = self._draw()
        with np.errstate(all="ignore"):  # a step too large ends in infinity, not in a warning
            total = self._noise()  # d × settings × K
            if len(users):
                batches = self._batches(users)
                total += self._sum(batches)
            steps = np.array([self._step_of(setting) for setting in self.settings])
            moved = steps[:, None] * total
            self._w -= moved.astype(self._dtype)

    def _step_of(self, setting: Setting) -> float:
        """s·k/D."""
        return setting.steps.shared * self._count / setting.release.denominator

    def _draw(self) -> Indices:
        """The users who take part in this round."""
        coins = coins_for(self._seed, "cohort", self.round)
        uniforms = coins.uniforms(len(self.population))
        rounds = self._visits // self._count
        return drawn(self._cohort, uniforms, rounds, self.population.most_visits)

    def _batches(self, users: Indices) -> list[Batch]:
        """The minibatches of these users for each local step; every one counts as a visit."""
        batches = []
        for _ in range(self._count):
            self._visits[users] += 1
            visits = self._visits[users]
            batches.append(self.population.batch(users, visits, self._dtype))
        return batches

    def _noise(self) -> Floats:
        """The noise of all settings, from the same normals: d × settings × K."""
        stds = np.array([setting.release.usual_noise_std for setting in self.settings])
        if not stds.any():
            return np.zeros(self._w.shape)
        features, _, outputs = self._w.shape
        coins = coins_for(self._seed, "noise", self.round)
        normals = coins.normals(features * outputs)
        normals = normals.reshape(features, 1, outputs)
        return np.asarray(normals * stds[:, None])

    def _sum(self, batches: Sequence[Batch]) -> Floats:
        """Σ_i clip(mean gradient along the local steps of user i): d × settings × K."""
        whole = _joined(batches)
        gram = whole.gram()  # users × k·m × k·m
        residual = self._residuals(whole, batches[0], gram)  # users × k·m × settings × K
        squares = squared_norms(gram, residual)
        lengths = np.sqrt(np.maximum(squares, 0.0))
        clip_norms = np.array([setting.release.clip_norm for setting in self.settings])
        scales = clip_scales(lengths, clip_norms)
        clipped = scaled(residual, scales)
        samples = whole.flat.shape[0]
        product = whole.flat.T @ clipped.reshape(samples, -1)
        return np.asarray(product).reshape(self._w.shape)

    def _residuals(self, whole: Batch, first: Batch, gram: Floats) -> Floats:
        """R of all local steps, each divided by m_i·k: users × k·m × settings × K."""
        users, m, outputs = first.y.shape
        settings = len(self.settings)
        scores = np.asarray(whole.flat @ self.shared())
        scores = scores.reshape(users, -1, settings, outputs)
        steps = np.array([setting.steps.shared for setting in self.settings], self._dtype)
        scale = self._count * steps[:, None]
        share = 1.0 / (self._count * first.counts)
        share = share.astype(self._dtype)[:, None, None, None]
        residual = np.zeros_like(scores)
        for start in range(0, scores.shape[1], m):
            own = slice(start, start + m)  # the rows of this local step
            moved = scale * residual[:, :start]
            columns = moved.reshape(users, start, settings * outputs)
            change = np.matmul(gram[:, own, :start], columns)
            here = scores[:, own] - change.reshape(users, m, settings, outputs)
            prediction = predict(here, self.population.loss)
            error = prediction - whole.y[:, own, None, :]
            residual[:, own] = share * error
        return residual

    def shared(self) -> Floats:
        """w of every setting: d × columns."""
        return self._w.reshape(len(self._w), -1)

    def add_personal(self, user: int, out: Floats) -> None:
        """Nothing: nobody has a θ."""

    def add_personal_scores(self, user: int, part: MeasuredRows, out: Floats) -> None:
        """Nothing: nobody has a θ."""

    def w(self, place: int) -> Vector:
        """w of one setting, as the flat vector of other engines."""
        at = self.places.index(place)
        flat = self._w[:, at].reshape(-1)
        return np.asarray(flat, dtype=np.float64)

    def measures(self, *, final: bool = False) -> dict[int, dict[str, float]]:
        """All measures of every setting that is still trained, by place."""
        with np.errstate(all="ignore"):
            found = self.population.measures(self, len(self.settings), final=final)
        return rows_by_place(self.places, found)

    def by_user(self) -> dict[int, Vector]:
        """The main measure of each measured user, for every setting that is still trained."""
        with np.errstate(all="ignore"):
            found = self.population.by_user(self, len(self.settings))
        return users_by_place(self.places, found)

    def state(self) -> State:
        """Everything that training has changed."""
        return {**progress(self), "w": self._w, "visits": self._visits}

    def restore(self, state: State) -> None:
        """Continue from ``state``, which comes from an engine made with the same arguments."""
        self.drop(dropped_since(self, state))
        self.round = int(state["round"])
        self._w[...] = state["w"]
        self._visits[...] = state["visits"]

    def drop(self, gone: set[int]) -> None:
        """Stop training the settings at these places."""
        kept = [at for at, place in enumerate(self.places) if place not in gone]
        self.places = [self.places[at] for at in kept]
        self.settings = [self.settings[at] for at in kept]
        self._w = self._w[:, kept]


def _joined(batches: Sequence[Batch]) -> Batch:
    """Each user's minibatches one after the other, as one."""
    first = batches[0]
    parts = [batch.x for batch in batches]
    y = np.concatenate([batch.y for batch in batches], axis=1)
    if not isinstance(first.x, sparse.csr_array):
        x: Features = np.concatenate(parts, axis=1)
        return replace(first, x=x, y=y, rows=None)
    users, m, _ = first.y.shape
    steps = len(batches)
    by_step = np.arange(steps * users * m).reshape(steps, users, m)
    by_user = by_step.transpose(1, 0, 2)  # users × k × m
    x = stacked(parts)[by_user.reshape(-1)]
    return replace(first, x=x, y=y, rows=None)


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
        table: everyone's data.
        w: d × settings × K.
        steps: the step sizes to try.
        passes: the number of passes over each user's own rows.
    """
    columns = len(steps) * table.outputs
    at_once = max(1, COLUMNS_AT_ONCE // columns)
    found = []
    for start in range(0, w.shape[1], at_once):
        some = w[:, start : start + at_once]
        found += _fine_tune(table, some, np.asarray(steps), passes)
    return found


def _fine_tune(table: Table, w: Matrix, steps: Vector, passes: float) -> list[Tuned]:
    assert table.test is not None
    by_user, overall = _tuned_on(table, table.test, w, steps, passes)
    if table.validation is not None:
        _, choosing = _tuned_on(table, table.validation, w, steps, passes)
        overall = {**for_choosing(choosing), **overall}
    chosen_by = measure_of(overall)
    main = on_test(chosen_by)
    tried = overall[chosen_by].reshape(-1, len(steps))  # settings × steps
    found = []
    for at, values in enumerate(tried):
        best = _best(chosen_by, values)
        column = at * len(steps) + best
        measures = {name: float(values[column]) for name, values in overall.items()}
        own = by_user[main][:, column]
        found.append(Tuned(float(steps[best]), own, measures))
    return found


def _tuned_on(
    table: Table, part: MeasuredRows, w: Matrix, steps: Vector, passes: float
) -> tuple[dict[str, Floats], dict[str, Vector]]:
    """Each measure on the rows of a part after fine-tuning, by user and over all rows."""
    by_user = _tuned_measures(table, part, w, steps, passes)
    weights = part.sizes[part.measured].astype(np.float64)
    return by_user, summary(by_user, weights)


def _best(measure: str, values: Vector) -> int:
    """Which value of a measure is the best; NaN is the worst."""
    errors = [badness(measure, float(value)) for value in values]
    known = np.nan_to_num(errors, nan=np.inf)
    return int(np.argmin(known))


def _tuned_measures(
    table: Table,
    part: MeasuredRows,
    w: Matrix,
    steps: Vector,
    passes: float,
) -> dict[str, Floats]:
    """Each measure after fine-tuning: measured users × (settings·steps)."""
    found: dict[str, list[Vector]] = {}
    with np.errstate(all="ignore"):  # a step too large ends in infinity, not in a warning
        for user in part.measured.tolist():
            scores = _tuned_scores(table, part, user, w, steps=steps, passes=passes)
            columns = scores.reshape(len(scores), -1, table.outputs)  # rows × settings·steps × K
            for name, values in table.user_measures(columns, part, user).items():
                found.setdefault(name, []).append(values)
    return {name: np.array(values) for name, values in found.items()}


def _tuned_scores(
    table: Table, part: MeasuredRows, user: int, w: Matrix, *, steps: Vector, passes: float
) -> Floats:
    """x(w + θ_i) on the user's rows of a part after fine-tuning: rows × settings × steps × K.

    A step of θ moves the scores of all rows x by −(s/m)·x X_bᵀR_b: θ itself is never formed.
    """
    own = table.own(user)
    together = stacked([own, part.own(user)])
    products = _dense(together @ own.T)  # (own and test rows) × own rows
    before = np.asarray(together @ w.reshape(len(w), -1))
    before = before.reshape(len(products), -1, 1, table.outputs)
    scores = np.repeat(before, len(steps), axis=2)  # rows × settings × steps × K
    first_row = table.offsets[user]
    count = int(table.sizes[user])
    size = min(table.batch_size, count)
    visits = max(1, round(passes * count / size))
    for visit in range(1, visits + 1):
        rows = minibatch_rows(table.seed, user, visit, count, size)
        y = table.y[first_row + rows]
        residual = predict(scores[rows], table.loss) - y[:, None, None, :]
        residual *= steps[:, None] / size
        change = products[:, rows] @ residual.reshape(size, -1)
        scores -= change.reshape(scores.shape)
    return scores[count:]


def _dense(product: Features) -> Floats:
    if isinstance(product, sparse.csr_array):
        return np.asarray(product.toarray())
    return product
