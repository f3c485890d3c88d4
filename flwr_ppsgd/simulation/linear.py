"""Whole cohorts, and many settings side by side, as a few matrix products: the cohort engine for linear models.

Nothing of a user's own of size d×K is formed. ‖XᵀR‖² = ⟨R Rᵀ, X Xᵀ⟩, so norms to clip come from m×m Gram blocks, and
Σ_i clip(X_iᵀR_i) is one product Xᵀ(cR) over the stacked cohort. Settings are columns, so that one product serves all.
They share cohorts, minibatches and standard normals (common random numbers): w_s = V_s − (s_w·z·C/D)_s·Σ_t n_t, and
Σ_t n_t is the same for all.

The same data, cohorts, minibatches and noise as on the other engines give the same w and θ, up to the rounding of
float64. It sums in floating point, so what it adds is *simulation noise*: ε is what a deployment would have cost.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from flwr_ppsgd.algorithm import Release, Steps, Vector, clip_scales
from flwr_ppsgd.models.split import predict
from flwr_ppsgd.noise import Coins
from flwr_ppsgd.simulation.batches import Batch, Features, Indices, Population, Scratch, drawn
from flwr_ppsgd.simulation.measures import measure_of
from flwr_ppsgd.simulation.thetas import Columns, Kind, cheapest, costs, kept_columns, subtract_product, thetas

ROWS_AT_ONCE = 128  # at least so many samples go into one product
NUMBERS_AT_ONCE = 1 << 18  # beyond that, so many that a part of the cohort stays in the cache
FOLDED = 4  # so few settings take their noise one by one
DIVERGED = 1e10  # a measure so many times its first value has left for infinity
CHANGING = ("v", "noise", "v_sum", "noise_sum", "visits", "since")  # arrays that every round changes
CANCELLED = 1e-6  # below this share of its bound, a squared norm from a Gram block has lost too many digits


State: TypeAlias = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Setting:
    """One training: what is released, and how far both blocks of parameters move."""

    release: Release
    steps: Steps


def coins_of(seed: int | None) -> Callable[[str, int], Coins]:
    """The coins of each purpose and round, as of every other engine; secret ones where there is no seed."""
    return lambda purpose, round_: Coins.secret() if seed is None else Coins.insecure(seed, purpose, round_)


class CohortEngine:
    """All settings of one cohort, one round at a time.

    settings: they share the kind of cohort and M; clip norm, noise and steps are their own.
    seed: as ``insecure_seed`` elsewhere; None draws secret coins, and no two runs are alike.
    rounds: how many are planned, by which the cheaper way to keep θ is chosen. kind: or chosen by hand.
    average: also keep the average iterates; ``shared``, ``theta`` and measures are then those.
    dtype: float32 is about twice as fast; w and θ then carry rounding errors of about 1e-6 relative.
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
        self.cohort, self.reduction = settings[0].release.cohort, settings[0].release.reduction
        check_alike(len(population), settings)
        self.population, self.dtype = population, np.dtype(dtype)
        self.places = sorted(range(len(settings)), key=lambda place: _block(settings[place].steps))
        self._set(dict(enumerate(settings)))
        self._draw, self._average, self.round = coins_of(seed), average, 0
        self._visits = np.zeros(len(population), dtype=np.intp)
        self._since = np.zeros(len(population), dtype=np.intp)  # the round up to which θ's average is counted
        outputs = population.outputs
        columns, visits = self._personal * outputs, self.cohort.rate * len(population) * rounds
        self.kind = kind or cheapest(population, columns, visits)
        self._thetas = thetas(self.kind, population, columns, self.dtype, average)
        shape = (population.features, (len(settings) - self._local) * outputs)
        self._v: Columns = np.zeros(shape, self.dtype)
        self._noise: Columns = np.zeros((population.features, outputs), self.dtype)  # Σ_t n_t
        self._scratch = Scratch()
        self._folds = len(settings) - self._local <= FOLDED
        self._v_sum = np.zeros_like(self._v if average else self._v[:0])
        self._noise_sum = np.zeros_like(self._noise)

    def _set(self, settings: Mapping[int, Setting]) -> None:
        """Columns in the order: local (no w), both, global (no θ); so that each block's columns are adjacent."""
        self.settings = ordered = [settings[place] for place in self.places]
        self._local = sum(not s.steps.publishes for s in ordered)
        self._personal = sum(_block(s.steps) < 2 for s in ordered)
        shared, personal = ordered[self._local :], ordered[: self._personal]
        self._clip = np.array([s.release.clip_norm for s in shared])
        self._shared_step = np.array([s.steps.shared / s.release.denominator for s in shared])
        self._noise_step = np.array([s.steps.shared * s.release.noise_std / s.release.denominator for s in shared])
        self._noisy = bool(self._noise_step.any())
        self._personal_step = np.array([s.steps.personal for s in personal])

    def advance(self) -> None:
        """One round of every setting."""
        self.round += 1
        uniforms = self._draw("cohort", self.round).uniforms(len(self.population))
        users = drawn(self.cohort, uniforms, self._visits, self.population.most_visits)
        self._visits[users] += 1
        if self._average:
            self._count_standing(users)
        with np.errstate(all="ignore"):  # a step too large ends in infinity, not in a warning
            parts = self._parts(users)
            target = self._v if len(parts) == 1 else np.zeros_like(self._v)
            for part in parts:
                self._step(self.population.batch(part, self._visits[part], self.dtype, self._scratch), target)
            if len(parts) > 1:
                self._v += target
        if self._noisy:
            self._add_noise(self._draw("noise", self.round).normals(self._noise.size).reshape(self._noise.shape))

    def _add_noise(self, normals: NDArray[np.float64]) -> None:
        """To Σ_t n_t, or where settings are few to V itself: that saves a product in every round."""
        if self._folds:
            for at, step in enumerate(self._noise_step):
                columns = slice(at * self.population.outputs, (at + 1) * self.population.outputs)
                self._v[:, columns] -= step * normals
        else:
            self._noise += normals

    def _parts(self, users: Indices) -> list[Indices]:
        """The cohort in parts small enough for the cache and large enough for a matrix product."""
        size = users_at_once(self.population, len(self.settings) * self.population.outputs, self.kind)
        return [users[start : start + size] for start in range(0, len(users), size)]

    def _step(self, batch: Batch, target: Columns) -> None:
        """Subtract s_w·Σ_i clip(g_i, C)/D from ``target`` and move θ_i, for the users of one batch."""
        residual = self._residual(batch)
        share = 1.0 / batch.counts if self.reduction == "mean" else np.ones(len(batch.counts))
        users, m = residual.shape[:2]
        if self._clip.size:
            shared = residual[:, :, self._local :]
            scales = clip_scales(self._lengths(batch, shared, share), self._clip)
            factors = (scales * share[:, None] * self._shared_step).astype(self.dtype)
            subtract_product(target, batch.flat, (shared * factors[:, None, :, None]).reshape(users * m, -1))
        if self._personal_step.size:
            factors = (share[:, None] * self._personal_step).astype(self.dtype)
            own = residual[:, :, : self._personal] * factors[:, None, :, None]
            self._thetas.step(batch, own.reshape(users, m, -1))

    def _residual(self, batch: Batch) -> NDArray[Any]:
        """prediction − y at (w, θ_i): users × m × settings × K."""
        users, m, outputs = batch.y.shape
        x = batch.flat
        scores = np.zeros((users * m, len(self.settings), outputs), self.dtype)
        if self._clip.size:
            scores[:, self._local :] = np.asarray(x @ self._v).reshape(users * m, -1, outputs)
            if self._noisy and not self._folds:
                noise = np.asarray(x @ self._noise)
                scores[:, self._local :] -= noise[:, None, :] * self._noise_step[:, None].astype(self.dtype)
        if self._personal_step.size:
            scores[:, : self._personal] += self._thetas.scores(batch).reshape(users * m, -1, outputs)
        prediction = predict(scores.reshape(users, m, -1, outputs), self.population.loss)
        prediction -= batch.y[:, :, None, :]
        return prediction

    def _lengths(self, batch: Batch, residual: NDArray[Any], share: Vector) -> Vector:
        """‖g_i‖ with g_i = share_i·X_iᵀR_i, from ‖X_iᵀR_i‖² = ⟨R_i R_iᵀ, X_i X_iᵀ⟩: users × settings.

        Where that has cancelled, and the vector could be long enough to be clipped, from the product itself.
        """
        users, m, _, _ = residual.shape
        gram = self._thetas.gram(batch)
        turned = np.matmul(gram, residual.reshape(users, m, -1)).reshape(residual.shape)
        squares = _inner(residual, turned)
        bounds = np.einsum("umm->u", gram)[:, None] * _inner(residual, residual)
        cancelled = squares < CANCELLED * bounds
        if cancelled.any():
            cancelled &= share[:, None] ** 2 * bounds > self._clip**2
        for user, setting in np.argwhere(cancelled) if cancelled.any() else ():
            x = batch.flat[user * m : (user + 1) * m]
            squares[user, setting] = np.sum(np.asarray(x.T @ residual[user, :, setting]) ** 2)
        return share[:, None] * np.sqrt(np.maximum(squares, 0.0))

    def _count_standing(self, users: Indices) -> None:
        """Add w_{t−1} to the sum of iterates, and each θ_i for the rounds it stood until now."""
        self._v_sum += self._v
        self._noise_sum += self._noise
        self._stand(users, self.round)

    def _stand(self, users: Indices, until: int) -> None:
        self._thetas.stand(users, until - self._since[users])
        self._since[users] = until

    def shared(self) -> Columns:
        """w of every setting, in the order of ``settings``: d × columns."""
        v, noise, count = self._v, self._noise, 1
        if self._average and self.round:
            v, noise, count = self._v_sum, self._noise_sum, self.round
        d, outputs = noise.shape
        w = np.zeros((d, len(self.settings), outputs), self.dtype)
        w[:, self._local :] = v.reshape(d, -1, outputs) - noise[:, None, :] * self._noise_step[:, None]
        return w.reshape(d, -1) / count

    def add_personal(self, user: int, out: Columns) -> None:
        columns = self._personal * self.population.outputs
        out[:, :columns] += self._thetas.theta(user, self._averaged_over())

    def add_personal_scores(self, user: int, x: Features, out: Columns) -> None:
        columns = self._personal * self.population.outputs
        out[:, :columns] += self._thetas.test_scores(user, x, self._averaged_over())

    def _averaged_over(self) -> int:
        return self.round if self._average else 0

    def w(self, place: int) -> Vector:
        """w of one setting, by its place in the list that was given, as the flat vector of other engines."""
        return self._column(self.shared(), place)

    def theta(self, place: int, user: int) -> Vector:
        """θ_i of one setting and user."""
        self._settle()
        out = np.zeros((self.population.features, len(self.settings) * self.population.outputs), self.dtype)
        self.add_personal(user, out)
        return self._column(out, place)

    def _column(self, columns: Columns, place: int) -> Vector:
        shaped = columns.reshape(self.population.features, len(self.settings), -1)
        return shaped[:, self.places.index(place)].reshape(-1).astype(np.float64)

    def _settle(self) -> None:
        if self._average:
            self._stand(np.arange(len(self.population)), self.round)

    def measures(self) -> dict[int, dict[str, float]]:
        """Of every setting that is still trained, by its place in the list that was given."""
        self._settle()
        with np.errstate(all="ignore"):
            found = self.population.measures(self, len(self.settings))
        rows = ({name: float(values[at]) for name, values in found.items()} for at in range(len(self.settings)))
        return dict(zip(self.places, rows, strict=True))

    def by_user(self) -> dict[int, Vector]:
        """The main measure of each user who is measured, for every setting that is still trained."""
        self._settle()
        with np.errstate(all="ignore"):
            found = self.population.by_user(self, len(self.settings))
        return {place: found[measure_of(found)][:, at] for at, place in enumerate(self.places)} if found else {}

    def state(self) -> State:
        arrays = {name: getattr(self, f"_{name}") for name in CHANGING}
        return {**arrays, **self._thetas.state(), "round": np.array(self.round), "places": np.array(self.places)}

    def restore(self, state: State) -> None:
        self.drop(set(self.places).difference(state["places"].tolist()))
        self.round = int(state["round"])
        for name in CHANGING:
            getattr(self, f"_{name}")[...] = state[name]
        self._thetas.restore(state)

    def drop(self, gone: set[int]) -> None:
        """Stop training the settings at these places."""
        outputs = self.population.outputs
        kept = [at for at, place in enumerate(self.places) if place not in gone]
        personal = [at for at in kept if at < self._personal]
        shared = [at - self._local for at in kept if at >= self._local]
        self._thetas.keep(_columns(personal, outputs))
        self._v = kept_columns(self._v, _columns(shared, outputs))
        self._v_sum = kept_columns(self._v_sum, _columns(shared, outputs))
        before = dict(zip(self.places, self.settings, strict=True))
        self.places = [self.places[at] for at in kept]
        self._set(before)


class Engine(Protocol):
    """Many settings of one cohort, for any kind of model.

    ``state`` is all that training has changed; ``restore`` puts it into an engine that was made in the same way.
    """

    @property
    def round(self) -> int: ...
    @property
    def places(self) -> list[int]: ...
    def advance(self) -> None: ...
    def w(self, place: int) -> Vector: ...
    def measures(self) -> dict[int, dict[str, float]]: ...
    def by_user(self) -> dict[int, Vector]: ...
    def drop(self, gone: set[int]) -> None: ...
    def state(self) -> State: ...
    def restore(self, state: State) -> None: ...


@dataclass(frozen=True)
class Report:
    """The measures after a round, by the place of the setting; ``diverged`` were stopped here."""

    round: int
    measures: dict[int, dict[str, float]]
    diverged: frozenset[int] = frozenset()


def train(
    engine: Engine,
    rounds: int,
    every: int,
    on_round: Callable[[int], None] | None = None,
    first: dict[int, float] | None = None,
) -> Iterator[Report]:
    """Run the rounds; report before the first one, after every so many and after the last. ``every=0``: never.

    A setting whose measures leave for infinity is reported as diverged and stopped, the others go on. An engine that
    has come to some round goes on from there: ``on_round`` hears of each round before its report. first: the first
    error of each setting, by which divergence is told; filled here, and given again when training is resumed.
    """
    first = {} if first is None else first
    due = set(reported_rounds(rounds, every))
    begun = engine.round
    for round_ in range(begun, rounds + 1):
        if round_ > begun and engine.places:
            engine.advance()
        if on_round:
            on_round(round_)
        if engine.places and round_ in due:
            report = _report(round_, engine.measures(), first)
            if report.diverged:
                engine.drop(set(report.diverged))
            yield report


def reported_rounds(rounds: int, every: int) -> list[int]:
    """Before the first round, after every so many and after the last; none where ``every`` is 0."""
    return sorted({*range(0, rounds + 1, every), rounds}) if every else []


def _report(round_: int, measures: dict[int, dict[str, float]], first: dict[int, float]) -> Report:
    errors = {place: _error(row) for place, row in measures.items()}
    for place, error in errors.items():
        first.setdefault(place, error)
    gone = frozenset(place for place, error in errors.items() if not error <= DIVERGED * max(first[place], 1e-300))
    return Report(round_, measures, gone)


def left_for_infinity(first: Mapping[str, float], last: Mapping[str, float]) -> bool:
    """Whether what is measured has grown beyond all bounds."""
    return not _error(last) <= DIVERGED * max(_error(first), 1e-300)


def _error(row: Mapping[str, float]) -> float:
    """The measure that grows as training fails."""
    return next((row[name] for name in ("excess_risk", "loss") if name in row), 0.0)


def bytes_for(population: Population, settings: int, *, rounds: int, rate: float, average: bool) -> int:
    """About how much memory so many settings side by side take, with the data."""
    columns, visits = settings * population.outputs, rate * len(population) * rounds
    kind = cheapest(population, columns, visits)
    way, d = costs(population, columns, visits)[kind], population.features
    rows = min(users_at_once(population, columns, kind), len(population)) * population.batch_size
    working = 6 * rows * columns + 3 * rows * d + 3 * d * columns
    return population.bytes + 8 * (way.fixed + columns * (1 + average) * (way.numbers + d) + working)


def users_at_once(population: Population, columns: int, kind: Kind) -> int:
    """How many users go into one product: few enough for the cache, enough for a matrix product, and as many as can
    make do without a second array of the size of V."""
    m, d = population.batch_size, population.features
    per_user = m * columns + (d * columns if kind == "direct" else 0)
    return max(d // m, ROWS_AT_ONCE // m, NUMBERS_AT_ONCE // max(1, per_user), 1)


def _inner(left: NDArray[Any], right: NDArray[Any]) -> Vector:
    """Σ over samples and outputs: users × settings."""
    return np.asarray(np.einsum("umsk,umsk->us", left, right))


def _columns(settings: Sequence[int], outputs: int) -> Indices:
    return (np.asarray(settings, dtype=np.intp)[:, None] * outputs + np.arange(outputs)).reshape(-1)


def _block(steps: Steps) -> int:
    """0 for local learning, 1 for both, 2 for global."""
    return 0 if not steps.publishes else 2 if steps.personal == 0 else 1


def check_alike(users: int, settings: Sequence[Setting]) -> None:
    """Settings side by side share cohorts and minibatches."""
    first = settings[0].release
    for setting in settings:
        if (setting.release.cohort, setting.release.total_batch) != (first.cohort, first.total_batch):
            raise ValueError(
                f"settings side by side share the cohort and total_batch, got {first} and {setting.release}: run those "
                "with other cohorts separately"
            )
    if first.cohort.population != users:
        raise ValueError(
            f"the cohort is drawn from population={first.cohort.population} users but the data hold {users}: set "
            f"population={users}"
        )
