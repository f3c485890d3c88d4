"""Does the running code give the noise that it charges for? A conformance audit, by canaries through the real strategy.

Canary clients send vectors ten times too long, along a few known directions. The auditor knows who replied and looks
only at what is released: how far the known directions move (gain: the clip, the denominator), and how the rest
scatters (noise). ẑ = noise / gain is then compared with the z that the ledger charges for. Run it on a strategy of its
own, never on a user's training.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Release
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.simulation.grid import InProcessGrid
from flwr_ppsgd.strategy import PPSGD
from flwr_ppsgd.wire import GRADIENT, Layout

DIRECTIONS = 2
OVER_NORM = 10.0  # canaries send vectors of this many clip norms
DROPPED = 0.3  # share of the asked whose reply is withheld: dividing by the number received then shows
EMPTY_EVERY = 5  # in every fifth round nobody replies at all
MOST_REPLIES = 1000  # a round
LIMIT = 4.0  # standard errors
WANTED = 0.01  # standard error of ẑ / z to aim for
INCONCLUSIVE = 0.02
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A measured number, its standard error, and what it should be."""

    value: float
    error: float
    expected: float

    @property
    def conforms(self) -> bool:
        return abs(self.value - self.expected) <= LIMIT * self.error + 1e-6 * abs(self.expected)


@dataclass(frozen=True)
class Audit:
    """What was measured, over ``rounds`` rounds of ``size`` coordinates.

    noise_multiplier: ẑ. gain: how much of C a canary moves the sum by, in units of C. empty_rounds: the noise of rounds
    without any reply, relative to the others. between_rounds, between_coordinates: correlations.
    epsilon_charged, epsilon_measured: of ``planned_rounds`` rounds, at z and at ẑ.
    """

    release: Release
    rounds: int
    size: int
    noise_multiplier: Estimate
    gain: Estimate
    empty_rounds: Estimate
    between_rounds: Estimate
    between_coordinates: Estimate
    rounds_charged: int
    planned_rounds: int
    epsilon_charged: float
    epsilon_measured: float
    residuals: Floats  # in units of their own standard deviation, for the picture

    @property
    def findings(self) -> list[str]:
        """What does not conform, each in a line."""
        checks = {
            "noise multiplier": self.noise_multiplier,
            "gain (clip and denominator)": self.gain,
            "noise of empty rounds": self.empty_rounds,
            "correlation between rounds": self.between_rounds,
            "correlation between coordinates": self.between_coordinates,
        }
        lines = [
            f"{name} is {found.value:.4g} ± {found.error:.2g}, expected {found.expected:.4g}"
            for name, found in checks.items()
            if not (self._inverse_multiplier if found is self.noise_multiplier else found).conforms
        ]
        if self.rounds_charged != self.rounds:
            lines.append(f"{self.rounds_charged} of {self.rounds} rounds were charged")
        return lines

    @property
    def _inverse_multiplier(self) -> Estimate:
        """1/ẑ = gain/noise, which is as good as normal even where the gain is poorly known."""
        z = self.noise_multiplier
        return Estimate(1 / z.value, abs(z.error / z.value) / z.expected, 1 / z.expected)

    @property
    def verdict(self) -> str:
        """convicted, inconclusive or conforms."""
        if self.findings:
            return "convicted"
        z = self.noise_multiplier
        return "inconclusive" if z.error > INCONCLUSIVE * z.value else "conforms"

    def in_words(self) -> str:
        z = self.noise_multiplier
        lines = [
            f"Verdict: {self.verdict} ({self.rounds} rounds, {self.size} coordinates, limit {LIMIT:g} standard errors)",
            f"Noise multiplier measured {z.value:.4g} ± {z.error:.2g}, charged {z.expected:.4g}",
            f"Gain {self.gain.value:.4g} ± {self.gain.error:.2g} clip norms, expected 1",
            f"Correlation between rounds {self.between_rounds.value:+.2g} ± {self.between_rounds.error:.1g}, between "
            f"coordinates {self.between_coordinates.value:+.2g} ± {self.between_coordinates.error:.1g}",
            f"Epsilon of {self.planned_rounds} rounds: {self.epsilon_charged:.4g} as charged, "
            f"{self.epsilon_measured:.4g} at the measured noise",
        ]
        return "\n".join([*lines, *(f"FOUND: {line}" for line in self.findings)])


def audit(make: Callable[[], PPSGD], planned_rounds: int, size: int = 20_000, seed: int = 0) -> Audit:
    """Audit the strategy that ``make`` builds. ``seed`` decides whose replies are withheld, nothing else."""
    strategy = make()
    if not strategy.steps.publishes or strategy.release.noise_multiplier == 0:
        raise ValueError("there is nothing to audit where nothing is released or no noise is added: set alpha_q and z")
    canaries = _Canaries(strategy.release, size, seed)
    counts, released = canaries.watch(strategy, _enough_rounds(strategy.release))
    return _estimate(strategy, counts, released, canaries.directions, planned_rounds)


def _enough_rounds(release: Release) -> int:
    """As many rounds as bring the standard error of the gain to ``WANTED``, within reason."""
    replying = min(MOST_REPLIES, (1 - DROPPED) * release.cohort.rate * release.cohort.population)
    per_round = max(replying**2 / DIRECTIONS, 1e-9) * (1 - 1 / EMPTY_EVERY)
    wanted = (release.noise_multiplier / WANTED) ** 2 / per_round
    return int(min(max(20, math.ceil(wanted)), 200, max(20, 15_000 / max(replying, 1))))


class _Canaries:
    """Clients that send 10·C along one of a few directions with disjoint supports."""

    def __init__(self, release: Release, size: int, seed: int) -> None:
        self._release = release
        self._source = np.random.default_rng(seed)
        self._w = ArrayRecord([np.zeros(size)])
        signs = self._source.choice([-1.0, 1.0], size) / math.sqrt(size // DIRECTIONS)
        self.directions = np.zeros((DIRECTIONS, size))
        for k in range(DIRECTIONS):
            block = slice(k * (size // DIRECTIONS), (k + 1) * (size // DIRECTIONS))
            self.directions[k, block] = signs[block]
        layout = Layout.of(self._w)
        self._records = [layout.unflatten(OVER_NORM * release.clip_norm * u) for u in self.directions]

    def watch(self, strategy: PPSGD, rounds: int) -> tuple[Floats, Floats]:
        """(how many canaries of each direction replied, what was released on the scale of the sum), round by round."""
        grid, layout = InProcessGrid(ClientApp(), self._release.cohort.population), Layout.of(self._w)
        scale = self._release.denominator / strategy.steps.shared
        counts, released = [], []
        for round_ in range(1, rounds + 1):
            asked = list(strategy.configure_train(round_, self._w, ConfigRecord(), grid))
            grid.push_messages(asked)
            replies, count = self._replies(asked, nobody=round_ % EMPTY_EVERY == 0)
            arrays, _ = strategy.aggregate_train(round_, replies)
            released.append(-scale * layout.flatten(arrays))
            counts.append(count)
        return np.array(counts), np.array(released)

    def _replies(self, asked: list[Message], nobody: bool) -> tuple[list[Message], Floats]:
        keep = 0 if nobody else min(MOST_REPLIES, round((1 - DROPPED) * len(asked)))
        chosen = self._source.permutation(len(asked))[:keep]
        kinds = self._source.integers(0, DIRECTIONS, keep)
        replies = [
            Message(RecordDict({GRADIENT: self._records[kind]}), reply_to=asked[place])
            for place, kind in zip(chosen, kinds, strict=True)
        ]
        return replies, np.bincount(kinds, minlength=DIRECTIONS).astype(float)


def _estimate(strategy: PPSGD, counts: Floats, released: Floats, directions: Floats, planned: int) -> Audit:
    release, (rounds, size) = strategy.release, released.shape
    signal = released @ directions.T  # gain·C·count plus noise, for each round and direction
    weight = float(np.sum(counts**2))
    gain = float(np.sum(counts * signal)) / weight / release.clip_norm if weight else math.nan
    noise = released - gain * release.clip_norm * (counts @ directions) if weight else released
    replied = noise[counts.sum(axis=1) > 0] if weight else noise
    std = float(np.sqrt(np.mean(replied**2)))
    std_error = std / math.sqrt(2 * replied.size)
    gain_error = std / release.clip_norm / math.sqrt(weight) if weight else math.inf
    z = std / (gain * release.clip_norm)
    z_error = abs(z) * math.hypot(std_error / std, gain_error) if weight else math.inf  # the gain should be 1
    measured = replace(release, noise_multiplier=min(max(z, 1e-3), 1e6)) if z > 0 else release
    delta = strategy.ledger.delta
    return Audit(
        release=release,
        rounds=rounds,
        size=size,
        noise_multiplier=Estimate(z, z_error, release.noise_multiplier),
        gain=Estimate(gain, gain_error, 1.0),
        empty_rounds=_empty_rounds(noise, counts),
        between_rounds=_correlation(noise[1:], noise[:-1]),
        between_coordinates=_correlation(noise[:, 1:], noise[:, :-1]),
        rounds_charged=strategy.ledger.rounds,
        planned_rounds=planned,
        epsilon_charged=Ledger(delta).record(release, planned).epsilon(),
        epsilon_measured=Ledger(delta).record(measured, planned).epsilon(),
        residuals=noise.reshape(-1)[:: max(1, noise.size // 100_000)] / std if std else noise.reshape(-1)[:1],
    )


def _empty_rounds(noise: Floats, counts: Floats) -> Estimate:
    """Standard deviation of the rounds in which nobody replied, relative to the others."""
    empty = counts.sum(axis=1) == 0
    if empty.all() or not empty.any():
        return Estimate(1.0, 0.0, 1.0)
    others = float(np.sqrt(np.mean(noise[~empty] ** 2)))
    ratio = float(np.sqrt(np.mean(noise[empty] ** 2))) / others if others else math.inf
    error = math.sqrt(1 / (2 * noise[empty].size) + 1 / (2 * noise[~empty].size))
    return Estimate(ratio, error, 1.0)


def _correlation(a: Floats, b: Floats) -> Estimate:
    """Σab / Σ½(a² + b²), which is 0 ± 1/√n for independent values."""
    power = float(np.sum(a**2) + np.sum(b**2)) / 2
    return Estimate(float(np.sum(a * b)) / power if power else 1.0, 1 / math.sqrt(a.size), 0.0)
