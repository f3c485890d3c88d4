"""What α is compared with, at the same clip norm, noise and charge: fine-tuning after global learning, local steps.

Local learning (α = 0) and global learning (α = ∞) are settings of the algorithm itself.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.algorithm import Vector, clip_scales
from flwr_ppsgd.data.synthetic import minibatch_rows
from flwr_ppsgd.models.split import Matrix, predict
from flwr_ppsgd.simulation.batches import Batch, Features, Population, Table, drawn
from flwr_ppsgd.simulation.linear import Setting, State, check_alike, coins_of
from flwr_ppsgd.simulation.measures import badness, measure_of, summary

PPSGD, FINE_TUNED, FEDAVG = "ppsgd", "fine-tuned", "fedavg"
BASELINES = (FINE_TUNED, FEDAVG)
COLUMNS_AT_ONCE = 4096


class LocalStepsEngine:
    """Private FedAvg: users send the mean gradient along k local steps, (w − w_k)/(s·k), and w moves by s·k of it.

    It is clipped, summed and charged as one gradient is; with k = 1 this is global learning. As of ``CohortEngine``,
    nothing of a user's own of size d×K is formed: after j steps a user predicts X w − s·Σ_{l<j} X X_lᵀR_l.
    """

    def __init__(
        self, population: Population, settings: Sequence[Setting], *, seed: int | None, local_steps: int, dtype: str
    ) -> None:
        check_alike(len(population), settings)
        self.population, self.settings, self.places = population, list(settings), list(range(len(settings)))
        self._draw, self._count, self._dtype, self.round = coins_of(seed), local_steps, np.dtype(dtype), 0
        self._visits = np.zeros(len(population), dtype=np.intp)
        self._w = np.zeros((population.features, len(settings), population.outputs), self._dtype)

    def advance(self) -> None:
        """One round of every setting."""
        self.round += 1
        uniforms = self._draw("cohort", self.round).uniforms(len(self.population))
        rounds, most = self._visits // self._count, self.population.most_visits
        users = drawn(self.settings[0].release.cohort, uniforms, rounds, most)
        visits = self._visits[users][:, None] + 1 + np.arange(self._count)
        self._visits[users] += self._count
        with np.errstate(all="ignore"):
            total = self._noise()
            if len(users):
                total += self._sum(
                    [self.population.batch(users, visits[:, j], self._dtype) for j in range(self._count)]
                )
            steps = np.array([s.steps.shared * self._count / s.release.denominator for s in self.settings])
            self._w -= (steps[:, None] * total).astype(self._dtype)

    def _noise(self) -> NDArray[Any]:
        """Of all settings from the same normals: d × settings × K."""
        stds = np.array([s.release.noise_std for s in self.settings])
        if not stds.any():
            return np.zeros(self._w.shape)
        normals = self._draw("noise", self.round).normals(self._w[:, 0].size)
        return np.asarray(normals.reshape(self._w[:, 0].shape)[:, None, :] * stds[:, None])

    def _sum(self, batches: Sequence[Batch]) -> NDArray[Any]:
        """Σ_i clip(mean gradient along the local steps of user i): d × settings × K."""
        whole = _joined(batches)
        gram = whole.gram()
        residual = self._residuals(whole, batches[0], gram)
        turned = np.matmul(gram, residual.reshape(*residual.shape[:2], -1)).reshape(residual.shape)
        squares = np.einsum("umsk,umsk->us", residual, turned)
        scales = clip_scales(np.sqrt(np.maximum(squares, 0.0)), np.array([s.release.clip_norm for s in self.settings]))
        clipped = (residual * scales[:, None, :, None]).reshape(whole.flat.shape[0], -1)
        return np.asarray(whole.flat.T @ clipped).reshape(self._w.shape)

    def _residuals(self, whole: Batch, first: Batch, gram: NDArray[Any]) -> NDArray[Any]:
        """R of all local steps, each divided by m_i·k: users × k·m × settings × K."""
        users, m, outputs = first.y.shape
        scores = np.asarray(whole.flat @ self._w.reshape(len(self._w), -1))
        scores = scores.reshape(users, -1, len(self.settings), outputs)
        steps = np.array([s.steps.shared for s in self.settings], self._dtype)
        share = (1.0 / (self._count * first.counts)).astype(self._dtype)[:, None, None, None]
        residual = np.zeros_like(scores)
        for start in range(0, scores.shape[1], m):
            own = slice(start, start + m)
            moved = (self._count * steps[:, None] * residual[:, :start]).reshape(users, start, scores[0, 0].size)
            here = scores[:, own] - np.matmul(gram[:, own, :start], moved).reshape(scores[:, own].shape)
            residual[:, own] = share * (predict(here, self.population.loss) - whole.y[:, own, None, :])
        return residual

    def shared(self) -> NDArray[Any]:
        return self._w.reshape(len(self._w), -1)

    def add_personal(self, user: int, out: NDArray[Any]) -> None:
        """Nobody has a θ."""

    def add_personal_scores(self, user: int, x: Features, out: NDArray[Any]) -> None:
        """Nobody has a θ."""

    def w(self, place: int) -> Vector:
        return np.asarray(self._w[:, self.places.index(place)].reshape(-1), dtype=np.float64)

    def measures(self) -> dict[int, dict[str, float]]:
        with np.errstate(all="ignore"):
            found = self.population.measures(self, len(self.settings))
        return {place: {name: float(v[at]) for name, v in found.items()} for at, place in enumerate(self.places)}

    def by_user(self) -> dict[int, Vector]:
        with np.errstate(all="ignore"):
            found = self.population.by_user(self, len(self.settings))
        return {place: found[measure_of(found)][:, at] for at, place in enumerate(self.places)} if found else {}

    def state(self) -> State:
        counts = {"round": np.array(self.round), "places": np.array(self.places)}
        return {**counts, "w": self._w, "visits": self._visits}

    def restore(self, state: State) -> None:
        self.drop(set(self.places).difference(state["places"].tolist()))
        self.round = int(state["round"])
        self._w[...], self._visits[...] = state["w"], state["visits"]

    def drop(self, gone: set[int]) -> None:
        kept = [at for at, place in enumerate(self.places) if place not in gone]
        self.places, self.settings = [self.places[at] for at in kept], [self.settings[at] for at in kept]
        self._w = self._w[:, kept]


def _joined(batches: Sequence[Batch]) -> Batch:
    """Each user's minibatches one after the other, as one."""
    users, m, _ = batches[0].y.shape
    y = np.concatenate([batch.y for batch in batches], axis=1)
    if not isinstance(batches[0].x, sparse.csr_array):
        return replace(batches[0], x=np.concatenate([batch.x for batch in batches], axis=1), y=y, rows=None)
    place = np.arange(len(batches) * users * m).reshape(len(batches), users, m).transpose(1, 0, 2)
    stacked = sparse.csr_array(sparse.vstack([batch.x for batch in batches], format="csr"))
    return replace(batches[0], x=stacked[place.reshape(-1)], y=y, rows=None)


def fine_tune(
    table: Table, w: Matrix, steps: Sequence[float], passes: float
) -> list[tuple[float, Vector, dict[str, float]]]:
    """For each w, θ_i trained by its user alone on top of it: (best step, each user's measure, all measures).

    Free of charge: it uses the published w and the user's own data (billboard lemma). w: d × settings × K.
    """
    most = max(1, COLUMNS_AT_ONCE // (len(steps) * table.outputs))
    found = []
    for start in range(0, w.shape[1], most):
        found += _fine_tune(table, w[:, start : start + most], np.asarray(steps), passes)
    return found


def _fine_tune(table: Table, w: Matrix, steps: Vector, passes: float) -> list[tuple[float, Vector, dict[str, float]]]:
    by_user: dict[str, list[NDArray[Any]]] = {}
    with np.errstate(all="ignore"):
        for user in table.measured.tolist():
            scores = _tuned_scores(table, user, w, steps, passes)
            for name, values in table.user_measures(scores.reshape(len(scores), -1, table.outputs), user).items():
                by_user.setdefault(name, []).append(values)
    arrays = {name: np.array(values) for name, values in by_user.items()}
    main = measure_of(arrays)
    every = summary(arrays, table.sizes[table.measured].astype(np.float64))
    chosen = []
    for at in range(w.shape[1]):
        worst = [badness(main, float(every[main][at * len(steps) + k])) for k in range(len(steps))]
        best = int(np.argmin(np.nan_to_num(worst, nan=np.inf)))
        column = at * len(steps) + best
        measures = {name: float(values[column]) for name, values in every.items()}
        chosen.append((float(steps[best]), arrays[main][:, column], measures))
    return chosen


def _tuned_scores(table: Table, user: int, w: Matrix, steps: Vector, passes: float) -> NDArray[Any]:
    """x(w + θ_i) on the user's test rows after so many passes over the own ones: rows × settings × steps × K.

    A step of θ moves the scores of all rows x by −(s/m)·x X_bᵀR_b: θ itself is never formed.
    """
    own, (test, _), count = table.own(user), table.test_rows(user), int(table.sizes[user])
    y = table.y[table.offsets[user] : table.offsets[user + 1]]
    together: Any = sparse.vstack([own, test], format="csr") if sparse.issparse(own) else np.concatenate([own, test])
    product = together @ own.T
    products: NDArray[Any] = product.toarray() if sparse.issparse(product) else product
    first = np.asarray(together @ w.reshape(len(w), -1)).reshape(len(products), -1, 1, table.outputs)
    scores = np.repeat(first, len(steps), axis=2)
    size = min(table.batch_size, count)
    for visit in range(1, max(1, round(passes * count / size)) + 1):
        rows = minibatch_rows(table.seed, user, visit, count, size)
        residual = predict(scores[rows], table.loss) - y[rows, None, None, :]
        residual *= steps[:, None] / size
        scores -= (products[:, rows] @ residual.reshape(size, -1)).reshape(scores.shape)
    return scores[count:]
