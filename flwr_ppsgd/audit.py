"""Does the running code give the noise that it charges for? A conformance audit by canaries.

Canary clients send vectors ten times too long through the real strategy, along a few known
directions. The auditor knows who replied and looks only at what is released: how far the known
directions move (gain: the clip, the denominator), and how the rest scatters (noise). ẑ = noise /
gain is then compared with the z that the ledger charges for. The noise of all coordinates and
rounds, as one long row of numbers, must not resemble itself at any distance. If everyone takes part
in every round, a fifth of the canaries ask for an ε of their own that halves their bound (f = ½),
through the device's own code: for them ẑ must be z/f.

What the server does with a released sum is post-processing, and so is not audited: the strategy of
an audit takes plain steps, so that w shows the sum itself. Give it the release of a recipe, not the
recipe, and no ``max_epsilon``: the rounds of an audit are not those of a training. Run it on a
strategy of its own, never on a user's training.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray
from scipy import fft
from scipy.stats import chi2, norm
from threadpoolctl import threadpool_limits

from flwr_ppsgd.algorithm import Release, SecureSum
from flwr_ppsgd.arrays import Layout
from flwr_ppsgd.client.account import epsilon_of
from flwr_ppsgd.client.app import client_app
from flwr_ppsgd.client.policy import DELTA, LARGEST_DELTA, OWN_EPSILON
from flwr_ppsgd.ledger import Ledger
from flwr_ppsgd.secure.graph import design, survivors_needed
from flwr_ppsgd.server.strategy import PPSGD
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.statement import rounded_up
from flwr_ppsgd.wire import ARRAYS, GRADIENT, ORDER, Order

DIRECTIONS = 2  # by turns, one a round; and one more for canaries with an ε of their own
OVER_NORM = 10.0  # canaries send vectors of this many clip norms
DROPPED = 0.3  # share of replies withheld: dividing by the number received then shows
EMPTY_EVERY = 5  # in every fifth round nobody replies at all
FACTOR = 0.5  # f of canaries with an ε of their own
FACTOR_EVERY = 5  # every fifth user is one of them
MOST_REPLIES = 1000  # per round
FEWEST_ROUNDS = 20
FEWEST_SECURE = 5  # rounds of a secure sum
MOST_PAIRS = 200_000  # of neighbours over all rounds of a secure sum: about half a minute
MOST_ROUNDS = 1000
MOST_MESSAGES = 60_000  # over all rounds
LIMIT = 4.0  # standard errors
UNLIKELY = 6.3e-5  # the chance to be off by more than LIMIT, on either side
WANTED = 0.01  # standard error of ẑ / z to aim for
INCONCLUSIVE = 0.02
MOST_COMPARED = 8 * 10**6  # numbers that are compared with each other at every distance
FEWEST_COMPARED = 10_000  # pairs at a distance: their mean is close to normal
CELL = 1024  # coordinates whose noise in one round is looked at by itself
NOISE = "noise multiplier"
OWN_NOISE = f"noise multiplier of users with f = {FACTOR:g}"
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A measured number, its standard error, and what it should be."""

    value: float
    error: float
    expected: float

    def inverse(self) -> "Estimate":
        """1/ẑ = gain/noise, which is close to normal even if the gain is poorly known."""
        error = abs(self.error / self.value) / self.expected
        return Estimate(1 / self.value, error, 1 / self.expected)

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.error:.2g}, expected {self.expected:.4g}"


@dataclass(frozen=True)
class Audit:
    """What was measured.

    Args:
        release: what the strategy says it releases.
        rounds: the number of rounds that were run.
        size: the number of coordinates.
        estimates: ẑ, that of users with an ε of their own, how far a canary moves the sum in units
            of its share of C, and what else Gaussian noise must show; by name.
        chances: how likely it is that independent noise is as quiet somewhere, or resembles itself
            as much, as what was found; by a description of it.
        charged: what the ledger holds.
        planned_rounds: the rounds for which ε is computed.
        epsilon_charged: ε of the planned rounds at the noise that is charged for.
        epsilon_measured: the same at the noise that was measured.
    """

    release: Release
    rounds: int
    size: int
    estimates: Mapping[str, Estimate]
    chances: Mapping[str, float]
    charged: tuple[tuple[Release, int], ...]
    planned_rounds: int
    epsilon_charged: float
    epsilon_measured: float

    @property
    def noise_multiplier(self) -> Estimate:
        """ẑ."""
        return self.estimates[NOISE]

    @property
    def findings(self) -> list[str]:
        """What does not conform, one line for each."""
        lines = []
        for name, found in self.estimates.items():
            judged = found.inverse() if name in (NOISE, OWN_NOISE) else found
            off = abs(judged.value - judged.expected)
            if not off <= LIMIT * judged.error + 1e-6 * abs(judged.expected):
                lines.append(f"{name} is {found}")
        for name, chance in self.chances.items():
            if chance < UNLIKELY:
                lines.append(f"{name}: by chance in {chance:.2g} of all audits")
        if self.charged != ((self.release, self.rounds),):
            lines.append(
                f"{self.rounds} rounds of {self.release} were released, but the ledger holds "
                f"{self.charged}"
            )
        return lines

    @property
    def verdict(self) -> str:
        """convicted, inconclusive or conforms."""
        if self.findings:
            return "convicted"
        z = self.noise_multiplier
        return "inconclusive" if z.error > INCONCLUSIVE * z.value else "conforms"

    def in_words(self) -> str:
        """The verdict, what was measured, and what was found, in lines to print."""
        lines = [
            f"Verdict: {self.verdict} ({self.rounds} rounds, {self.size} coordinates, limit "
            f"{LIMIT:g} standard errors)"
        ]
        if self.verdict == "inconclusive":
            lines.append(
                f"These users' replies are too few to tell this noise to {INCONCLUSIVE:.0%}: audit "
                "with a larger population, or a smaller noise multiplier. The code is the same"
            )
        for name, found in self.estimates.items():
            lines.append(f"{name[0].upper()}{name[1:]}: {found}")
        lines.append(
            f"A deployment of {self.planned_rounds} rounds would cost epsilon = "
            f"{rounded_up(self.epsilon_charged)} as charged, "
            f"{rounded_up(self.epsilon_measured)} at the measured noise"
        )
        lines += [f"FOUND: {line}" for line in self.findings]
        return "\n".join(lines)


def audit(
    make: Callable[[], PPSGD], planned_rounds: int, size: int = 20_000, seed: int = 0
) -> Audit:
    """Audit the strategy that ``make`` builds.

    Args:
        make: builds the strategy; it enrols the nodes that come.
        planned_rounds: the rounds for which ε is computed.
        size: the number of coordinates of w.
        seed: decides whose replies are withheld and the directions, nothing else.
    """
    strategy = make()
    release = strategy.release
    if not strategy.steps.publishes or release.noise_multiplier == 0:
        raise ValueError(
            "there is nothing to audit if nothing is released or no noise is added, got "
            f"{strategy.steps} and noise_multiplier={release.noise_multiplier:g}: set alpha_q and "
            "z above 0"
        )
    if strategy.training.enrolled.nodes is not None:
        raise ValueError("the audit brings its own nodes: build the strategy without enrolled")
    rounds = _rounds_of_audit(release)
    if strategy.affordable_rounds is not None:
        rounds = min(rounds, strategy.affordable_rounds)
    with threadpool_limits(1):  # on a loaded machine, BLAS threads wait for each other
        canaries = Canaries(strategy, size, rounds, seed)
        canaries.run(strategy, rounds)
        return _estimate(strategy, canaries, planned_rounds)


def _rounds_of_audit(release: Release) -> int:
    """As many as bring the standard error of the gain to ``WANTED``, within reason.

    n replies along one direction move it by n, and the noise stays: a round tells n² as much as one
    with a single reply.
    """
    expected = (1 - DROPPED) * release.expected_users
    replying = max(1.0, min(MOST_REPLIES, expected))
    per_round = replying**2 * (1 - 1 / EMPTY_EVERY)
    wanted = math.ceil((release.noise_multiplier / WANTED) ** 2 / per_round)
    affordable = min(MOST_ROUNDS, MOST_MESSAGES / replying)
    rounds = int(max(FEWEST_ROUNDS, min(wanted, affordable)))
    rules = release.aggregation
    if rules is None:
        return rounds
    clients = math.floor(release.expected_users)
    pairs = clients * design(rules, clients).neighbours
    return max(FEWEST_SECURE, min(rounds, int(MOST_PAIRS / max(1, pairs))))


def _survivors(release: Release, rules: SecureSum) -> int:
    """How many clients of a round the audit of a secure sum lets through: its noise is known."""
    clients = math.floor(release.expected_users)
    return max(survivors_needed(rules, clients), math.ceil((1 - DROPPED) * clients))


# --- the canaries


class _Canary:
    """A learner with a fixed gradient."""

    num_examples = 1

    def __init__(self, vector: Floats) -> None:
        self._vector = vector

    def initial_theta(self) -> Floats:
        return np.zeros(0)

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:  # noqa: ARG002
        return self._vector, theta

    def evaluate(self, w: Floats, theta: Floats) -> dict[str, float]:  # noqa: ARG002
        return {}


class Canaries:
    """All clients of an audit: what they sent in each round, and what was released.

    Plain replies are made here, so that the server's own bound is audited. In secure sums, and with
    an ε of one's own, they go through the client's code.

    Args:
        strategy: what is audited.
        size: the number of coordinates.
        rounds: the number of rounds.
        seed: decides who is lost and the directions.

    ``counts`` says how many canaries sent each direction, rounds × directions; ``released`` is on
    the scale of the sum, rounds × coordinates.
    """

    def __init__(self, strategy: PPSGD, size: int, rounds: int, seed: int) -> None:
        self._release = strategy.release
        self._size = size
        self._source = np.random.default_rng(seed)
        self._parameters = strategy.training.replies != "gradient"
        self._app = client_app(lambda _: _Canary(self._vector))
        self._vector = np.zeros(size)  # of the canary whose turn it is
        self._rounds_done = 0
        self._replies: dict[int, RecordDict] = {}  # by the number of the direction
        self._asked: dict[int, list[int]] = {}  # who sent shares of a secure sum, by round
        self._kept: dict[int, set[int]] = {}  # who is let through, by round
        self.directions = self._draw_directions()
        self.counts = np.zeros((rounds, DIRECTIONS + 1))
        self.released = np.zeros((rounds, size))
        self.node_config = self._node_config(strategy, rounds)

    def _node_config(self, strategy: PPSGD, rounds: int) -> dict[str, Any]:
        """What asks for half the bound; empty if nobody can have it."""
        release = self._release
        delta = strategy.ledger.delta
        noise_delta = delta - rounds * release.failure
        measures = strategy.training.metrics is not None and release.aggregation is None
        everyone = release.cohort.rate == 1 and not measures and not self._parameters
        if not everyone or noise_delta <= 0 or delta >= LARGEST_DELTA:
            return {}
        mu = FACTOR * math.sqrt(rounds) / release.noise_multiplier
        return {OWN_EPSILON: epsilon_of(mu, noise_delta), DELTA: delta}

    def _draw_directions(self) -> Floats:
        """Of length 1, with disjoint supports."""
        width = self._size // (DIRECTIONS + 1)
        signs = self._source.choice([-1.0, 1.0], self._size) / math.sqrt(width)
        directions = np.zeros((DIRECTIONS + 1, self._size))
        for number, direction in enumerate(directions):
            block = slice(number * width, (number + 1) * width)
            direction[block] = signs[block]
        return directions

    def run(self, strategy: PPSGD, rounds: int) -> None:
        """Train, and keep what is released. Rounds without a secure sum are left out."""
        grid = InProcessGrid(self, self._release.cohort.population)  # type: ignore[arg-type]
        w0 = ArrayRecord([np.zeros(self._size)])
        layout = Layout.of(w0)
        scale = self._release.denominator / strategy.steps.shared
        last = np.zeros(self._size)

        def keep_release(round_: int, result: Result) -> None:
            nonlocal last
            w = layout.flatten(result.arrays)
            if round_:
                self.released[round_ - 1] = scale * (last - w)
            last = w
            self._rounds_done = round_

        strategy.start(grid, w0, num_rounds=rounds, on_round=keep_release)
        if self._release.aggregation is not None:
            summed = self.has_replies
            self.counts = self.counts[summed]
            self.released = self.released[summed]

    @property
    def has_replies(self) -> NDArray[np.bool_]:
        """In which rounds anybody replied."""
        return np.asarray(self.counts.any(axis=1))

    def __call__(self, message: Message, context: Context) -> Message:
        """The answer of one client, unless it is lost."""
        round_ = self._rounds_done + 1
        # clients that return parameters get no Order
        order: Mapping[str, Any] = message.content.config_records.get(ORDER, ConfigRecord())
        stage = int(order.get("stage", 0))
        user = int(context.node_config["partition-id"])
        has_factor = bool(self.node_config) and user % FACTOR_EVERY == 0
        if has_factor:
            context.node_config.update(self.node_config)
        if stage == 2:
            self._asked.setdefault(round_, []).append(user)
        if message.metadata.message_type != "train" or stage in (1, 2, 4):
            return self._app(message, context)
        if not self._lets_through(round_, user, stage):
            raise RuntimeError("lost")
        direction = DIRECTIONS if has_factor else round_ % DIRECTIONS
        self.counts[round_ - 1, direction] += 1
        self._vector = OVER_NORM * self._release.clip_norm * self.directions[direction]
        if stage or has_factor:
            return self._app(message, context)
        w = message.content.array_records[ARRAYS]
        layout = Layout.of(w)
        if self._parameters:
            trained = layout.unflatten(layout.flatten(w) - self._vector)
            return Message(RecordDict({ARRAYS: trained}), reply_to=message)
        if direction not in self._replies:
            gradient = layout.unflatten(self._vector)
            self._replies[direction] = RecordDict({GRADIENT: gradient})
        return Message(self._replies[direction], reply_to=message)

    def _lets_through(self, round_: int, user: int, stage: int) -> bool:
        """Whether a client answers; in a secure sum exactly as many as are needed."""
        if not stage:
            full = self.counts[round_ - 1].sum() >= MOST_REPLIES
            return round_ % EMPTY_EVERY != 0 and not full and self._source.random() >= DROPPED
        rules = self._release.aggregation
        assert rules is not None
        if round_ not in self._kept:
            asked = self._asked[round_]
            enough = _survivors(self._release, rules)
            chosen = self._source.permutation(asked)[:enough].tolist()
            self._kept[round_] = set(chosen) if len(chosen) == enough else set()
        return user in self._kept[round_]


# --- what they show


def _estimate(strategy: PPSGD, seen: Canaries, planned: int) -> Audit:
    release = strategy.release
    metrics = strategy.training.metrics
    share = 0.0 if metrics is None else metrics.share
    limit = release.clip_norm * math.sqrt(1 - share)
    more = 1.0  # noise in the sum than is charged for: each client that is let through adds some
    rules = release.aggregation
    if rules is not None:
        more = math.sqrt(_survivors(release, rules) / release.noise_shares)

    full = seen.counts[:, :DIRECTIONS] @ seen.directions[:DIRECTIONS]
    gain, weight, noise = _fit_gain(full, seen.released, limit)
    own = np.outer(seen.counts[:, DIRECTIONS], seen.directions[DIRECTIONS])
    own_gain, own_weight, noise = _fit_gain(own, noise, limit)
    replied = seen.has_replies
    std = float(np.sqrt(np.mean(noise[replied] ** 2)))
    std_error = 1 / math.sqrt(2 * noise[replied].size)  # relative

    def noise_over_gain(gain: float, gain_error: float, factor: float) -> Estimate:
        z = std / gain / release.clip_norm
        z_error = abs(z) * math.hypot(std_error, gain_error)
        return Estimate(z, z_error, more * release.noise_multiplier / factor)

    gain_error = std / limit / math.sqrt(weight) if weight else math.inf
    estimates = {NOISE: noise_over_gain(gain, gain_error, 1.0)}
    if own_weight:
        own_error = std / limit / math.sqrt(own_weight) / FACTOR
        estimates[OWN_NOISE] = noise_over_gain(own_gain, own_error, FACTOR)
    estimates["gain"] = Estimate(gain, gain_error, 1.0)
    estimates["noise of empty rounds"] = _empty_rounds(noise, replied)
    estimates["kurtosis"] = _kurtosis(noise)

    measured = release
    z = estimates[NOISE].value
    if z > 0:
        measured = replace(release, noise_multiplier=min(max(z / more, 1e-3), 1e6))
    charged = strategy.ledger.releases
    last_charged = charged[-1][0] if charged else release
    nothing = Ledger(strategy.ledger.delta)
    return Audit(
        release=release,
        rounds=strategy.rounds_done,
        size=noise.shape[1],
        estimates=estimates,
        chances={**_quietest(noise), **_resemblance(noise)},
        charged=charged,
        planned_rounds=planned,
        epsilon_charged=nothing.record(last_charged, planned).epsilon(),
        epsilon_measured=nothing.record(measured, planned).epsilon(),
    )


def _fit_gain(sent: Floats, released: Floats, limit: float) -> tuple[float, float, Floats]:
    """The gain in released = gain · limit · sent + noise by least squares, Σ sent², the noise."""
    weight = float(np.vdot(sent, sent))
    if not weight:
        return math.nan, 0.0, released
    gain = float(np.vdot(sent, released)) / weight / limit
    sent *= gain * limit
    return gain, weight, np.subtract(released, sent, out=sent)


def _empty_rounds(noise: Floats, replied: NDArray[np.bool_]) -> Estimate:
    """The standard deviation of the rounds in which nobody replied, relative to the others."""
    if replied.all() or not replied.any():
        return Estimate(1.0, 0.0, 1.0)
    empty = noise[~replied]
    others = noise[replied]
    ratio = math.inf
    typical = float(np.sqrt(np.mean(others**2)))
    if typical:
        ratio = float(np.sqrt(np.mean(empty**2))) / typical
    error = math.sqrt(1 / (2 * empty.size) + 1 / (2 * others.size))
    return Estimate(ratio, error, 1.0)


def _kurtosis(noise: Floats) -> Estimate:
    """E n⁴ / (E n²)², 3 ± √(24/n) for a Gaussian."""
    power = float(np.mean(noise**2))
    kurtosis = 0.0
    if power:
        kurtosis = float(np.mean(noise**4)) / power**2
    return Estimate(kurtosis, math.sqrt(24 / noise.size), 3.0)


def _quietest(noise: Floats) -> dict[str, float]:
    """The chance of a coordinate, or of CELL coordinates of a round, as quiet as was found."""
    name = "so little noise in one coordinate, or in a stretch of one round"
    typical = float(np.mean(noise**2))
    if not typical:
        return {name: 0.0}
    rounds, size = noise.shape
    by_coordinate = np.sum(noise**2, axis=0) / typical
    chances = [size * chi2.cdf(by_coordinate.min(), rounds)]
    cells = size // CELL
    if cells:
        # rounds × cells × CELL
        stretches = noise[:, : cells * CELL].reshape(rounds, cells, CELL)
        by_cell = np.einsum("rck,rck->rc", stretches, stretches) / typical
        chances.append(by_cell.size * chi2.cdf(by_cell.min(), CELL))
    return {name: min(1.0, len(chances) * float(min(chances)))}


def _resemblance(noise: Floats) -> dict[str, float]:
    """The chance of the largest correlation of the noise with itself, of those at all distances.

    Σ_i n_i·n_{i+k} for all k at once, as the inverse transform of |transform|²; each is 0 ± √pairs
    for independent values of variance 1.
    """
    size = noise.shape[1]
    row = noise[: max(1, MOST_COMPARED // size)].astype(np.float32).reshape(-1)
    std = float(np.sqrt(np.mean(row.astype(np.float64) ** 2)))
    if not std:
        return {"no noise": 0.0}
    row /= std
    fewest = min(FEWEST_COMPARED, len(row) // 2)
    padded = fft.next_fast_len(2 * len(row), real=True)
    spectrum = fft.rfft(row, padded)
    power = np.square(spectrum.real) + np.square(spectrum.imag)
    products = fft.irfft(power, padded)[1 : len(row) - fewest + 1]
    pairs = len(row) - np.arange(1, len(products) + 1)
    off = products / np.sqrt(pairs)  # standard errors
    worst = int(np.argmax(np.abs(off)))
    chance = 2 * len(off) * float(norm.sf(abs(off[worst])))
    correlation = float(products[worst] / pairs[worst])
    rounds, coordinates = divmod(worst + 1, size)
    name = (
        f"noise repeats itself, correlation {correlation:+.2g} at a distance of {rounds} rounds "
        f"and {coordinates} coordinates"
    )
    return {name: min(1.0, chance)}
