"""What rounds draw, drawn for several of them at once.

Cohorts, rows and normals depend on the seed and on who took part before, and not on w or θ. So they
can be drawn before the rounds that need them, in fewer and larger calls; every round gets what it
would have drawn by itself. With few users per round and one setting this saves a fifth of the time.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from flwr_ppsgd.algorithm import Cohort
from flwr_ppsgd.lab.engines.batches import (
    Batch,
    DType,
    Floats,
    Indices,
    Population,
    Scratch,
    drawn,
)
from flwr_ppsgd.noise import coins_for

MOST_ROUNDS = 25  # beyond that little is gained
MOST_NUMBERS = 1 << 18  # normals, or uniforms, drawn at once: 2 MB


class Drawn(NamedTuple):
    """What one round draws.

    Args:
        users: who takes part.
        visits: which visit this is for each of them, counted from 1.
        normals: one for each coordinate of w; nothing if there is no noise.
        rows: which rows of the table they draw; None if every sample is new.
    """

    users: Indices
    visits: Indices
    normals: Floats
    rows: Indices | None


class Ahead:
    """Draws the next rounds of one training.

    Args:
        population: everyone's data.
        cohort: how users are drawn.
        seed: as of the engine.
        dtype: of the minibatches.
    """

    def __init__(
        self,
        population: Population,
        cohort: Cohort,
        seed: int | None,
        dtype: DType,
    ) -> None:
        self._population = population
        self._cohort = cohort
        self._seed = seed
        self._dtype = dtype
        self._scratch = Scratch()
        self._coming: deque[Drawn] = deque()

    def forget(self) -> None:
        """Draw anew from the next round on, whatever round that is."""
        self._coming.clear()

    def round(self, round_: int, visits: Indices, users_at_once: int, *, noisy: bool) -> Drawn:
        """What a round draws.

        Args:
            round_: its number; rounds come one after the other, or after ``forget``.
            visits: the number of visits of each user before it.
            users_at_once: the number of users whose minibatches are taken at once.
            noisy: whether normals are wanted.
        """
        if not self._coming:
            count = self._rounds_at_once(users_at_once)
            rounds = range(round_, round_ + count)
            self._coming.extend(self._draw(rounds, visits, noisy))
        return self._coming.popleft()

    def batches(self, round_: Drawn, users_at_once: int) -> Iterator[Batch]:
        """Its minibatches in parts of that many users; a part is valid until the next one."""
        for start in range(0, len(round_.users), users_at_once):
            part = slice(start, start + users_at_once)
            rows = None if round_.rows is None else round_.rows[part]
            yield self._population.batch(
                round_.users[part],
                round_.visits[part],
                self._dtype,
                self._scratch,
                rows,
            )

    def _rounds_at_once(self, users_at_once: int) -> int:
        normals = self._population.features * self._population.outputs
        numbers = max(normals, len(self._population))
        users = max(1.0, self._cohort.rate * len(self._population))
        return max(1, min(MOST_ROUNDS, MOST_NUMBERS // numbers, int(users_at_once / users)))

    def _draw(self, rounds: Sequence[int], visits: Indices, noisy: bool) -> list[Drawn]:
        visits = visits.copy()
        members = []
        for uniforms in self._uniforms(rounds):
            users = drawn(self._cohort, uniforms, visits, self._population.most_visits)
            visits[users] += 1
            members.append((users, visits[users]))
        normals = self._normals(rounds) if noisy else np.empty((len(rounds), 0))
        rows = self._rows(members)
        drawn_ahead = []
        for at, (users, own_visits) in enumerate(members):
            drawn_ahead.append(Drawn(users, own_visits, normals[at], rows[at]))
        return drawn_ahead

    def _uniforms(self, rounds: Sequence[int]) -> Floats:
        """Rounds × users: who takes part is decided by them."""
        streams = [coins_for(self._seed, "cohort", round_) for round_ in rounds]
        return np.stack([coins.uniforms(len(self._population)) for coins in streams])

    def _normals(self, rounds: Sequence[int]) -> Floats:
        """Rounds × coordinates of w."""
        size = self._population.features * self._population.outputs
        streams = [coins_for(self._seed, "noise", round_) for round_ in rounds]
        return np.stack([coins.normals(size) for coins in streams])

    def _rows(self, members: Sequence[tuple[Indices, Indices]]) -> Sequence[Indices | None]:
        """The rows of each round, from one call for all."""
        users = np.concatenate([users for users, _ in members])
        visits = np.concatenate([visits for _, visits in members])
        rows = self._population.rows(users, visits)
        if rows is None:
            return [None] * len(members)
        ends = np.cumsum([len(users) for users, _ in members])
        return np.split(rows, ends[:-1])
