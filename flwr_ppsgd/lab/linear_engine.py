"""The cohort engine for linear models: all users and many settings side by side.

Settings are columns: one product x V serves all of them. They share cohorts, minibatches and
standard normals (common random numbers), so that w_s = V_s − (s_w·z·C/D)_s·Σ_t n_t.

A user's gradient XᵀR lies in the span of the user's own rows, and so does θ_i. Everything personal
happens in *own coordinates*: an orthonormal basis of that span, of at most n_i directions. Lengths
are the same there, so the product that moves θ_i is also the one that is measured for clipping, and
nothing of size d is formed for each user. θ_i = (s_θ/m_i)·P_i: P_i is kept, the same for all α.

The same data, cohorts, minibatches and noise as on the other engines give the same w and θ, up to
rounding. Sums are taken in floating point, so what is added is *simulation noise*: ε is what a
deployment would have cost.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy import sparse
from scipy.linalg import get_blas_funcs

from flwr_ppsgd.algorithm import Vector, clip_scales
from flwr_ppsgd.checks import require
from flwr_ppsgd.lab.engine import Engine, Indices, Setting, State
from flwr_ppsgd.lab.learners import user_measures
from flwr_ppsgd.lab.measures import for_choosing, summary
from flwr_ppsgd.lab.schema import Task
from flwr_ppsgd.lab.synthetic import Synthetic
from flwr_ppsgd.learner import minibatch_rows
from flwr_ppsgd.models.linear import Loss, mean_losses, predict

DType: TypeAlias = np.dtype[Any]
Floats: TypeAlias = NDArray[Any]  # float32 or float64
Features: TypeAlias = Floats | sparse.csr_array
OwnPart: TypeAlias = tuple[Floats, slice, Floats]  # one user's X_i, which samples they are, P_i
Personal: TypeAlias = Callable[[int], Floats]  # θ_i in own coordinates, one column per output

SAMPLES_AT_ONCE = 2048  # in one product
LEAST_EIGENVALUE = 1e-14  # relative: smaller ones are rounding errors


@dataclass(frozen=True, eq=False)
class Batch:
    """The minibatches of some users, one after the other.

    Args:
        users: whose minibatches they are.
        counts: m_i, the number of samples of each user.
        x: samples × d.
        y: samples × K.
        own: for each user the same rows in own coordinates, m_i × r_i.
    """

    users: Indices
    counts: Indices
    x: Features
    y: Floats
    own: list[Floats]

    def slices(self) -> Iterator[tuple[int, slice, Floats]]:
        """(user, which samples are theirs, these in own coordinates) of each user."""
        ends = np.cumsum(self.counts).tolist()
        starts = [0, *ends[:-1]]
        for user, start, end, own in zip(self.users.tolist(), starts, ends, self.own, strict=True):
            yield user, slice(start, end), own


class Population(Protocol):
    """Everyone's data, as a linear engine sees them.

    ``features`` is d, ``outputs`` is K, ``batch_size`` the number of samples in a minibatch of a
    user who has that many, and ``counts`` are m_i. A user drops out after ``most_visits`` visits;
    None: never. ``widths`` are r_i, the number of own coordinates of each user, and ``bytes`` is
    the memory of all data.
    """

    features: int
    outputs: int
    batch_size: int
    loss: Loss
    most_visits: Indices | None
    counts: Indices
    widths: Indices

    @property
    def bytes(self) -> int: ...
    def __len__(self) -> int: ...

    def batch(self, users: Indices, visits: Indices, dtype: DType) -> Batch:
        """The minibatches of these users at these visits."""
        ...

    def basis(self, user: int) -> Floats:
        """Q_i: θ_i is Q_i times what it is in own coordinates, d × r_i."""
        ...

    def measures(
        self, w: Floats, personal: Personal | None, settings: int, *, final: bool
    ) -> dict[str, Vector]:
        """Each measure of every setting over all measured rows.

        Args:
            w: of every setting, d × columns.
            personal: θ_i of every setting; None if nobody has one.
            settings: their number.
            final: as of ``Engine.measures``.
        """
        ...

    def by_user(self, w: Floats, personal: Personal | None, settings: int) -> dict[str, Floats]:
        """Each measure, measured users × settings; empty if users are not measured one by one."""
        ...


class LinearEngine(Engine):
    """All settings of one cohort, one round at a time.

    Args:
        population: everyone's data.
        settings: they share the kind of cohort and M; clip norm, noise and steps are their own.
        seed: what ``insecure_seed`` is elsewhere; None draws secret coins, and no two runs are
            alike.
        average: keep the average iterates; ``w``, ``theta`` and measures are then those.
        dtype: float32 is about twice as fast; w and θ then have relative rounding errors of about
            1e-6.
    """

    def __init__(
        self,
        population: Population,
        settings: Sequence[Setting],
        *,
        seed: int | None,
        average: bool = False,
        dtype: DTypeLike = np.float64,
    ) -> None:
        super().__init__(len(population), settings, seed, population.most_visits)
        self.population = population
        self._dtype = np.dtype(dtype)
        self._average = average
        self._order = sorted(self.places, key=lambda place: settings[place].steps.publishes)
        self._take_over([settings[place] for place in self._order])
        self._starts = [0, *np.cumsum(population.widths).tolist()]
        # what a sum over a minibatch is multiplied by
        self._shares = np.ones(len(population))
        if self.reduction == "mean":
            self._shares = 1 / population.counts
        features = population.features
        outputs = population.outputs
        shared = (len(settings) - self._local) * outputs
        personal = (self._starts[-1], len(settings) * outputs)
        self._v: Floats = np.zeros((features, shared), self._dtype)
        self._noise: Floats = np.zeros((features, outputs), self._dtype)  # Σ_t n_t
        self._personal: Floats = np.zeros(personal, self._dtype)  # P_i of all users
        # sums over rounds, if averages are wanted
        self._v_sum = np.zeros_like(self._v[: features * average])
        self._noise_sum = np.zeros_like(self._noise)
        self._personal_sum = np.zeros_like(self._personal[: len(self._personal) * average])
        self._since = np.zeros(len(population), dtype=np.intp)  # the round up to which P_i counts

    def _take_over(self, settings: Sequence[Setting]) -> None:
        """The numbers of the settings, in the order of columns: those without a w come first."""
        self._local = sum(not setting.steps.publishes for setting in settings)
        shared = settings[self._local :]
        steps = np.array([setting.steps.shared for setting in shared])
        noise = np.array([setting.release.usual_noise_std for setting in shared])
        self._clip = np.array([setting.release.clip_norm for setting in shared])
        self._shared_step = steps / settings[0].release.denominator
        self._noise_step = (self._shared_step * noise).astype(self._dtype)
        self._noisy = bool(self._noise_step.any())
        personal = np.array([setting.steps.personal for setting in settings])
        self._personal_step = personal.astype(self._dtype)

    def column(self, place: int) -> int:
        """Where a setting stands in arrays over all settings."""
        return self._order.index(place)

    def advance(self) -> None:
        """One round of every setting."""
        users = self.next_cohort()
        if self._average:
            self._count_iterates(users)
        at_once = max(1, SAMPLES_AT_ONCE // self.population.batch_size)
        parts = [users[start : start + at_once] for start in range(0, len(users), at_once)]
        # V itself may change at once if nobody else's gradient is taken at it
        target = self._v if len(parts) == 1 else np.zeros_like(self._v)
        with np.errstate(all="ignore"):  # a step too large ends in infinity, not in a warning
            for part in parts:
                batch = self.population.batch(part, self.visits[part], self._dtype)
                self._step(batch, target)
            if target is not self._v:
                self._v += target
        if self._noisy:
            self._noise += self.normals(self._noise.size).reshape(self._noise.shape)

    def _step(self, batch: Batch, target: Floats) -> None:
        """P_i −= X_iᵀR_i, and target −= s_w·Σ_i clip(g_i, C)/D, for the users of one batch."""
        shares = self._shares[batch.users]
        own = [
            (rows, samples, self._own(self._personal, user))
            for user, samples, rows in batch.slices()
        ]
        residual = self._residual(batch, own, shares)  # samples × settings × K
        lengths = shares[:, None] * self._step_personal(own, residual)  # users × settings
        scales = clip_scales(lengths[:, self._local :], self._clip)
        factors = (scales * self._shared_step * shares[:, None]).astype(self._dtype)
        by_sample = np.repeat(factors, batch.counts, axis=0)
        clipped = residual[:, self._local :] * by_sample[:, :, None]
        subtract_product(target, batch.x, clipped.reshape(len(clipped), -1))

    def _residual(self, batch: Batch, own: Sequence[OwnPart], shares: Vector) -> Floats:
        """prediction − y at (w, θ_i): samples × settings × K."""
        samples, outputs = batch.y.shape
        columns = np.empty((samples, self._personal.shape[1]), self._dtype)
        for rows, own_samples, kept in own:
            np.matmul(rows, kept, out=columns[own_samples])
        scores = columns.reshape(samples, -1, outputs)
        by_sample = np.repeat(shares.astype(self._dtype), batch.counts)
        scores *= (by_sample[:, None] * self._personal_step)[:, :, None]
        shared = scores[:, self._local :]
        shared += np.asarray(batch.x @ self._v).reshape(shared.shape)
        if self._noisy:
            noise = np.asarray(batch.x @ self._noise)
            shared -= noise[:, None, :] * self._noise_step[:, None]
        residual = predict(scores, self.population.loss)
        residual -= batch.y[:, None, :]
        return residual

    def _step_personal(self, own: Sequence[OwnPart], residual: Floats) -> Vector:
        """P_i −= X_iᵀR_i in own coordinates; its length for every setting: users × settings."""
        columns = residual.reshape(len(residual), -1)
        squares = np.empty((len(own), columns.shape[1]), self._dtype)
        for square, (rows, own_samples, kept) in zip(squares, own, strict=True):
            gradient = rows.T @ columns[own_samples]
            np.einsum("rc,rc->c", gradient, gradient, out=square)
            kept -= gradient  # noqa: PLW2901 - in place
        by_setting = squares.reshape(len(own), len(self.settings), -1)
        return np.asarray(np.sqrt(by_setting.sum(axis=2, dtype=np.float64)))

    def _own(self, array: Floats, user: int) -> Floats:
        """The rows of one user's own coordinates."""
        return array[self._starts[user] : self._starts[user + 1]]

    def _count_iterates(self, users: Indices) -> None:
        """Add w_{t−1} to the sum of iterates, and each P_i once for every round since it moved."""
        self._v_sum += self._v
        self._noise_sum += self._noise
        self._count_personal(users, self.round)

    def _count_personal(self, users: Indices, until: int) -> None:
        for user in users.tolist():
            rounds = until - self._since[user]
            self._own(self._personal_sum, user)[...] += rounds * self._own(self._personal, user)
        self._since[users] = until

    def _shared(self) -> Floats:
        """V_s − (s_w·z·C/D)_s·Σ_t n_t of every setting, 0 for local learning: d × columns."""
        v, noise = self._v, self._noise
        if self._average and self.round:
            v, noise = self._v_sum / self.round, self._noise_sum / self.round
        features, outputs = noise.shape
        w = np.zeros((features, len(self.settings), outputs), self._dtype)
        shared = w[:, self._local :]
        np.multiply(noise[:, None, :], -self._noise_step[:, None], out=shared)
        shared += v.reshape(shared.shape)
        return w.reshape(features, -1)

    def _theta(self, user: int) -> Floats:
        """θ_i = (s_θ/m_i)·P_i of every setting in own coordinates, r_i × columns."""
        kept = self._own(self._personal, user)
        if self._average and self.round:
            self._count_personal(np.array([user]), self.round)
            kept = self._own(self._personal_sum, user) / self.round
        steps = self._personal_step * self._dtype.type(self._shares[user])
        return np.asarray(kept * np.repeat(steps, self.population.outputs))

    def w(self, place: int) -> Vector:
        """w of one setting, as a flat vector."""
        return self._column(self._shared(), place)

    def theta(self, place: int, user: int) -> Vector:
        """θ_i of one setting, as a flat vector."""
        return self._column(self.population.basis(user) @ self._theta(user), place)

    def _column(self, columns: Floats, place: int) -> Vector:
        own = columns.reshape(len(columns), len(self.settings), -1)[:, self.column(place)]
        return own.reshape(-1).astype(np.float64)

    def measures(self, *, final: bool = False) -> dict[int, dict[str, float]]:
        """All measures of every setting that is still trained, by place."""
        with np.errstate(all="ignore"):
            found = self.population.measures(
                self._shared(), self._theta, len(self.settings), final=final
            )
        return self.by_place(found)

    def by_user(self) -> dict[int, Vector]:
        """The main measure of each measured user, for every setting that is still trained."""
        with np.errstate(all="ignore"):
            found = self.population.by_user(self._shared(), self._theta, len(self.settings))
        return self.users_by_place(found)

    def changing(self) -> State:
        """The arrays that rounds change."""
        return {
            "v": self._v,
            "noise": self._noise,
            "personal": self._personal,
            "v-sum": self._v_sum,
            "noise-sum": self._noise_sum,
            "personal-sum": self._personal_sum,
            "since": self._since,
        }


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
    parameters = (population.features + int(population.widths.sum())) * columns
    samples = min(SAMPLES_AT_ONCE, len(population) * population.batch_size)
    samples = max(samples, population.batch_size)
    work = samples * (5 * columns + 3 * population.features) + 3 * population.features * columns
    numbers = parameters * (2 if average else 1) + work
    return population.bytes + np.dtype(dtype).itemsize * numbers


def subtract_product(target: Floats, x: Features, residual: Floats) -> None:
    """target −= xᵀ residual; of a sparse x, only the rows that have an entry are touched."""
    if isinstance(x, sparse.csr_array):
        columns = np.unique(x.indices)
        target[columns] -= np.asarray(x[:, columns].T @ residual)
    elif residual.size:  # by BLAS itself, in one pass over the target, which is contiguous
        gemm = get_blas_funcs("gemm", dtype=target.dtype)
        gemm(-1.0, residual.T, x.T, 1.0, target.T, trans_b=True, overwrite_c=True)


@dataclass(frozen=True, eq=False)
class MeasuredRows:
    """Rows on which users measure, sorted by user: user i has offsets[i] … offsets[i+1]−1."""

    x: Features
    y: Floats
    offsets: Indices

    @property
    def sizes(self) -> Indices:
        """The number of rows of each user."""
        return np.diff(self.offsets)

    @property
    def measured(self) -> Indices:
        """The users who have rows here."""
        return np.flatnonzero(self.sizes)

    def own(self, user: int) -> slice:
        """The rows of one user."""
        return slice(int(self.offsets[user]), int(self.offsets[user + 1]))

    def scores(self, w: Floats) -> Iterator[tuple[int, Floats]]:
        """(user, x w) of each measured user; several users share one product, which reads w
        once."""
        groups = 1 + int(self.offsets[-1]) // SAMPLES_AT_ONCE
        for group in np.array_split(self.measured, groups):
            users = group.tolist()
            if users:
                rows = slice(self.own(users[0]).start, self.own(users[-1]).stop)
                together = np.asarray(self.x[rows] @ w)
                ends = np.cumsum(self.sizes[group])
                yield from zip(users, np.split(together, ends[:-1]), strict=True)


@dataclass(frozen=True, eq=False)
class OwnCoordinates:
    """One user's rows in an orthonormal basis of their span.

    Args:
        rows: the training rows, n × r.
        parts: the rows of each part on which the user measures, rows × r.
    """

    rows: Floats
    parts: list[Floats]


class Table:
    """Finitely many samples, one row each, sorted by user.

    Args:
        x: rows × d, an array or a sparse matrix.
        y: rows × K, real targets or one-hot rows.
        users: N + 1 offsets; user i has the rows users[i] … users[i+1]−1.
        batch_size: the number of rows in a minibatch, of a user who has that many.
        seed: decides which rows each user draws at each visit.
        loss: what predictions are compared with targets by.
        test: x, y and offsets of the rows on which users measure; None if nobody measures.
        validation: the same of the rows on which settings are compared; None: on test rows.
        task: decides what users measure; None is classification if there is more than one output,
            and otherwise the loss alone.
        most_visits: the number of visits after which each user drops out; None: never.
        units: of each user's targets, in the units of RMSE; None: 1.
    """

    def __init__(
        self,
        x: Features,
        y: Floats,
        users: ArrayLike,
        *,
        batch_size: int,
        seed: int,
        loss: Loss = "squared",
        test: tuple[Features, Floats, ArrayLike] | None = None,
        validation: tuple[Features, Floats, ArrayLike] | None = None,
        task: Task | None = None,
        most_visits: Indices | None = None,
        units: Vector | None = None,
    ) -> None:
        self.x = sparse.csr_array(x) if sparse.issparse(x) else x
        self.y = y.reshape(len(y), -1)
        self.offsets: Indices = np.asarray(users, dtype=np.intp)
        self.sizes: Indices = np.diff(self.offsets)
        _check_offsets(self.offsets, len(self.y))
        self.features = int(self.x.shape[1])
        self.outputs = int(self.y.shape[1])
        self.batch_size = batch_size
        self.seed = seed
        self.loss = loss
        self.task = task
        self.most_visits = most_visits
        self.units = np.ones(len(self.sizes)) if units is None else units
        self.counts = np.minimum(self.sizes, batch_size)
        self.widths = np.minimum(self.sizes, self.features)
        self.parts = {
            name: MeasuredRows(part[0], part[1], np.asarray(part[2], dtype=np.intp))
            for name, part in (("test", test), ("validation", validation))
            if part is not None
        }
        self._coordinates: dict[tuple[int, DType], OwnCoordinates] = {}

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        """Of the rows, and of the same rows in own coordinates."""
        given = [self.x, self.y]
        own = int((self.sizes * self.widths).sum()) * 8
        for part in self.parts.values():
            given += [part.x, part.y]
            own += int((part.sizes * self.widths).sum()) * 8
        return sum(_bytes(array) for array in given) + own

    def own(self, user: int) -> Features:
        """All rows of one user."""
        return self.x[self.offsets[user] : self.offsets[user + 1]]

    def basis(self, user: int) -> Floats:
        """Q_i: θ_i is Q_i times what it is in own coordinates, d × r_i."""
        own = _dense(self.own(user)).astype(np.float64)
        if len(own) >= self.features:
            return np.eye(self.features)
        return own.T @ _inverse_root(own @ own.T)

    def coordinates(self, user: int, dtype: DType) -> OwnCoordinates:
        """One user's rows in own coordinates, worked out once."""
        key = (user, dtype)
        if key not in self._coordinates:
            self._coordinates[key] = self._new_coordinates(user, dtype)
        return self._coordinates[key]

    def _new_coordinates(self, user: int, dtype: DType) -> OwnCoordinates:
        """X Q of all rows. If the user has fewer rows than columns, Q = XᵀB with B of
        ``_inverse_root``, and only products of rows with rows are formed."""
        own = self.own(user)
        rows = [own, *(part.x[part.own(user)] for part in self.parts.values())]
        if own.shape[0] >= self.features:
            seen = [_dense(some) for some in rows]
        else:
            products = [_dense(some.astype(np.float64) @ own.T) for some in rows]
            root = _inverse_root(products[0])
            seen = [product @ root for product in products]
        first, *parts = (some.astype(dtype) for some in seen)
        return OwnCoordinates(first, parts)

    def batch(self, users: Indices, visits: Indices, dtype: DType) -> Batch:
        """The minibatches of these users at these visits."""
        drawn = []
        own = []
        for user, visit in zip(users.tolist(), visits.tolist(), strict=True):
            rows = minibatch_rows(self.seed, user, visit, int(self.sizes[user]), self.batch_size)
            drawn.append(self.offsets[user] + rows)
            own.append(self.coordinates(user, dtype).rows.take(rows, axis=0))
        rows = np.concatenate([*drawn, np.zeros(0, np.intp)])
        x = self.x[rows].astype(dtype, copy=False)
        y = self.y[rows].astype(dtype, copy=False)
        return Batch(users, self.counts[users], x, y, own)

    def measures(
        self, w: Floats, personal: Personal | None, settings: int, *, final: bool
    ) -> dict[str, Vector]:
        """On the users' validation rows, or test rows: over all rows, and the spread over users."""
        found: dict[str, Vector] = {}
        if "validation" in self.parts:
            found = for_choosing(self._summary("validation", w, personal, settings))
        if "test" in self.parts and (final or not found):
            found |= self._summary("test", w, personal, settings)
        return found

    def _summary(
        self, name: str, w: Floats, personal: Personal | None, settings: int
    ) -> dict[str, Vector]:
        part = self.parts[name]
        weights = part.sizes[part.measured].astype(np.float64)
        return summary(self._by_user(name, w, personal, settings), weights)

    def by_user(self, w: Floats, personal: Personal | None, settings: int) -> dict[str, Floats]:
        """Each measure on test rows, measured users × settings."""
        return self._by_user("test", w, personal, settings) if "test" in self.parts else {}

    def _by_user(
        self, name: str, w: Floats, personal: Personal | None, settings: int
    ) -> dict[str, Floats]:
        found: dict[str, list[Vector]] = {}
        place = list(self.parts).index(name)
        for user, shared in self.parts[name].scores(w):
            scores = shared
            if personal is not None:
                scores = shared + self.coordinates(user, w.dtype).parts[place] @ personal(user)
            by_setting = scores.reshape(len(scores), settings, -1)  # rows × settings × K
            for measure, values in self.user_measures(by_setting, name, user).items():
                found.setdefault(measure, []).append(values)
        return {measure: np.array(values) for measure, values in found.items()}

    def user_measures(self, scores: Floats, name: str, user: int) -> dict[str, Vector]:
        """What one user measures on the part of that name: scores are rows × settings × K."""
        part = self.parts[name]
        y = part.y[part.own(user)]
        if self.task is None and y.shape[1] == 1:
            return {"loss": mean_losses(scores, y[:, None, :], self.loss)}
        task = self.task or "classification"
        return user_measures(scores, y, self.loss, task, unit=float(self.units[user]))


def _inverse_root(gram: Floats) -> Floats:
    """B with B BᵀK = projection on the range of K = XXᵀ: XᵀB is an orthonormal basis of the rows.

    Directions whose eigenvalue is a rounding error become zero columns.
    """
    values, vectors = np.linalg.eigh(gram)
    kept = values > LEAST_EIGENVALUE * max(values[-1], np.finfo(np.float64).tiny)
    scales = np.zeros_like(values)
    scales[kept] = 1 / np.sqrt(values[kept])
    return np.asarray(vectors * scales)


def _check_offsets(offsets: Indices, rows: int) -> None:
    """ValueError unless every user has at least one row, and every row belongs to a user."""
    sizes = np.diff(offsets)
    fewest = int(sizes.min()) if len(sizes) else 0
    rule = "every user needs at least one row"
    require(fewest >= 1, rule, fewest, "leave out users without rows")
    ends = (int(offsets[0]), int(offsets[-1]))
    rule = f"the offsets of users must go from 0 to {rows}, the number of rows"
    require(ends == (0, rows), rule, ends, "give N + 1 offsets for N users")


def _dense(x: Features) -> Floats:
    return np.asarray(x.toarray() if isinstance(x, sparse.csr_array) else x)


def _bytes(x: Features) -> int:
    if isinstance(x, sparse.csr_array):
        return int(x.data.nbytes + x.indices.nbytes + x.indptr.nbytes)
    return int(x.nbytes)


class Fresh:
    """The synthetic problem: every minibatch is new, and the excess risk has a closed form.

    There is no end to a user's rows: own coordinates are the features themselves.

    Args:
        problem: the optimum of each user, and how samples are drawn.
        batch_size: the number of samples in a minibatch.
    """

    outputs = 1
    loss: Loss = "squared"
    most_visits: Indices | None = None

    def __init__(self, problem: Synthetic, batch_size: int) -> None:
        self.problem = problem
        self.batch_size = batch_size
        self.features = problem.optima.shape[1]
        self.counts = np.full(len(problem.optima), batch_size)
        self.widths = np.full(len(problem.optima), self.features)
        self.bytes = int(problem.optima.nbytes)

    def __len__(self) -> int:
        return len(self.problem.optima)

    def batch(self, users: Indices, visits: Indices, dtype: DType) -> Batch:
        """Samples that nobody has drawn before."""
        drawn_x, drawn_y = self.problem.batches(users, visits, self.batch_size)
        x = drawn_x.astype(dtype, copy=False)  # users × m × d
        y = drawn_y.astype(dtype, copy=False)  # users × m × 1
        return Batch(
            users, self.counts[users], x.reshape(-1, self.features), y.reshape(-1, 1), list(x)
        )

    def basis(self, user: int) -> Floats:  # noqa: ARG002 - it is everybody's
        """The features themselves."""
        return np.eye(self.features)

    def measures(
        self,
        w: Floats,
        personal: Personal | None,
        settings: int,
        *,
        final: bool,  # noqa: ARG002
    ) -> dict[str, Vector]:
        """(1/N)·Σ_i ‖w + θ_i − θ_i*‖²_Σ."""
        squares = np.zeros((self.features, settings))
        for user, optimum in enumerate(self.problem.optima):
            distance = w - optimum[:, None]
            if personal is not None:
                distance += personal(user)
            squares += distance**2
        return {"excess_risk": self.problem.variances @ squares / len(self)}

    def by_user(
        self,
        w: Floats,  # noqa: ARG002
        personal: Personal | None,  # noqa: ARG002
        settings: int,  # noqa: ARG002
    ) -> dict[str, Floats]:
        """Nothing: here users differ by chance alone."""
        return {}
