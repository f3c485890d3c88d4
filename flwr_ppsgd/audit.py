"""Does the running code give the noise that it charges for? A conformance audit, by canaries through the real strategy.

Canary clients send vectors ten times too long, along a few known directions. The auditor knows who replied and looks
only at what is released: how far the known directions move (gain: the clip, the denominator), and how the rest
scatters (noise). ẑ = noise / gain is then compared with the z that the ledger charges for. Run it on a strategy of its
own, never on a user's training.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from scipy.stats import chi2

from flwr_ppsgd.algorithm import Release
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.server.message_api import PPSGD
from flwr_ppsgd.simulation.grid import InProcessGrid
from flwr_ppsgd.wire import ARRAYS, GRADIENT, Layout

DIRECTIONS = 2
OVER_NORM = 10.0  # canaries send vectors of this many clip norms
DROPPED = 0.3  # share of the asked whose reply is withheld: dividing by the number received then shows
EMPTY_EVERY = 5  # in every fifth round nobody replies at all
MOST_REPLIES = 1000  # a round
LIMIT = 4.0  # standard errors
UNLIKELY = 6.3e-5  # what lies beyond so many of them, on both sides
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

    noise_multiplier: ẑ. gain: how much of its share of C a canary moves the sum by. others: everything else that a
    Gaussian of its own in every coordinate and round must show. quietest: how likely a coordinate as quiet as the
    quietest one is. charged: what the ledger holds. epsilon_charged, epsilon_measured: of ``planned_rounds`` rounds.
    """

    release: Release
    rounds: int
    size: int
    noise_multiplier: Estimate
    gain: Estimate
    others: Mapping[str, Estimate]
    quietest: float
    charged: tuple[tuple[Release, int], ...]
    planned_rounds: int
    epsilon_charged: float
    epsilon_measured: float
    residuals: Floats  # in units of their own standard deviation, for the picture

    @property
    def estimates(self) -> dict[str, Estimate]:
        """All of them, by name."""
        return {"noise multiplier": self.noise_multiplier, "gain": self.gain, **self.others}

    @property
    def findings(self) -> list[str]:
        """What does not conform, each in a line."""
        lines = [
            f"{name} is {found.value:.4g} ± {found.error:.2g}, expected {found.expected:.4g}"
            for name, found in self.estimates.items()
            if not (self._inverse_multiplier if found is self.noise_multiplier else found).conforms
        ]
        if self.quietest < UNLIKELY:
            lines.append(f"a coordinate has so little noise that chance would do it {self.quietest:.2g} times an audit")
        if self.charged != ((self.release, self.rounds),):
            lines.append(f"{self.rounds} rounds of {self.release} were released, but the ledger holds {self.charged}")
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
            *(
                f"{name[0].upper()}{name[1:]} {e.value:+.2g} ± {e.error:.1g}, expected {e.expected:g}"
                for name, e in self.others.items()
            ),
            f"Epsilon of {self.planned_rounds} rounds: {self.epsilon_charged:.4g} as charged, "
            f"{self.epsilon_measured:.4g} at the measured noise",
        ]
        return "\n".join([*lines, *(f"FOUND: {line}" for line in self.findings)])


def audit(make: Callable[[], PPSGD], planned_rounds: int, size: int = 20_000, seed: int = 0) -> Audit:
    """Audit the strategy that ``make`` builds. ``seed`` decides whose replies are withheld, nothing else."""
    strategy = make()
    if not strategy.steps.publishes or strategy.release.noise_multiplier == 0:
        raise ValueError("there is nothing to audit where nothing is released or no noise is added: set alpha_q and z")
    if not strategy.enrols_whoever_comes:
        raise ValueError("the audit brings its own nodes: build the strategy without enrolled")
    canaries = _Canaries(strategy.release, size, seed, strategy.replies)
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

    def __init__(self, release: Release, size: int, seed: int, replies: str) -> None:
        self._name, sign = (GRADIENT, 1.0) if replies == "gradient" else (ARRAYS, -1.0)  # w is 0 here: w − w_i = −w_i
        self._release = release
        self._source = np.random.default_rng(seed)
        self._w = ArrayRecord([np.zeros(size)])
        signs = self._source.choice([-1.0, 1.0], size) / math.sqrt(size // DIRECTIONS)
        self.directions = np.zeros((DIRECTIONS, size))
        for k in range(DIRECTIONS):
            block = slice(k * (size // DIRECTIONS), (k + 1) * (size // DIRECTIONS))
            self.directions[k, block] = signs[block]
        layout = Layout.of(self._w)
        self._records = [layout.unflatten(sign * OVER_NORM * release.clip_norm * u) for u in self.directions]

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
            Message(RecordDict({self._name: self._records[kind]}), reply_to=asked[place])
            for place, kind in zip(chosen, kinds, strict=True)
        ]
        return replies, np.bincount(kinds, minlength=DIRECTIONS).astype(float)


def _estimate(strategy: PPSGD, counts: Floats, released: Floats, directions: Floats, planned: int) -> Audit:
    release, (rounds, size) = strategy.release, released.shape
    limit = release.clip_norm * math.sqrt(1 - strategy.metrics_share)  # of the gradient
    signal = released @ directions.T  # gain·limit·count plus noise, for each round and direction
    weight = float(np.sum(counts**2))
    gain = float(np.sum(counts * signal)) / weight / limit if weight else math.nan
    noise = released - gain * limit * (counts @ directions) if weight else released
    replied = noise[counts.sum(axis=1) > 0] if weight else noise
    std = float(np.sqrt(np.mean(replied**2)))
    std_error = std / math.sqrt(2 * replied.size)
    gain_error = std / limit / math.sqrt(weight) if weight else math.inf
    z = std / (gain * limit) * limit / release.clip_norm
    z_error = abs(z) * math.hypot(std_error / std, gain_error) if std else math.inf  # the gain should be 1
    measured = replace(release, noise_multiplier=min(max(z, 1e-3), 1e6)) if z > 0 else release
    charged, delta = strategy.ledger.releases, strategy.ledger.delta
    return Audit(
        release=release,
        rounds=rounds,
        size=size,
        noise_multiplier=Estimate(z, z_error, release.noise_multiplier),
        gain=Estimate(gain, gain_error, 1.0),
        others=_independence(noise, counts),
        quietest=_quietest(noise),
        charged=charged,
        planned_rounds=planned,
        epsilon_charged=Ledger(delta).record(charged[-1][0] if charged else release, planned).epsilon(),
        epsilon_measured=Ledger(delta).record(measured, planned).epsilon(),
        residuals=noise.reshape(-1)[:: max(1, noise.size // 100_000)] / (std or 1.0),
    )


def _independence(noise: Floats, counts: Floats) -> dict[str, Estimate]:
    half = noise.shape[1] // 2
    return {
        "noise of empty rounds": _empty_rounds(noise, counts),
        "correlation between rounds": _correlation(noise[1:], noise[:-1]),
        "correlation two rounds apart": _correlation(noise[2:], noise[:-2]),
        "correlation between coordinates": _correlation(noise[:, 1:], noise[:, :-1]),
        "correlation of the two halves": _correlation(noise[:, :half], noise[:, half : 2 * half]),
        "kurtosis": _kurtosis(noise),
    }


def _kurtosis(noise: Floats) -> Estimate:
    """E n⁴ / (E n²)², 3 ± √(24/n) for a Gaussian."""
    power = float(np.mean(noise**2))
    return Estimate(float(np.mean(noise**4)) / power**2 if power else 0.0, math.sqrt(24 / noise.size), 3.0)


def _quietest(noise: Floats) -> float:
    """The chance that the quietest of all coordinates, over all rounds, is as quiet as the one that was found."""
    rounds, size = noise.shape
    squares = np.sum(noise**2, axis=0)
    typical = float(np.mean(squares)) / rounds
    return min(1.0, size * float(chi2.cdf(squares.min() / typical, rounds))) if typical else 0.0


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
