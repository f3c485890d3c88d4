"""The cohort engine for linear models: all users and many settings side by side.

A setting with K outputs is K neighbouring *columns* of w and θ, so that one product x w serves all
settings. They share cohorts, minibatches and standard normals (common random numbers): the noise
is one array for all of them, and w = V − (s_w·z·C/D)·Σ_t n_t in each column, where V has the steps
without noise. θ_i is kept in the user's own coordinates (``population``).

The same data, cohorts, minibatches and noise as on the other engines give the same w and θ, up to
rounding. Sums are taken in floating point, so what is added is *simulation noise*: ε is what a
deployment would have cost.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike
from scipy import sparse
from scipy.linalg import get_blas_funcs

from flwr_ppsgd.algorithm import Vector, clip_scales
from flwr_ppsgd.lab.engine import Engine, EngineSetting, Indices
from flwr_ppsgd.lab.population import Batch, Floats, FreshPopulation, Population
from flwr_ppsgd.models.additive_linear import predict

SAMPLES_AT_ONCE = 2048  # in one product


class LinearEngine(Engine):
    """All settings of one cohort, one round at a time.

    Args:
        population: everyone's data.
        settings: all with the same cohort and M; clip norm, noise and steps may differ.
        seed: the insecure seed; None draws secret noise.
        average: keep the average iterates; ``w``, ``theta`` and measures are then of those.
        dtype: float32 is about twice as fast; w and θ then have relative rounding errors of about
            1e-6.
        w: where the settings start, d × settings × K; None: at 0.
    """

    def __init__(
        self,
        population: Population,
        settings: Sequence[EngineSetting],
        *,
        seed: int | None,
        average: bool = False,
        dtype: DTypeLike = np.float64,
        w: Floats | None = None,
    ) -> None:
        super().__init__(len(population), settings, seed, population.most_visits)
        self.population = population
        self.dtype = np.dtype(dtype)
        self._average = average
        self._set_steps(w is not None)
        self._shares = np.ones(len(population))  # of a user's sum over the minibatch
        if self.reduction == "mean":
            self._shares = 1 / population.counts
        # V, d × the columns that move
        width = self._moving.stop - self._moving.start
        self._v: Floats = np.zeros((population.features, width), self.dtype)
        if w is not None:
            self._v += w.reshape(self._v.shape)
        # Σ_t n_t, d × K
        self._noise: Floats = np.zeros((population.features, population.outputs), self.dtype)
        # everyone's θ_i, one below the other: Σ_i r_i × columns
        ends = np.cumsum(population.widths)
        self._starts = [0, *ends.tolist()]
        columns = len(settings) * population.outputs
        self._theta: Floats = np.zeros((self._starts[-1], columns), self.dtype)
        if average:  # Σ_t V_t, Σ_t of the noise, and Σ_t t·(θ_t − θ_{t−1})
            self._v_sum = np.zeros_like(self._v)
            self._noise_sum = np.zeros_like(self._noise)
            self._theta_moment = np.zeros_like(self._theta)

    def _set_steps(self, all_move: bool) -> None:
        """C, s_w/D and s_w·z·C/D of each setting, and s_θ of each column."""
        outputs = self.population.outputs
        releases = [setting.release for setting in self.settings]
        shared = np.array([setting.steps.shared for setting in self.settings])
        personal = np.array([setting.steps.personal for setting in self.settings], self.dtype)
        noise_std = np.array([release.usual_noise_std for release in releases])
        self._clip = np.array([release.clip_norm for release in releases])
        self._shared_step = shared / releases[0].denominator
        self._noise_step = (self._shared_step * noise_std).astype(self.dtype)
        self._personal_step = np.repeat(personal, outputs)
        # work that no setting needs is skipped in every round
        self._publishes = bool(shared.any())
        self._has_noise = bool(self._noise_step.any())
        self._has_theta = bool(personal.any())
        # V has the columns from the first setting that moves w to the last: w is 0 in the others
        moves = np.repeat(all_move | (shared > 0), outputs)
        moving = np.flatnonzero(moves)
        self._moving = slice(0, 0)
        if len(moving):
            self._moving = slice(moving[0], moving[-1] + 1)

    def advance(self) -> None:
        """One round of every setting."""
        users = self.next_cohort()
        if self._average:
            self._v_sum += self._v
            self._noise_sum += self._noise
        self.visit(users)
        if self._has_noise:
            normals = self.normals(self._noise.size)
            self._noise += normals.reshape(self._noise.shape)

    def visit(self, users: Indices) -> None:
        """Steps of these users, and of V by their clipped gradients, all taken at the same w."""
        if not len(users):
            return
        at_once = max(1, SAMPLES_AT_ONCE // self.samples_per_visit)
        with np.errstate(all="ignore"):  # a step too large ends in infinity, not in a warning
            if len(users) <= at_once:  # no later gradient is taken at V, so it changes in place
                self._step(users, self._v)
                return
            change = np.zeros_like(self._v)
            for start in range(0, len(users), at_once):
                self._step(users[start : start + at_once], change)
            self._v += change

    @property
    def samples_per_visit(self) -> int:
        """The most samples that a user draws in a round."""
        return self.population.batch_size

    def _step(self, users: Indices, target: Floats) -> None:
        """θ_i −= s_θ·g_i, and target −= s_w·Σ_i clip(g_i, C)/D."""
        batch = self.population.batch(users, self.visits[users], self.dtype)
        thetas: list[Floats] = []
        if self._has_theta:
            thetas = [self._own_rows(self._theta, user) for user in users.tolist()]
        residual = self._residual(batch, thetas)  # samples × columns
        squares = np.empty((len(users), residual.shape[1]))  # ‖g_i‖², users × columns
        for at, (samples, own) in enumerate(batch.slices()):
            gradient = own.T @ residual[samples]  # r_i × columns, in own coordinates
            np.einsum("rc,rc->c", gradient, gradient, out=squares[at])
            if self._has_theta:
                gradient *= self._personal_step
                thetas[at] -= gradient
                if self._average:
                    moment = self._own_rows(self._theta_moment, int(users[at]))
                    moment -= self.round * gradient
        if self._publishes:
            clipped = self._clipped_steps(squares)
            self._subtract_clipped(target, batch, residual, clipped)

    def _residual(self, batch: Batch, thetas: Sequence[Floats]) -> Floats:
        """prediction − y at (w, θ_i), divided by m_i if gradients are means: samples × columns."""
        samples, outputs = batch.y.shape
        scores = np.zeros((samples, len(self._personal_step)), self.dtype)
        scores[:, self._moving] = batch.x @ self._v
        if thetas:
            for theta, (own_samples, own) in zip(thetas, batch.slices(), strict=True):
                scores[own_samples] += own @ theta
        by_setting = scores.reshape(samples, -1, outputs)  # samples × settings × K
        if self._has_noise:
            noise = np.asarray(batch.x @ self._noise)  # samples × K
            by_setting -= noise[:, None, :] * self._noise_step[:, None]
        residual = predict(by_setting, self.population.loss)  # samples × settings × K
        residual -= batch.y[:, None, :]
        shares = np.repeat(self._shares[batch.users], batch.counts)
        residual *= shares.astype(self.dtype)[:, None, None]
        return residual.reshape(scores.shape)

    def _clipped_steps(self, squares: Floats) -> Floats:
        """s_w·min(1, C/‖g_i‖)/D, users × columns.

        Args:
            squares: ‖g_i‖² of each column, users × columns.
        """
        outputs = self.population.outputs
        by_setting = squares.reshape(len(squares), -1, outputs)  # users × settings × K
        norms = np.sqrt(by_setting.sum(axis=2))
        steps = clip_scales(norms, self._clip) * self._shared_step
        return np.repeat(steps, outputs, axis=1).astype(self.dtype)

    def _subtract_clipped(
        self, target: Floats, batch: Batch, residual: Floats, steps: Floats
    ) -> None:
        """target −= Xᵀ(residual·steps), in the columns that move.

        Args:
            target: as V.
            batch: minibatches, with X.
            residual: samples × columns.
            steps: of each user, users × columns.
        """
        clipped = np.repeat(steps[:, self._moving], batch.counts, axis=0)
        clipped *= residual[:, self._moving]
        x = batch.x
        if isinstance(x, sparse.csr_array):  # only rows of target that have an entry are touched
            columns = np.unique(x.indices)
            change = x[:, columns].T @ clipped
            target[columns] -= np.asarray(change)
        elif clipped.size:  # in one pass over the target
            gemm = get_blas_funcs("gemm", dtype=self.dtype)
            gemm(-1.0, clipped.T, x.T, 1.0, target.T, trans_b=True, overwrite_c=True)

    def _own_rows(self, array: Floats, user: int) -> Floats:
        """The rows of one user's own coordinates."""
        return array[self._starts[user] : self._starts[user + 1]]

    def _shared_w(self) -> Floats:
        """w of every setting, or its average iterate: d × columns."""
        v = self._v
        noise = self._noise
        if self._average and self.round:
            v = self._v_sum / self.round
            noise = self._noise_sum / self.round
        by_setting = noise[:, None, :] * -self._noise_step[:, None]  # d × settings × K
        w: Floats = by_setting.reshape(len(noise), -1)
        w[:, self._moving] += v
        return w

    def _personal(self, user: int) -> Floats:
        """θ_i of every setting in own coordinates, or its average iterate: r_i × columns.

        (1/n)·Σ_{t<n} θ_t = θ_n − (1/n)·Σ_t t·(θ_t − θ_{t−1}).
        """
        theta = self._own_rows(self._theta, user)
        if self._average and self.round:
            theta = theta - self._own_rows(self._theta_moment, user) / self.round
        return theta

    def w(self, place: int) -> Vector:
        """w of one setting as a flat vector, or its average iterate."""
        return self._setting_vector(self._shared_w(), place)

    def theta(self, place: int, user: int) -> Vector:
        """θ_i of one setting and user as a flat vector, or its average iterate."""
        columns = self.population.basis(user) @ self._personal(user)
        return self._setting_vector(columns, place)

    def _setting_vector(self, columns: Floats, place: int) -> Vector:
        by_setting = columns.reshape(len(columns), -1, self.population.outputs)
        return by_setting[:, place].reshape(-1).astype(np.float64)

    def measure_users(self, part: str) -> tuple[dict[str, Floats], Vector]:
        """Each measure, measured users × settings, and the number of rows of each user."""
        if isinstance(self.population, FreshPopulation) or part not in self.population.parts:
            return {}, np.empty(0)
        rows = self.population.parts[part]
        parts = list(self.population.parts)
        place = 1 + parts.index(part)  # among a user's own coordinates
        found: dict[str, list[Vector]] = {}
        for user, common in rows.scores(self._shared_w(), SAMPLES_AT_ONCE):
            scores = common  # the user's rows × columns
            if self._has_theta:
                own = self.population.coordinates(user, self.dtype)[place]
                scores = common + own @ self._personal(user)
            by_setting = scores.reshape(len(scores), len(self.settings), -1)  # rows × settings × K
            measures = self.population.user_measures(part, user, by_setting)
            for name, values in measures.items():
                found.setdefault(name, []).append(values)
        by_user = {name: np.array(values) for name, values in found.items()}
        sizes = rows.sizes[rows.measured_users]
        return by_user, sizes.astype(np.float64)

    def measures(self, *, final: bool = False) -> dict[int, dict[str, float]]:
        """All measures of every setting that is still trained, by place; for fresh samples the
        excess risk, (1/N)·Σ_i ‖w + θ_i − θ_i*‖²_Σ."""
        if not isinstance(self.population, FreshPopulation):
            return super().measures(final=final)
        truth = self.population.problem
        w = self._shared_w()
        squares = np.zeros_like(w, np.float64)  # Σ_i (w + θ_i − θ_i*)², d × settings
        with np.errstate(all="ignore"):
            for user, optimum in enumerate(truth.optima):
                errors = w + self._personal(user) - optimum[:, None]
                squares += errors**2
            risks = truth.variances @ squares / len(self.population)
        return {place: {"excess_risk": float(risks[place])} for place in self.places}


def bytes_for(
    population: Population, settings: int, *, average: bool, dtype: DTypeLike = np.float64
) -> int:
    """About how much memory a ``LinearEngine`` takes, the data included.

    Args:
        population: everyone's data.
        settings: the number of settings side by side.
        average: whether average iterates are kept.
        dtype: the precision of w and θ.
    """
    columns = settings * population.outputs
    features = population.features
    size = population.batch_size
    w = features * columns
    theta = int(population.widths.sum()) * columns
    kept = w + theta
    if average:
        kept *= 2
    drawn = len(population) * size  # samples in a round, if everyone takes part
    samples = max(size, min(SAMPLES_AT_ONCE, drawn))
    work = samples * (5 * columns + 3 * features) + 3 * w
    return population.bytes + np.dtype(dtype).itemsize * (kept + work)
