"""The cohort engine for networks: gradients of a whole cohort by ``torch.func.vmap``, one setting after the other."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from flwr_ppsgd.algorithm import Vector, clip_scales, descend
from flwr_ppsgd.models.split import Batches, Matrix, Rows, SplitModel
from flwr_ppsgd.simulation.batches import Indices, drawn
from flwr_ppsgd.simulation.linear import Setting, State, check_alike, coins_of
from flwr_ppsgd.simulation.measures import measure_of, summary

CHANGING = ("w", "thetas", "w_sum", "thetas_sum")  # of a training
Groups: TypeAlias = list[tuple[Indices, tuple[Rows, Rows]]]


class _Training:
    """One setting: w, everyone's θ, and the sums of their iterates where the average is wanted."""

    def __init__(self, setting: Setting, w: Vector, theta: Vector, users: int, average: bool) -> None:
        self.setting, self.w = setting, w
        self.thetas: Matrix = np.tile(theta, (users, 1))
        self.w_sum = np.zeros_like(w)
        self.thetas_sum = np.zeros_like(self.thetas if average else self.thetas[:0])


class NetworkEngine:
    """``SplitModel`` or ``AdditiveHead`` for all users and several settings, one round at a time.

    batches: every user's training minibatches, by visit. tests: every user's (x, y) to measure on, where there are any.
    most_visits: as of ``Table``.
    settings, seed, average: as of ``CohortEngine``. w and θ are float64, as on every engine; the network computes in
    its own precision.
    """

    def __init__(
        self,
        model: SplitModel,
        batches: Sequence[Batches],
        settings: Sequence[Setting],
        *,
        seed: int | None,
        average: bool = False,
        tests: Sequence[tuple[Rows, Rows]] = (),
        most_visits: Indices | None = None,
    ) -> None:
        check_alike(len(batches), settings)
        self._model, self._batches, self._tests, self._most_visits = model, batches, tests, most_visits
        self._draw, self._average, self.round = coins_of(seed), average, 0
        self._visits = np.zeros(len(batches), dtype=np.intp)
        self._since = np.zeros(len(batches), dtype=np.intp)
        w, theta = model.initial_w(), model.initial_theta()
        self._trainings = {
            place: _Training(setting, w, theta, len(batches), average) for place, setting in enumerate(settings)
        }

    @property
    def places(self) -> list[int]:
        """The settings that are still trained, by their place in the list that was given."""
        return list(self._trainings)

    def advance(self) -> None:
        """One round of every setting."""
        self.round += 1
        release = next(iter(self._trainings.values())).setting.release
        uniforms = self._draw("cohort", self.round).uniforms(len(self._batches))
        users = drawn(release.cohort, uniforms, self._visits, self._most_visits)
        self._visits[users] += 1
        self._stand(users, self.round)
        groups = self._minibatches(users)
        size = len(next(iter(self._trainings.values())).w)
        noisy = any(t.setting.steps.publishes and t.setting.release.noise_std for t in self._trainings.values())
        normals = self._draw("noise", self.round).normals(size) if noisy else np.zeros(size)
        for training in self._trainings.values():
            if self._average:
                training.w_sum += training.w
            self._step(training, groups, normals)

    def _minibatches(self, users: Indices) -> Groups:
        """Users with minibatches of equal size together, x and y stacked."""
        drawn = {user: self._batches[user](int(self._visits[user])) for user in users.tolist()}
        groups: Groups = []
        for size in sorted({len(x) for x, _ in drawn.values()}):
            together = [user for user, (x, _) in drawn.items() if len(x) == size]
            x, y = (np.stack([drawn[user][part] for user in together]) for part in (0, 1))
            groups.append((np.array(together), (x, y)))
        return groups

    def _step(self, training: _Training, groups: Groups, normals: Vector) -> None:
        release, steps = training.setting.release, training.setting.steps
        total = release.noise_std * normals
        with np.errstate(all="ignore"):
            for users, rows in groups:
                own = training.thetas[users]
                g_w, g_theta = self._model.cohort_gradients(training.w, own, rows, release.reduction)
                total = total + clip_scales(np.linalg.norm(g_w, axis=1), release.clip_norm) @ g_w
                training.thetas[users] = own - steps.personal * g_theta
        if steps.publishes:
            training.w = descend(training.w, total, release, steps.shared)

    def _stand(self, users: Indices, until: int) -> None:
        """Count each θ_i for the rounds it stood until now."""
        if self._average:
            for training in self._trainings.values():
                training.thetas_sum[users] += (until - self._since[users])[:, None] * training.thetas[users]
        self._since[users] = until

    def w(self, place: int) -> Vector:
        """w of one setting, or its average iterate."""
        training = self._trainings[place]
        return training.w_sum / self.round if self._average and self.round else training.w

    def theta(self, place: int, user: int) -> Vector:
        """θ_i of one setting and user, or its average iterate."""
        training = self._trainings[place]
        if not self._average or not self.round:
            return np.asarray(training.thetas[user])
        self._stand(np.arange(len(self._batches)), self.round)
        return np.asarray(training.thetas_sum[user] / self.round)

    def measures(self) -> dict[int, dict[str, float]]:
        """Of every setting: means over users, weighted by their number of examples, and the spread over users."""
        weights = np.array([self._batches[user].num_examples for user in self._measured], dtype=float)
        found = {place: summary(self._by_user(place), weights) for place in self.places}
        return {place: {name: float(value) for name, value in row.items()} for place, row in found.items()}

    @property
    def _measured(self) -> list[int]:
        return [user for user, (x, _) in enumerate(self._tests) if len(x)]

    def _by_user(self, place: int) -> dict[str, Vector]:
        """Each measure of the users who have anything to measure on."""
        w = self.w(place)
        users = [self._model.evaluate(w, self.theta(place, user), self._tests[user]) for user in self._measured]
        return {name: np.array([user[name] for user in users]) for name in (users[0] if users else {})}

    def by_user(self) -> dict[int, Vector]:
        """The main measure of each user who is measured, for every setting."""
        found = {place: self._by_user(place) for place in self.places}
        return {place: row[measure_of(row)] for place, row in found.items() if row}

    def state(self) -> State:
        arrays = {
            f"{name}-{place}": getattr(training, name)
            for place, training in self._trainings.items()
            for name in CHANGING
        }
        counts = {"round": np.array(self.round), "places": np.array(self.places)}
        return {**arrays, **counts, "visits": self._visits, "since": self._since}

    def restore(self, state: State) -> None:
        self.drop(set(self.places).difference(state["places"].tolist()))
        self.round = int(state["round"])
        self._visits[...], self._since[...] = state["visits"], state["since"]
        for place, training in self._trainings.items():
            for name in CHANGING:
                setattr(training, name, state[f"{name}-{place}"])

    def drop(self, gone: set[int]) -> None:
        """Stop training the settings at these places."""
        self._trainings = {place: training for place, training in self._trainings.items() if place not in gone}
