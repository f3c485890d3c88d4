"""Does the running code give the noise that it charges for? A conformance audit by canaries.

Canary clients send vectors ten times too long, along a few known directions, through the real
strategy. The auditor knows who replied and looks only at what is released: how far the known
directions move (gain: the clip, the denominator), and how the rest scatters (noise). ẑ =
noise / gain is then compared with the z that the ledger charges for. Run it on a strategy of its
own, never on a user's training.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

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

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DIRECTIONS = 2
OVER_NORM = 10.0  # canaries send vectors of this many clip norms
DROPPED = 0.3  # share of replies withheld: dividing by the number received then shows
EMPTY_EVERY = 5  # in every fifth round nobody replies at all
MOST_REPLIES = 1000  # per round
FEWEST_ROUNDS = 20
MOST_ROUNDS = 200
MOST_MESSAGES = 15_000  # over all rounds
LIMIT = 4.0  # standard errors
UNLIKELY = 6.3e-5  # the chance to be off by more than LIMIT, on either side
WANTED = 0.01  # standard error of ẑ / z to aim for
INCONCLUSIVE = 0.02
MOST_DRAWN = 100_000  # residuals that are kept for the picture
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A measured number, its standard error, and what it should be."""

    value: float
    error: float
    expected: float

    @property
    def conforms(self) -> bool:
        """Whether it is within ``LIMIT`` standard errors of what it should be."""
        off = abs(self.value - self.expected)
        return off <= LIMIT * self.error + 1e-6 * abs(self.expected)

    @property
    def errors_off(self) -> float:
        """How far it is from what it should be, in standard errors."""
        if not self.error:
            return 0.0
        return (self.value - self.expected) / self.error


@dataclass(frozen=True)
class Audit:
    """What was measured.

    Args:
        release: what the strategy says it releases.
        rounds: the number of rounds that were run.
        size: the number of coordinates.
        noise_multiplier: ẑ.
        gain: how far a canary moves the sum, in units of its share of C.
        others: everything else that independent Gaussian noise in every coordinate and round must
            show, by name.
        quietest: the chance of a coordinate as quiet as the quietest one.
        charged: what the ledger holds.
        planned_rounds: the rounds for which ε is computed.
        epsilon_charged: ε of the planned rounds at the noise that is charged for.
        epsilon_measured: the same at the noise that was measured.
        residuals: in units of their own standard deviation, for the picture.
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
    residuals: Floats

    @property
    def estimates(self) -> dict[str, Estimate]:
        """All of them, by name."""
        return {"noise multiplier": self.noise_multiplier, "gain": self.gain, **self.others}

    @property
    def findings(self) -> list[str]:
        """What does not conform, one line for each."""
        judged = {**self.estimates, "noise multiplier": self._inverse_multiplier}
        lines = []
        for name, found in self.estimates.items():
            if not judged[name].conforms:
                lines.append(
                    f"{name} is {found.value:.4g} ± {found.error:.2g}, expected "
                    f"{found.expected:.4g}"
                )
        if self.quietest < UNLIKELY:
            lines.append(
                "a coordinate has so little noise that by chance it would happen in "
                f"{self.quietest:.2g} of all audits"
            )
        if self.charged != ((self.release, self.rounds),):
            lines.append(
                f"{self.rounds} rounds of {self.release} were released, but the ledger holds "
                f"{self.charged}"
            )
        return lines

    @property
    def _inverse_multiplier(self) -> Estimate:
        """1/ẑ = gain/noise, which is close to normal even if the gain is poorly known."""
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
        """The verdict, what was measured, and what was found, in lines to print."""
        z = self.noise_multiplier
        lines = [
            f"Verdict: {self.verdict} ({self.rounds} rounds, {self.size} coordinates, limit "
            f"{LIMIT:g} standard errors)",
            f"Noise multiplier measured {z.value:.4g} ± {z.error:.2g}, charged {z.expected:.4g}",
            f"Gain {self.gain.value:.4g} ± {self.gain.error:.2g} clip norms, expected 1",
        ]
        for name, found in self.others.items():
            title = name[0].upper() + name[1:]
            lines.append(
                f"{title} {found.value:+.2g} ± {found.error:.1g}, expected {found.expected:g}"
            )
        lines.append(
            f"Epsilon of {self.planned_rounds} rounds: {self.epsilon_charged:.4g} as charged, "
            f"{self.epsilon_measured:.4g} at the measured noise"
        )
        lines += [f"FOUND: {line}" for line in self.findings]
        return "\n".join(lines)


def audit(
    make: Callable[[], PPSGD],
    planned_rounds: int,
    size: int = 20_000,
    seed: int = 0,
) -> Audit:
    """Audit the strategy that ``make`` builds.

    Args:
        make: builds the strategy; it enrols the nodes that come.
        planned_rounds: the rounds for which ε is computed.
        size: the number of coordinates of w.
        seed: decides whose replies are withheld, nothing else.
    """
    strategy = make()
    if not strategy.steps.publishes or strategy.release.noise_multiplier == 0:
        raise ValueError(
            "there is nothing to audit if nothing is released or no noise is added, got "
            f"{strategy.steps} and noise_multiplier={strategy.release.noise_multiplier:g}: set "
            "alpha_q and z above 0"
        )
    if not strategy.enrols_whoever_comes:
        raise ValueError("the audit brings its own nodes: build the strategy without enrolled")
    canaries = _Canaries(
        strategy.release,
        size,
        seed,
        strategy.training.replies,
    )
    counts, released = canaries.watch(strategy, _enough_rounds(strategy.release))
    return _estimate(
        strategy,
        counts,
        released,
        canaries.directions,
        planned_rounds,
    )


def draw(found: Audit, path: Path) -> None:
    """What was released beside what it should be, as a picture.

    On the left the distribution of the noise, on the right each estimate in standard errors.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_noise(left, found)
    _draw_estimates(right, found)
    z = found.noise_multiplier
    figure.suptitle(
        f"Audit: {found.verdict}. Noise multiplier {z.value:.4g} ± {z.error:.2g}, charged "
        f"{z.expected:g}"
    )
    figure.savefig(path, dpi=130)


def _draw_noise(axes: "Axes", found: Audit) -> None:
    from flwr_ppsgd.results.plots import COLOURS

    edges = np.linspace(-5, 5, 81).tolist()
    axes.hist(
        found.residuals,
        bins=edges,
        density=True,
        color=COLOURS[5],
        label="released",
    )
    x = np.linspace(-5, 5, 401)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    axes.plot(
        x,
        density,
        color=COLOURS[1],
        lw=2,
        label="normal density",
    )
    axes.set(
        xlabel="noise / its standard deviation",
        ylabel="density",
        yscale="log",
        ylim=(1e-5, 1),
    )
    axes.legend()


def _draw_estimates(axes: "Axes", found: Audit) -> None:
    from flwr_ppsgd.results.plots import COLOURS

    names = list(found.estimates)
    off = [estimate.errors_off for estimate in found.estimates.values()]
    reach = max(8.0, *(abs(errors) for errors in off)) + 2
    axes.axvspan(-LIMIT, LIMIT, color="0.9")
    axes.errorbar(
        off,
        names,
        xerr=1.0,
        fmt="o",
        color=COLOURS[0],
        capsize=3,
    )
    axes.set(
        xlabel=f"standard errors from the expected value (grey: up to {LIMIT:g})",
        xlim=(-reach, reach),
    )
    axes.invert_yaxis()


def _enough_rounds(release: Release) -> int:
    """As many rounds as bring the standard error of the gain to ``WANTED``, within reason."""
    cohort = release.cohort
    replying = min(MOST_REPLIES, (1 - DROPPED) * cohort.rate * cohort.population)
    per_round = max(replying**2 / DIRECTIONS, 1e-9) * (1 - 1 / EMPTY_EVERY)
    wanted = math.ceil((release.noise_multiplier / WANTED) ** 2 / per_round)
    affordable = max(FEWEST_ROUNDS, MOST_MESSAGES / max(replying, 1))
    return int(min(max(FEWEST_ROUNDS, wanted), MOST_ROUNDS, affordable))


class _Canaries:
    """Clients that send 10·C along one of a few directions with disjoint supports.

    Args:
        release: of the strategy that is audited.
        size: the number of coordinates.
        seed: decides directions and whose replies are withheld.
        replies: "gradient" or "parameters", as the strategy expects them.
    """

    def __init__(
        self,
        release: Release,
        size: int,
        seed: int,
        replies: str,
    ) -> None:
        self._release = release
        self._source = np.random.default_rng(seed)
        self._w = ArrayRecord([np.zeros(size)])
        self._name = GRADIENT
        length = OVER_NORM * release.clip_norm
        if replies != "gradient":
            self._name = ARRAYS
            length = -length  # w is 0 here: w − w_i = −w_i
        width = size // DIRECTIONS
        signs = self._source.choice([-1.0, 1.0], size) / math.sqrt(width)
        self.directions = np.zeros((DIRECTIONS, size))
        for number, direction in enumerate(self.directions):
            block = slice(number * width, (number + 1) * width)
            direction[block] = signs[block]
        layout = Layout.of(self._w)
        self._records = [layout.unflatten(length * direction) for direction in self.directions]

    def watch(self, strategy: PPSGD, rounds: int) -> tuple[Floats, Floats]:
        """What goes in and what comes out, round by round.

        Returns:
            The number of canaries of each direction that replied, and what was released on the
            scale of the sum; one row per round.
        """
        grid = InProcessGrid(ClientApp(), self._release.cohort.population)
        layout = Layout.of(self._w)
        scale = self._release.denominator / strategy.steps.shared
        counts = []
        released = []
        for round_ in range(1, rounds + 1):
            asked = list(
                strategy.configure_train(
                    round_,
                    self._w,
                    ConfigRecord(),
                    grid,
                )
            )
            grid.push_messages(asked)
            replies, count = self._replies(asked, nobody=round_ % EMPTY_EVERY == 0)
            arrays, _ = strategy.aggregate_train(round_, replies)
            released.append(-scale * layout.flatten(arrays))
            counts.append(count)
        return np.array(counts), np.array(released)

    def _replies(self, asked: list[Message], nobody: bool) -> tuple[list[Message], Floats]:
        """The replies of some of those asked, and how many there are of each direction."""
        keep = min(MOST_REPLIES, round((1 - DROPPED) * len(asked)))
        if nobody:
            keep = 0
        chosen = self._source.permutation(len(asked))[:keep]
        kinds = self._source.integers(0, DIRECTIONS, keep)
        replies = []
        for place, kind in zip(chosen, kinds, strict=True):
            content = RecordDict({self._name: self._records[kind]})
            replies.append(Message(content, reply_to=asked[place]))
        return replies, np.bincount(kinds, minlength=DIRECTIONS).astype(float)


@dataclass(frozen=True)
class _Fit:
    """released = gain · limit · (counts @ directions) + noise, by least squares.

    Args:
        gain: and its standard error.
        std: of the noise in rounds with replies, and its standard error.
        noise: what is left, rounds × coordinates.
    """

    gain: float
    gain_error: float
    std: float
    std_error: float
    noise: Floats

    @classmethod
    def of(
        cls,
        counts: Floats,
        released: Floats,
        directions: Floats,
        limit: float,
    ) -> "_Fit":
        """``limit``: the length to which a canary's gradient is clipped."""
        gain = math.nan
        gain_error = math.inf
        noise = released
        replied = released
        weight = float(np.sum(counts**2))
        if weight:
            signal = released @ directions.T  # gain·limit·count plus noise, rounds × directions
            gain = float(np.sum(counts * signal)) / weight / limit
            noise = released - gain * limit * (counts @ directions)
            replied = noise[counts.sum(axis=1) > 0]
        std = float(np.sqrt(np.mean(replied**2)))
        if weight:
            gain_error = std / limit / math.sqrt(weight)
        return cls(
            gain=gain,
            gain_error=gain_error,
            std=std,
            std_error=std / math.sqrt(2 * replied.size),
            noise=noise,
        )

    def noise_multiplier(self, release: Release, limit: float) -> Estimate:
        """ẑ = noise / gain, in units of C."""
        z = self.std / (self.gain * limit) * limit / release.clip_norm
        error = math.inf
        if self.std:
            relative = math.hypot(
                self.std_error / self.std, self.gain_error
            )  # the gain should be 1
            error = abs(z) * relative
        return Estimate(z, error, release.noise_multiplier)


def _estimate(
    strategy: PPSGD,
    counts: Floats,
    released: Floats,
    directions: Floats,
    planned: int,
) -> Audit:
    release = strategy.release
    rounds, size = released.shape
    metrics = strategy.training.metrics
    share = 0.0 if metrics is None else metrics.share
    limit = release.clip_norm * math.sqrt(1 - share)
    fit = _Fit.of(counts, released, directions, limit)
    z = fit.noise_multiplier(release, limit)
    charged = strategy.ledger.releases
    last_charged = charged[-1][0] if charged else release
    nothing = Ledger(strategy.ledger.delta)
    every = max(1, fit.noise.size // MOST_DRAWN)
    return Audit(
        release=release,
        rounds=rounds,
        size=size,
        noise_multiplier=z,
        gain=Estimate(fit.gain, fit.gain_error, 1.0),
        others=_independence(fit.noise, counts),
        quietest=_quietest(fit.noise),
        charged=charged,
        planned_rounds=planned,
        epsilon_charged=nothing.record(last_charged, planned).epsilon(),
        epsilon_measured=nothing.record(_measured(release, z.value), planned).epsilon(),
        residuals=fit.noise.reshape(-1)[::every] / (fit.std or 1.0),
    )


def _measured(release: Release, z: float) -> Release:
    """The release with the noise that was measured, as far as it can be priced."""
    if not z > 0:
        return release
    return replace(release, noise_multiplier=min(max(z, 1e-3), 1e6))


def _independence(noise: Floats, counts: Floats) -> dict[str, Estimate]:
    half = noise.shape[1] // 2
    first = noise[:, :half]
    second = noise[:, half : 2 * half]
    return {
        "noise of empty rounds": _empty_rounds(noise, counts),
        "correlation between rounds": _correlation(noise[1:], noise[:-1]),
        "correlation two rounds apart": _correlation(noise[2:], noise[:-2]),
        "correlation between coordinates": _correlation(noise[:, 1:], noise[:, :-1]),
        "correlation of the two halves": _correlation(first, second),
        "kurtosis": _kurtosis(noise),
    }


def _kurtosis(noise: Floats) -> Estimate:
    """E n⁴ / (E n²)², 3 ± √(24/n) for a Gaussian."""
    power = float(np.mean(noise**2))
    kurtosis = 0.0
    if power:
        kurtosis = float(np.mean(noise**4)) / power**2
    return Estimate(kurtosis, math.sqrt(24 / noise.size), 3.0)


def _quietest(noise: Floats) -> float:
    """The chance that the quietest of all coordinates is as quiet as the one that was found."""
    rounds, size = noise.shape
    squares = np.sum(noise**2, axis=0)
    typical = float(np.mean(squares)) / rounds
    if not typical:
        return 0.0
    least = squares.min() / typical
    chance = float(chi2.cdf(least, rounds))
    expected = float(size * chance)
    return min(1.0, expected)


def _empty_rounds(noise: Floats, counts: Floats) -> Estimate:
    """The standard deviation of the rounds in which nobody replied, relative to the others."""
    is_empty = counts.sum(axis=1) == 0
    if is_empty.all() or not is_empty.any():
        return Estimate(1.0, 0.0, 1.0)
    empty = noise[is_empty]
    others = noise[~is_empty]
    ratio = math.inf
    typical = float(np.sqrt(np.mean(others**2)))
    if typical:
        ratio = float(np.sqrt(np.mean(empty**2))) / typical
    error = math.sqrt(1 / (2 * empty.size) + 1 / (2 * others.size))
    return Estimate(ratio, error, 1.0)


def _correlation(a: Floats, b: Floats) -> Estimate:
    """Σab / Σ½(a² + b²), which is 0 ± 1/√n for independent values."""
    power = float(np.sum(a**2) + np.sum(b**2)) / 2
    correlation = 1.0
    if power:
        correlation = float(np.sum(a * b)) / power
    return Estimate(correlation, 1 / math.sqrt(a.size), 0.0)
