"""Does the running code give the noise that it charges for? A conformance audit by canaries.

Canary clients send vectors ten times too long through the real strategy: most of them along a few
known directions, some along a coordinate of their own. The auditor knows who replied and looks only
at what is released: how far the known directions move (gain: the clip, the denominator), and how
the rest scatters (noise). ẑ = noise / gain is then compared with the z that the ledger charges for.
The noise of all coordinates and rounds, as one long row of numbers, must not resemble itself at any
distance.

A lower bound on ε needs no model of the mechanism's inside. Whoever knows who took part in a round
guesses that a canary was there if its coordinate is above half a clip norm. With the share p of
canaries that are found and the share f of other coordinates that are taken for one, both at the far
end of a Clopper–Pearson interval of ``CONFIDENCE`` together,

    μ ≥ Φ⁻¹(p) − Φ⁻¹(f)   and   ε ≥ that of a Gaussian of sensitivity μ and standard deviation 1,

for one round at the ledger's δ. The second step takes the trade-off between p and f to be a
Gaussian's, which the other measures here are to show (Nasr et al. 2023). It is compared with the ε
that one round without secret sampling is charged for.

What the server does with a released sum is post-processing, and so is not audited: the strategy of
an audit takes plain steps, so that w shows the sum itself. Give it the release of a recipe, not the
recipe, and no ``max_epsilon``: the rounds of an audit are not those of a training.

Run the audit on a strategy of its own, never on a user's training.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray
from scipy import fft
from scipy.stats import beta, chi2, norm
from threadpoolctl import threadpool_limits

from flwr_ppsgd.algorithm import Poisson, Release
from flwr_ppsgd.client.app import client_app
from flwr_ppsgd.ledger import Ledger
from flwr_ppsgd.secure.graph import design, survivors_needed
from flwr_ppsgd.server.strategy import PPSGD
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.statement import rounded_up
from flwr_ppsgd.wire import ARRAYS, GRADIENT, ORDER, Layout, Order

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DIRECTIONS = 2
OVER_NORM = 10.0  # canaries send vectors of this many clip norms
DROPPED = 0.3  # share of replies withheld: dividing by the number received then shows
EMPTY_EVERY = 5  # in every fifth round nobody replies at all
MOST_REPLIES = 1000  # per round
FEWEST_ROUNDS = 20
FEWEST_SECURE = 5  # rounds of a secure sum
MOST_PAIRS = 200_000  # of neighbours over all rounds of a secure sum: about half a minute
MOST_ROUNDS = 1000
MOST_MESSAGES = 60_000  # over all rounds
MOST_NUMBERS = 12 * 10**8  # in all messages together
MOST_RELEASED = 2 * 10**7  # numbers in all releases, which are kept in memory
OWN_SHARE = 0.2  # of the replies are along a coordinate of their own
MOST_OWN = 50  # of these per round
SMALLEST_SENSITIVITY = 1e-3  # in standard deviations of the noise
CONFIDENCE = 0.999  # of the lower bound on ε
LIMIT = 4.0  # standard errors
UNLIKELY = 6.3e-5  # the chance to be off by more than LIMIT, on either side
WANTED = 0.01  # standard error of ẑ / z to aim for
INCONCLUSIVE = 0.02
MOST_COMPARED = 8 * 10**6  # numbers that are compared with each other at every distance
FEWEST_COMPARED = 10_000  # pairs at a distance: their mean is close to normal
CELL = 1024  # coordinates whose noise in one round is looked at by itself
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
        quietest: the chance of a coordinate, or of a stretch of one round, as quiet as the
            quietest one.
        resemblance: of the noise to itself, at the distance where it is largest.
        charged: what the ledger holds.
        planned_rounds: the rounds for which ε is computed.
        epsilon_charged: ε of the planned rounds at the noise that is charged for.
        epsilon_measured: the same at the noise that was measured.
        one_round: ε of one round to whoever knows who took part, as charged.
        one_round_at_least: what the canaries show it to be at least, with ``CONFIDENCE``.
        residuals: in units of their own standard deviation, for the picture.
    """

    release: Release
    rounds: int
    size: int
    noise_multiplier: Estimate
    gain: Estimate
    others: Mapping[str, Estimate]
    quietest: float
    resemblance: "Resemblance"
    charged: tuple[tuple[Release, int], ...]
    planned_rounds: int
    epsilon_charged: float
    epsilon_measured: float
    one_round: float
    one_round_at_least: float
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
                "a coordinate has so little noise, or a stretch of one round, that by chance it "
                f"would happen in {self.quietest:.2g} of all audits"
            )
        if self.resemblance.chance < UNLIKELY:
            lines.append(f"noise repeats itself: {self.resemblance.in_words(self.size)}")
        if self.one_round_at_least > self.one_round:
            lines.append(
                f"epsilon of one round is at least {self.one_round_at_least:.4g}, and "
                f"{self.one_round:.4g} is charged"
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
        if self.verdict == "inconclusive":
            lines.append(
                f"These users' replies are too few to tell this noise to {INCONCLUSIVE:.0%}: audit "
                "with a larger population, or a smaller noise multiplier. The code is the same"
            )
        for name, found in self.others.items():
            title = name[0].upper() + name[1:]
            lines.append(
                f"{title} {found.value:+.2g} ± {found.error:.1g}, expected {found.expected:g}"
            )
        lines.append(
            f"A deployment of {self.planned_rounds} rounds would cost epsilon = "
            f"{rounded_up(self.epsilon_charged)} as charged, "
            f"{rounded_up(self.epsilon_measured)} at the measured noise"
        )
        lines.append(
            "Epsilon of one round to whoever knows who took part: at least "
            f"{self.one_round_at_least:.4g} by the canaries ({CONFIDENCE:.1%} confidence), "
            f"{self.one_round:.4g} as charged"
        )
        lines += [f"FOUND: {line}" for line in self.findings]
        return "\n".join(lines)


@dataclass(frozen=True)
class Resemblance:
    """How much the noise is like itself further on.

    Args:
        correlation: the largest one.
        distance: at which it is, in numbers of the row that all rounds form one after the other.
        chance: of one as large or larger at any distance.
    """

    correlation: float
    distance: int
    chance: float

    def in_words(self, size: int) -> str:
        """For a finding; ``size`` is the number of coordinates."""
        rounds, coordinates = divmod(self.distance, size)
        return (
            f"correlation {self.correlation:+.2g} at a distance of {rounds} rounds and "
            f"{coordinates} coordinates"
        )


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
    if strategy.training.enrolled.nodes is not None:
        raise ValueError("the audit brings its own nodes: build the strategy without enrolled")
    effort = _Effort.of(strategy.release, size)
    canaries = _Canaries(
        strategy.release,
        size,
        seed,
        strategy.training.replies,
        effort.most_replies,
    )
    rounds = effort.rounds
    if strategy.affordable_rounds is not None:
        rounds = min(rounds, strategy.affordable_rounds)
    with threadpool_limits(1):  # on a loaded machine, BLAS threads wait for each other
        if strategy.training.secure:
            rounds = max(FEWEST_SECURE, min(rounds, _secure_rounds(strategy.release)))
            seen = canaries.watch_secure(strategy, rounds)
        else:
            seen = canaries.watch(strategy, rounds)
        return _estimate(strategy, seen, planned_rounds)


def _secure_rounds(release: Release) -> int:
    """How many rounds of a secure sum are affordable: each pair of neighbours takes a while."""
    rules = release.aggregation
    assert rules is not None
    clients = math.floor(release.expected_users)
    pairs = clients * design(rules, clients).neighbours
    return int(MOST_PAIRS / max(1, pairs))


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
    edges = np.linspace(-5, 5, 81).tolist()
    axes.hist(
        found.residuals,
        bins=edges,
        density=True,
        color="#56B4E9",
        label="released",
    )
    x = np.linspace(-5, 5, 401)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    axes.plot(
        x,
        density,
        color="#D55E00",
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
    names = list(found.estimates)
    off = [estimate.errors_off for estimate in found.estimates.values()]
    reach = max(8.0, *(abs(errors) for errors in off)) + 2
    axes.axvspan(-LIMIT, LIMIT, color="0.9")
    axes.errorbar(
        off,
        names,
        xerr=1.0,
        fmt="o",
        color="#0072B2",
        capsize=3,
    )
    axes.set(
        xlabel=f"standard errors from the expected value (grey: up to {LIMIT:g})",
        xlim=(-reach, reach),
    )
    axes.invert_yaxis()


@dataclass(frozen=True)
class _Effort:
    """How much to send. More makes the estimates better; vectors that are long are sent less often.

    Args:
        rounds: the number of rounds.
        most_replies: the most canaries that reply in a round.
    """

    rounds: int
    most_replies: int

    @classmethod
    def of(cls, release: Release, size: int) -> "_Effort":
        """As many rounds as bring the standard error of the gain to ``WANTED``, within reason."""
        cohort = release.cohort
        messages = min(MOST_MESSAGES, MOST_NUMBERS / size)
        most_replies = max(1, min(MOST_REPLIES, int(messages / FEWEST_ROUNDS)))
        replying = min(most_replies, (1 - DROPPED) * cohort.rate * cohort.population)
        along = (1 - OWN_SHARE) * replying
        per_round = max(along**2 / DIRECTIONS, 1e-9) * (1 - 1 / EMPTY_EVERY)
        wanted = math.ceil((release.noise_multiplier / WANTED) ** 2 / per_round)
        affordable = min(MOST_ROUNDS, messages / max(replying, 1), MOST_RELEASED / size)
        rounds = int(max(FEWEST_ROUNDS, min(wanted, affordable)))
        return cls(rounds, most_replies)


@dataclass(frozen=True)
class _Seen:
    """What went in and what came out; one row per round.

    Args:
        along: the sum of the canaries along directions, each of length 1; rounds × coordinates.
        own: the coordinates of the canaries that have one of their own.
        released: on the scale of the sum; rounds × coordinates.
        replied: whether anybody replied.
    """

    along: Floats
    own: list[NDArray[np.intp]]
    released: Floats
    replied: NDArray[np.bool_]

    def sent(self) -> Floats:
        """The sum of all canaries, each of length 1; rounds × coordinates."""
        total = self.along.copy()
        for row, coordinates in zip(total, self.own, strict=True):
            row[coordinates] += 1.0
        return total


class _Canaries:
    """Clients that send 10·C, most along one of a few directions with disjoint supports.

    Args:
        release: of the strategy that is audited.
        size: the number of coordinates.
        seed: decides directions and whose replies are withheld.
        replies: "gradient" or "parameters", as the strategy expects them.
        most_replies: the most that reply in a round.
    """

    def __init__(
        self,
        release: Release,
        size: int,
        seed: int,
        replies: str,
        most_replies: int,
    ) -> None:
        self._release = release
        self._size = size
        self._most_replies = most_replies
        self._source = np.random.default_rng(seed)
        self._w = ArrayRecord([np.zeros(size)])
        self._layout = Layout.of(self._w)
        self._name = GRADIENT
        self._length = OVER_NORM * release.clip_norm
        if replies != "gradient":
            self._name = ARRAYS
            self._length = -self._length  # w is 0 here: w − w_i = −w_i
        self._directions = self._draw_directions()
        self._records = [self._record(direction) for direction in self._directions]

    def _draw_directions(self) -> Floats:
        width = self._size // DIRECTIONS
        signs = self._source.choice([-1.0, 1.0], self._size) / math.sqrt(width)
        directions = np.zeros((DIRECTIONS, self._size))
        for number, direction in enumerate(directions):
            block = slice(number * width, (number + 1) * width)
            direction[block] = signs[block]
        return directions

    def _record(self, direction: Floats) -> RecordDict:
        arrays = self._layout.unflatten(self._length * direction)
        return RecordDict({self._name: arrays})

    def watch_secure(self, strategy: PPSGD, rounds: int) -> _Seen:
        """The same for a secure sum: canaries go through the clients' own bound and masks.

        In each round as many are lost as may be, before they send anything masked. Rounds without
        a sum release nothing and are left out.
        """
        watched = _SecureCanaries(self._release, self._size, self._directions, self._source)
        grid = InProcessGrid(watched, self._release.cohort.population)  # type: ignore[arg-type]
        scale = self._release.denominator / strategy.steps.shared
        released: list[Floats] = []
        last = np.zeros(self._size)

        def look(round_: int, result: Result) -> None:
            nonlocal last
            w = self._layout.flatten(result.arrays)
            if round_ and watched.summed(round_):
                released.append(-scale * (w - last))
            last = w

        strategy.start(grid, self._w, num_rounds=rounds, on_round=look)
        summed = [round_ for round_ in range(1, rounds + 1) if watched.summed(round_)]
        return _Seen(
            along=np.array([watched.along(round_) for round_ in summed]).reshape(-1, self._size),
            own=[watched.own(round_) for round_ in summed],
            released=np.array(released).reshape(-1, self._size),
            replied=np.ones(len(summed), dtype=bool),
        )

    def watch(self, strategy: PPSGD, rounds: int) -> _Seen:
        """What goes in and what comes out, round by round."""
        grid = InProcessGrid(ClientApp(), self._release.cohort.population)
        scale = self._release.denominator / strategy.steps.shared
        seen = _Seen(
            along=np.zeros((rounds, self._size)),
            own=[],
            released=np.empty((rounds, self._size)),
            replied=np.zeros(rounds, dtype=bool),
        )
        for row in range(rounds):
            round_ = row + 1
            asked = strategy.configure_train(round_, self._w, ConfigRecord(), grid)
            grid.push_messages(asked)
            replying = self._replying(asked, nobody=round_ % EMPTY_EVERY == 0)
            kinds, own = self._roles(len(replying))
            arrays, _ = strategy.aggregate_train(round_, self._replies(replying, kinds, own))
            counts = np.bincount(kinds, minlength=DIRECTIONS).astype(float)
            seen.along[row] = counts @ self._directions
            seen.own.append(own)
            seen.released[row] = -scale * self._layout.flatten(arrays)
            seen.replied[row] = bool(replying)
        return seen

    def _replying(self, asked: list[Message], nobody: bool) -> list[Message]:
        """Those of the asked whose reply is not withheld."""
        keep = min(self._most_replies, round((1 - DROPPED) * len(asked)))
        if nobody:
            keep = 0
        chosen = self._source.permutation(len(asked))[:keep]
        return [asked[place] for place in chosen]

    def _roles(self, replying: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The directions of the first ones, and the coordinates of the others, no two the same."""
        alone = min(MOST_OWN, int(OWN_SHARE * replying), self._size)
        kinds = self._source.integers(0, DIRECTIONS, replying - alone)
        own = self._source.choice(self._size, alone, replace=False)
        return kinds.astype(np.intp), own.astype(np.intp)

    def _replies(
        self,
        replying: list[Message],
        kinds: NDArray[np.intp],
        own: NDArray[np.intp],
    ) -> Iterator[Message]:
        """One after the other: long vectors need not all be there at once."""
        for message, kind in zip(replying, kinds, strict=False):
            yield Message(self._records[kind], reply_to=message)
        for message, coordinate in zip(replying[len(kinds) :], own, strict=True):
            direction = np.zeros(self._size)
            direction[coordinate] = 1.0
            yield Message(self._record(direction), reply_to=message)


class _Canary:
    """A learner whose gradient is ten times too long."""

    num_examples = 1

    def __init__(self, vector: Floats) -> None:
        self._vector = vector

    def initial_theta(self) -> Floats:
        return np.zeros(0)

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:  # noqa: ARG002
        return self._vector, theta

    def evaluate(self, w: Floats, theta: Floats) -> dict[str, float]:  # noqa: ARG002
        return {}


class _SecureCanaries:
    """All clients of a secure sum, and what they were told to send in each round.

    Args:
        release: of the strategy that is audited.
        size: the number of coordinates.
        directions: along which most canaries are; one row each.
        source: decides who is lost and who sends what.
    """

    def __init__(
        self, release: Release, size: int, directions: Floats, source: np.random.Generator
    ) -> None:
        self._release = release
        self._size = size
        self._directions = directions
        self._source = source
        self._asked: dict[int, list[int]] = {}  # who sent shares, by round
        self._roles: dict[int, dict[int, Floats]] = {}  # of length 1, by round and client
        self._own: dict[int, list[int]] = {}
        self._app = client_app(self._learner)
        self._round = 0

    def __call__(self, message: Message, context: Context) -> Message:
        """The answer of one client, unless it is lost before the third exchange."""
        order = Order.from_flat(message.content[ORDER])
        self._round = order.round
        client = int(context.node_config["partition-id"])
        if order.stage == 2:
            self._asked.setdefault(order.round, []).append(client)
        if order.stage == 3 and client not in self._drawn(order.round):
            raise RuntimeError("lost")
        return self._app(message, context)

    def summed(self, round_: int) -> bool:
        """Whether enough sent something for a sum."""
        return bool(self._roles.get(round_))

    def along(self, round_: int) -> Floats:
        """The sum of the canaries along directions."""
        total = np.zeros(self._size)
        for vector in self._roles[round_].values():
            total += vector
        total[self._own[round_]] -= 1.0
        return total

    def own(self, round_: int) -> NDArray[np.intp]:
        """The coordinates of the canaries that have one of their own."""
        return np.array(self._own[round_], dtype=np.intp)

    def _learner(self, context: Context) -> _Canary:
        role = self._roles[self._round][int(context.node_config["partition-id"])]
        return _Canary(OVER_NORM * self._release.clip_norm * role)

    def _drawn(self, round_: int) -> dict[int, Floats]:
        """Who sends what: exactly as many as a sum needs, so that the noise is known."""
        if round_ not in self._roles:
            asked = self._asked[round_]
            kept = kept_in_audit(self._release)
            enough = len(asked) >= kept
            chosen: list[int] = self._source.permutation(asked)[:kept].tolist() if enough else []
            alone = min(MOST_OWN, int(OWN_SHARE * len(chosen)), self._size)
            self._own[round_] = self._source.choice(self._size, alone, replace=False).tolist()
            self._roles[round_] = {
                client: self._role(place, self._own[round_]) for place, client in enumerate(chosen)
            }
        return self._roles[round_]

    def _role(self, place: int, own: list[int]) -> Floats:
        if place >= len(own):
            direction: Floats = self._directions[self._source.integers(DIRECTIONS)]
            return direction
        alone = np.zeros(self._size)
        alone[own[place]] = 1.0
        return alone


def kept_in_audit(release: Release) -> int:
    """How many clients of a round the audit of a secure sum lets through."""
    rules = release.aggregation
    assert rules is not None
    clients = math.floor(release.expected_users)
    return max(survivors_needed(rules, clients), math.ceil((1 - DROPPED) * clients))


@dataclass(frozen=True)
class _Fit:
    """released = gain · limit · sent + noise, by least squares.

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
    def of(cls, seen: _Seen, limit: float) -> "_Fit":
        """``limit``: the length to which a canary's gradient is clipped."""
        gain = math.nan
        gain_error = math.inf
        noise = seen.released
        replied = seen.released
        sent = seen.sent()
        weight = float(np.vdot(sent, sent))
        if weight:
            gain = float(np.vdot(sent, seen.released)) / weight / limit
            sent *= gain * limit
            noise = np.subtract(seen.released, sent, out=sent)
            replied = noise[seen.replied]
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

    def noise_multiplier(self, release: Release) -> Estimate:
        """ẑ = noise / gain, in units of C."""
        z = self.std / self.gain / release.clip_norm
        error = math.inf
        if self.std:
            relative_std_error = self.std_error / self.std
            error = abs(z) * math.hypot(relative_std_error, self.gain_error)  # the gain should be 1
        return Estimate(z, error, release.noise_multiplier)


def _estimate(strategy: PPSGD, seen: _Seen, planned: int) -> Audit:
    release = strategy.release
    size = seen.released.shape[1]
    metrics = strategy.training.metrics
    share = 0.0 if metrics is None else metrics.share
    limit = release.clip_norm * math.sqrt(1 - share)
    fit = _Fit.of(seen, limit)
    added = release
    if release.aggregation is not None:  # each client that is let through adds its share
        more = math.sqrt(kept_in_audit(release) / release.noise_shares)
        added = replace(release, noise_multiplier=more * release.noise_multiplier)
    z = fit.noise_multiplier(added)
    charged = strategy.ledger.releases
    last_charged = charged[-1][0] if charged else release
    nothing = Ledger(strategy.ledger.delta)
    every = max(1, fit.noise.size // MOST_DRAWN)
    return Audit(
        release=release,
        rounds=strategy.rounds_done,
        size=size,
        noise_multiplier=z,
        gain=Estimate(fit.gain, fit.gain_error, 1.0),
        others=_independence(fit.noise, seen.replied),
        quietest=_quietest(fit.noise),
        resemblance=_resemblance(fit.noise),
        charged=charged,
        planned_rounds=planned,
        epsilon_charged=nothing.record(last_charged, planned).epsilon(),
        epsilon_measured=nothing.record(
            _measured(release, z.value * release.noise_multiplier / added.noise_multiplier), planned
        ).epsilon(),
        one_round=_one_round(nothing, last_charged, last_charged.noise_multiplier),
        one_round_at_least=_shown(nothing, last_charged, _sensitivity(seen, fit, limit)),
        residuals=fit.noise.reshape(-1)[::every] / (fit.std or 1.0),
    )


def _one_round(nothing: Ledger, release: Release, z: float) -> float:
    """ε of one round in which everyone is known to take part, at a noise multiplier z."""
    everyone = Poisson(release.cohort.population, 1.0)
    return nothing.record(replace(release, cohort=everyone, noise_multiplier=z)).epsilon()


def _shown(nothing: Ledger, release: Release, sensitivity: float) -> float:
    """ε of one round if one user moves the release by μ standard deviations of its noise.

    Args:
        nothing: an empty ledger.
        release: whose cohort is meant.
        sensitivity: μ; 0 is a good bound for a very small one.
    """
    if not sensitivity > SMALLEST_SENSITIVITY:
        return 0.0
    return _one_round(nothing, release, 1 / sensitivity)


def _sensitivity(seen: _Seen, fit: _Fit, limit: float) -> float:
    """μ ≥ Φ⁻¹(p) − Φ⁻¹(f), from who is found and who is taken for a canary at limit / 2."""
    mine = np.zeros(seen.released.shape, dtype=bool)
    for row, coordinates in zip(mine, seen.own, strict=True):
        row[coordinates] = True
    canaries = int(np.count_nonzero(mine))
    if not canaries:
        return 0.0
    above = seen.released - fit.gain * limit * seen.along > limit / 2
    found = int(np.count_nonzero(above & mine))
    mistaken = int(np.count_nonzero(above & ~mine))
    others = mine.size - canaries
    doubt = (1 - CONFIDENCE) / 2
    if not found or mistaken == others:
        return 0.0
    p = beta.ppf(doubt, found, canaries - found + 1)
    f = beta.ppf(1 - doubt, mistaken + 1, others - mistaken)
    return float(norm.ppf(p) - norm.ppf(f))


def _measured(release: Release, z: float) -> Release:
    """The release with the noise that was measured, as far as it can be priced."""
    if not z > 0:
        return release
    return replace(release, noise_multiplier=min(max(z, 1e-3), 1e6))


def _resemblance(noise: Floats) -> Resemblance:
    """The largest correlation of the noise with itself, at any distance in coordinates and rounds.

    Σ_i n_i·n_{i+k} for all k at once, as the inverse transform of |transform|²; each is 0 ± √pairs
    for independent values of variance 1.
    """
    rounds = max(1, MOST_COMPARED // noise.shape[1])
    row = noise[:rounds].astype(np.float32).reshape(-1)
    std = float(np.sqrt(np.mean(row.astype(np.float64) ** 2)))
    if not std:
        return Resemblance(1.0, 1, 0.0)
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
    return Resemblance(correlation, worst + 1, min(1.0, chance))


def _independence(noise: Floats, replied: NDArray[np.bool_]) -> dict[str, Estimate]:
    half = noise.shape[1] // 2
    first = noise[:, :half]
    second = noise[:, half : 2 * half]
    return {
        "noise of empty rounds": _empty_rounds(noise, replied),
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
    """The chance of a coordinate, or of CELL coordinates of a round, as quiet as was found."""
    typical = float(np.mean(noise**2))
    if not typical:
        return 0.0
    rounds, size = noise.shape
    by_coordinate = np.sum(noise**2, axis=0) / typical
    chances = [size * chi2.cdf(by_coordinate.min(), rounds)]
    cells = size // CELL
    if cells:
        # rounds × cells × CELL
        stretches = noise[:, : cells * CELL].reshape(rounds, cells, CELL)
        by_cell = np.einsum("rck,rck->rc", stretches, stretches) / typical
        chances.append(by_cell.size * chi2.cdf(by_cell.min(), CELL))
    return min(1.0, len(chances) * float(min(chances)))


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


def _correlation(a: Floats, b: Floats) -> Estimate:
    """Σab / Σ½(a² + b²), which is 0 ± 1/√n for independent values."""
    power = float(np.sum(a**2) + np.sum(b**2)) / 2
    correlation = 1.0
    if power:
        correlation = float(np.sum(a * b)) / power
    return Estimate(correlation, 1 / math.sqrt(a.size), 0.0)
