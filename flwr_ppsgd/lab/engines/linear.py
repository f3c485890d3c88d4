"""The cohort engine for linear models: whole cohorts, and many settings side by side, as a few
matrix products.

Nothing of size d×K is formed for each user. ‖XᵀR‖² = ⟨R Rᵀ, X Xᵀ⟩, so the norms for clipping come
from m×m Gram blocks, and Σ_i clip(X_iᵀR_i) is one product Xᵀ(cR) over the stacked cohort. Settings
are columns, so that one product serves all of them. They share cohorts, minibatches and standard
normals (common random numbers): w_s = V_s − (s_w·z·C/D)_s·Σ_t n_t, and Σ_t n_t is the same for all.

The same data, cohorts, minibatches and noise as on the other engines give the same w and θ, up to
the rounding of float64. This engine sums in floating point, so what it adds is *simulation noise*:
ε is what a deployment would have cost.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import DTypeLike

from flwr_ppsgd.algorithm import Steps, Vector, clip_scales
from flwr_ppsgd.lab.engines.ahead import Ahead
from flwr_ppsgd.lab.engines.batches import (
    Batch,
    ByFeature,
    Floats,
    Indices,
    MeasuredRows,
    Population,
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
from flwr_ppsgd.lab.engines.thetas import (
    Columns,
    Kind,
    cheapest,
    costs,
    kept_columns,
    subtract_product,
    thetas,
)
from flwr_ppsgd.models.linear import Matrix, predict

ROWS_AT_ONCE = 128  # at least this number of samples goes into one product
NUMBERS_AT_ONCE = 1 << 18  # more samples only while their numbers stay in the cache
FOLDED = 4  # up to this number of settings, noise is added to each setting by itself

# below this share of its bound, a squared norm from a Gram block has lost too many digits
CANCELLED = 1e-6

# the attributes, less their underscore, that every round changes; also their names in ``state``
CHANGING = ("v", "noise", "v_sum", "noise_sum", "visits", "since")

# which parameters a setting trains; settings are ordered by it
LOCAL = 0  # θ only
BOTH = 1
GLOBAL = 2  # w only


class CohortEngine:
    """All settings of one cohort, one round at a time.

    Args:
        population: everyone's data.
        settings: they share the kind of cohort and M; clip norm, noise and steps are their own.
        seed: what ``insecure_seed`` is elsewhere; None draws secret coins, and no two runs are
            alike.
        rounds: the planned number of rounds, by which the cheaper way to keep θ is chosen.
        average: also keep the average iterates; ``shared``, ``theta`` and measures are then those.
        dtype: float32 is about twice as fast; w and θ then carry relative rounding errors of about
            1e-6.
        kind: the way to keep θ; None chooses the one with less work.
    """

    def __init__(
        self,
        population: Population,
        settings: Sequence[Setting],
        *,
        seed: int | None,
        rounds: int = 1,
        average: bool = False,
        dtype: DTypeLike = np.float64,
        kind: Kind | None = None,
    ) -> None:
        check_alike(len(population), settings)
        self.population = population
        self.cohort = settings[0].release.cohort
        self.reduction = settings[0].release.reduction
        self.dtype = np.dtype(dtype)
        self.round = 0
        self._ahead = Ahead(population, self.cohort, seed, self.dtype)
        self._average = average
        self._visits = np.zeros(len(population), dtype=np.intp)
        # the round up to which each user's average θ is counted
        self._since = np.zeros(len(population), dtype=np.intp)
        self._arrange(settings)
        self._make_thetas(kind, rounds)
        self._make_shared()

    def _arrange(self, settings: Sequence[Setting]) -> None:
        """Order the settings as local, both, global: those with a w are then adjacent, and those
        with a θ are, too."""
        places = range(len(settings))
        self.places = sorted(places, key=lambda place: _block(settings[place].steps))
        self._set(dict(enumerate(settings)))

    def _set(self, settings: Mapping[int, Setting]) -> None:
        """Take over the numbers of the settings at ``places``, one for each column block."""
        self.settings = [settings[place] for place in self.places]
        blocks = [_block(setting.steps) for setting in self.settings]
        self._local = blocks.count(LOCAL)
        self._personal = len(blocks) - blocks.count(GLOBAL)
        shared = self.settings[self._local :]
        personal = self.settings[: self._personal]
        self._clip = np.array([setting.release.clip_norm for setting in shared])
        self._shared_step = np.array([_shared_step(setting) for setting in shared])
        self._noise_step = np.array([_noise_step(setting) for setting in shared])
        self._noisy = bool(self._noise_step.any())
        self._personal_step = np.array([setting.steps.personal for setting in personal])

    def _make_thetas(self, kind: Kind | None, rounds: int) -> None:
        columns = self._personal * self.population.outputs
        visits = self.cohort.rate * len(self.population) * rounds
        self.kind = kind or cheapest(self.population, columns, visits)
        self._thetas = thetas(
            self.kind,
            self.population,
            columns,
            self.dtype,
            self._average,
        )

    def _make_shared(self) -> None:
        """V of all settings that have a w, and Σ_t n_t; each with its sum over rounds if averages
        are wanted."""
        features = self.population.features
        outputs = self.population.outputs
        shared = len(self.settings) - self._local
        columns = shared * outputs
        summed = features if self._average else 0
        self._folds = shared <= FOLDED
        self._v: Columns = np.zeros((features, columns), self.dtype)
        self._noise: Columns = np.zeros((features, outputs), self.dtype)  # Σ_t n_t
        self._v_sum: Columns = np.zeros((summed, columns), self.dtype)
        self._noise_sum = np.zeros_like(self._noise)

    def advance(self) -> None:
        """One round of every setting."""
        self.round += 1
        size = self._users_at_once()
        drawn = self._ahead.round(self.round, self._visits, size, noisy=self._noisy)
        self._visits[drawn.users] = drawn.visits
        if self._average:
            self._count_standing(drawn.users)
        with np.errstate(all="ignore"):  # a step too large ends in infinity, not in a warning
            self._step_all(self._ahead.batches(drawn, size), one=len(drawn.users) <= size)
        if self._noisy:
            self._add_noise(drawn.normals.reshape(self._noise.shape))

    def _users_at_once(self) -> int:
        columns = len(self.settings) * self.population.outputs
        return users_at_once(self.population, columns, self.kind)

    def _step_all(self, batches: Iterable[Batch], *, one: bool) -> None:
        """Move V and θ_i by the clipped gradients of a cohort, all of them at the same V.

        If all of it is in ``one`` batch, V itself can be changed at once.
        """
        target = self._v if one else np.zeros_like(self._v)
        for batch in batches:
            self._step(batch, target)
        if not one:
            self._v += target

    def _add_noise(self, normals: Matrix) -> None:
        """Add normals to Σ_t n_t, or with few settings to V itself: that saves a product in every
        round."""
        if not self._folds:
            self._noise += normals
            return
        features, outputs = normals.shape
        by_setting = self._v.reshape(features, -1, outputs)
        by_setting -= self._noise_step[:, None] * normals[:, None, :]

    def _step(self, batch: Batch, target: Columns) -> None:
        """Subtract s_w·Σ_i clip(g_i, C)/D from ``target`` and move θ_i, for the users of one
        batch."""
        residual = self._residual(batch)  # users × m × settings × K
        share = self._share(batch)
        if self._clip.size:
            shared = residual[:, :, self._local :]
            self._step_shared(batch, shared, share, target)
        if self._personal_step.size:
            personal = residual[:, :, : self._personal]
            self._step_personal(batch, personal, share)

    def _share(self, batch: Batch) -> Vector:
        """What each user's sum over samples is multiplied by."""
        if self.reduction == "mean":
            return np.asarray(1.0 / batch.counts)
        return np.ones(len(batch.counts))

    def _step_shared(
        self,
        batch: Batch,
        residual: Floats,
        share: Vector,
        target: Columns,
    ) -> None:
        """target −= s_w·Σ_i clip(g_i, C)/D."""
        users, m, _, _ = residual.shape
        lengths = self._lengths(batch, residual, share)
        scales = clip_scales(lengths, self._clip)
        factors = scales * share[:, None] * self._shared_step
        clipped = scaled(residual, factors.astype(self.dtype, copy=False))
        samples = users * m
        subtract_product(target, batch.by_feature, clipped.reshape(samples, -1))

    def _step_personal(self, batch: Batch, residual: Floats, share: Vector) -> None:
        """θ_i −= s_θ·g_i."""
        users, m, _, _ = residual.shape
        factors = share[:, None] * self._personal_step
        moved = scaled(residual, factors.astype(self.dtype, copy=False))
        self._thetas.step(batch, moved.reshape(users, m, -1))

    def _residual(self, batch: Batch) -> Floats:
        """prediction − y at (w, θ_i): users × m × settings × K."""
        users, m, outputs = batch.y.shape
        samples = users * m
        settings = len(self.settings)
        scores = self._shared_scores(batch.by_feature)  # samples × settings × K
        if self._personal_step.size:
            personal = self._thetas.scores(batch)  # users × m × columns
            scores[:, : self._personal] += personal.reshape(samples, -1, outputs)
        by_user = scores.reshape(users, m, settings, outputs)
        residual = predict(by_user, self.population.loss)
        residual -= batch.y[:, :, None, :]
        return residual

    def _shared_scores(self, x: ByFeature) -> Floats:
        """x w of every setting, 0 for local learning: samples × settings × K."""
        samples = x.shape[0]
        outputs = self.population.outputs
        product = np.asarray(x @ self._v)
        shared = product.reshape(samples, len(self._clip), outputs)
        if self._noisy and not self._folds:
            noise = np.asarray(x @ self._noise)
            steps = self._noise_step[:, None].astype(self.dtype)
            shared -= noise[:, None, :] * steps
        if not self._local:
            return shared
        scores = np.zeros((samples, len(self.settings), outputs), self.dtype)
        scores[:, self._local :] = shared
        return scores

    def _lengths(self, batch: Batch, residual: Floats, share: Vector) -> Vector:
        """‖g_i‖ with g_i = share_i·X_iᵀR_i, from ‖X_iᵀR_i‖² = ⟨R_i R_iᵀ, X_i X_iᵀ⟩: users ×
        settings.

        If that has cancelled, and the vector could be long enough to be clipped, the norm comes
        from the product itself.
        """
        gram = self._thetas.gram(batch)  # users × m × m
        squares = squared_norms(gram, residual)
        traces = gram.trace(axis1=1, axis2=2)
        bounds = traces[:, None] * _inner(residual, residual)
        share = share[:, None]
        cancelled = squares < CANCELLED * bounds
        if np.count_nonzero(cancelled):
            cancelled &= share**2 * bounds > self._clip**2
            for user, setting in np.argwhere(cancelled):
                own = residual[user, :, setting]
                squares[user, setting] = _square_by_product(batch, user, own)
        return share * np.sqrt(np.maximum(squares, 0.0))

    def _count_standing(self, users: Indices) -> None:
        """Add w_{t−1} to the sum of iterates, and each θ_i once for every round since it moved."""
        self._v_sum += self._v
        self._noise_sum += self._noise
        self._stand(users, self.round)

    def _stand(self, users: Indices, until: int) -> None:
        self._thetas.stand(users, until - self._since[users])
        self._since[users] = until

    def shared(self) -> Columns:
        """w of every setting, in the order of ``settings``: d × columns."""
        if self._average and self.round:
            return self._w_of(self._v_sum, self._noise_sum) / self.round
        return self._w_of(self._v, self._noise)

    def _w_of(self, v: Columns, noise: Columns) -> Columns:
        """V_s − (s_w·z·C/D)_s·Σ_t n_t, and 0 for local learning: d × columns."""
        d, outputs = noise.shape
        shape = (d, len(self.settings), outputs)
        w = np.zeros(shape, self.dtype)
        shared = w[:, self._local :]  # d × settings × K
        steps = self._noise_step[:, None].astype(self.dtype)
        np.multiply(noise[:, None, :], steps, out=shared)
        np.subtract(v.reshape(shared.shape), shared, out=shared)
        return w.reshape(d, -1)

    def add_personal(self, user: int, out: Columns) -> None:
        """out += θ_i of every setting, d × columns."""
        theta = self._thetas.theta(user, self._averaged_over())
        out[:, : theta.shape[1]] += theta

    def add_personal_scores(self, user: int, part: MeasuredRows, out: Columns) -> None:
        """out += x θ_i of every setting, for the user's rows x of a part."""
        scores = self._thetas.part_scores(user, part, self._averaged_over())
        out[:, : scores.shape[1]] += scores

    def _averaged_over(self) -> int:
        return self.round if self._average else 0

    def w(self, place: int) -> Vector:
        """w of one setting, as the flat vector of other engines."""
        return self._column(self.shared(), place)

    def theta(self, place: int, user: int) -> Vector:
        """θ_i of one setting and user."""
        self._settle()
        columns = len(self.settings) * self.population.outputs
        out = np.zeros((self.population.features, columns), self.dtype)
        self.add_personal(user, out)
        return self._column(out, place)

    def _column(self, columns: Columns, place: int) -> Vector:
        at = self.places.index(place)
        shape = (self.population.features, len(self.settings), -1)
        own = columns.reshape(shape)[:, at]  # d × K
        return own.reshape(-1).astype(np.float64)

    def _settle(self) -> None:
        """Count every θ_i up to this round, if averages are wanted."""
        if self._average:
            everyone = np.arange(len(self.population))
            self._stand(everyone, self.round)

    def measures(self, *, final: bool = False) -> dict[int, dict[str, float]]:
        """All measures of every setting that is still trained, by place."""
        self._settle()
        with np.errstate(all="ignore"):
            found = self.population.measures(self, len(self.settings), final=final)
        return rows_by_place(self.places, found)

    def by_user(self) -> dict[int, Vector]:
        """The main measure of each measured user, for every setting that is still trained."""
        self._settle()
        with np.errstate(all="ignore"):
            found = self.population.by_user(self, len(self.settings))
        return users_by_place(self.places, found)

    def state(self) -> State:
        """Everything that training has changed."""
        arrays = {name: getattr(self, f"_{name}") for name in CHANGING}
        return {**arrays, **self._thetas.state(), **progress(self)}

    def restore(self, state: State) -> None:
        """Continue from ``state``, which comes from an engine made with the same arguments."""
        self.drop(dropped_since(self, state))
        self.round = int(state["round"])
        self._ahead.forget()
        for name in CHANGING:
            array = getattr(self, f"_{name}")
            array[...] = state[name]
        self._thetas.restore(state)

    def drop(self, gone: set[int]) -> None:
        """Stop training the settings at these places."""
        outputs = self.population.outputs
        kept = [at for at, place in enumerate(self.places) if place not in gone]
        personal = [at for at in kept if at < self._personal]
        shared = [at - self._local for at in kept if at >= self._local]
        self._thetas.keep(_columns(personal, outputs))
        shared_columns = _columns(shared, outputs)
        self._v = kept_columns(self._v, shared_columns)
        self._v_sum = kept_columns(self._v_sum, shared_columns)
        before = dict(zip(self.places, self.settings, strict=True))
        self.places = [self.places[at] for at in kept]
        self._set(before)


def bytes_for(
    population: Population,
    settings: int,
    *,
    rounds: int,
    rate: float,
    average: bool,
    dtype: DTypeLike = np.float64,
) -> int:
    """About how much memory a ``CohortEngine`` takes, the data included.

    Args:
        population: everyone's data.
        settings: the number of settings side by side.
        rounds: the planned number of rounds.
        rate: the expected share of users in a cohort.
        average: whether average iterates are kept.
        dtype: the precision of w and θ.
    """
    d = population.features
    columns = settings * population.outputs
    visits = rate * len(population) * rounds
    kind = cheapest(population, columns, visits)
    cost = costs(population, columns, visits)[kind]
    users = min(users_at_once(population, columns, kind), len(population))
    rows = users * population.batch_size
    residuals = 6 * rows * columns
    samples = 3 * rows * d
    shared = 3 * d * columns
    copies = 2 if average else 1
    parameters = columns * copies * (cost.numbers + d)
    numbers = cost.fixed + parameters + residuals + samples + shared
    return population.bytes + np.dtype(dtype).itemsize * numbers


def users_at_once(population: Population, columns: int, kind: Kind) -> int:
    """The number of users in one product.

    Few enough for the cache, and enough for a matrix product. Also at least d/m, since every
    further product costs one pass over an array of the size of V.
    """
    m = population.batch_size
    d = population.features
    numbers_per_user = m * columns
    if kind == "direct":
        numbers_per_user += d * columns
    in_cache = NUMBERS_AT_ONCE // max(1, numbers_per_user)
    return max(d // m, ROWS_AT_ONCE // m, in_cache, 1)


def scaled(residual: Floats, factors: Floats) -> Floats:
    """Residuals (users × m × settings × K), each times the factor of its user and setting."""
    return residual * factors[:, None, :, None]


def squared_norms(gram: Floats, residual: Floats) -> Floats:
    """⟨R_i R_iᵀ, X_i X_iᵀ⟩ = ‖X_iᵀR_i‖²: users × settings.

    Args:
        gram: X_i X_iᵀ, users × m × m.
        residual: R_i, users × m × settings × K.
    """
    users, m, _, _ = residual.shape
    columns = residual.reshape(users, m, -1)
    product = np.matmul(gram, columns)
    return _inner(residual, product.reshape(residual.shape))


def _square_by_product(batch: Batch, user: int, residual: Floats) -> float:
    """‖X_iᵀR_i‖² of one setting, R_i being m × K."""
    m = len(residual)
    start = user * m
    own = batch.flat[start : start + m]
    gradient = np.asarray(own.T @ residual)
    return float(np.sum(gradient**2))


def _inner(left: Floats, right: Floats) -> Vector:
    """Σ over samples and outputs: users × settings."""
    return np.asarray(np.einsum("umsk,umsk->us", left, right))


def _columns(settings: Sequence[int], outputs: int) -> Indices:
    """The columns of these settings."""
    firsts = np.asarray(settings, dtype=np.intp) * outputs
    columns = firsts[:, None] + np.arange(outputs)
    return columns.reshape(-1)


def _shared_step(setting: Setting) -> float:
    """s_w/D."""
    return setting.steps.shared / setting.release.denominator


def _noise_step(setting: Setting) -> float:
    """s_w·z·C/D."""
    release = setting.release
    return setting.steps.shared * release.usual_noise_std / release.denominator


def _block(steps: Steps) -> int:
    if not steps.publishes:
        return LOCAL
    if steps.personal == 0:
        return GLOBAL
    return BOTH
