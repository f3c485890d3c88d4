"""What to know before training: noise, rounds, signal to noise, and the α to start with.

Numbers in, a :class:`Plan` out; nothing here touches data.
"""

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeAlias, get_type_hints

from flwr_ppsgd.algorithm import Cohort, FixedSize, Poisson, Release, SecureSum
from flwr_ppsgd.checks import require
from flwr_ppsgd.lab.theory import (
    Bound,
    Minimiser,
    Theorem,
    favours_local,
    noise_scale,
    theorem_b_4,
    threshold_noise_multiplier,
)
from flwr_ppsgd.ledger import Ledger, affordable_rounds, calibrate_noise
from flwr_ppsgd.secure.graph import design, survivors_needed
from flwr_ppsgd.settings import key_of, name_of, override, part_of, read_toml, typed, with_keys
from flwr_ppsgd.statement import json_number, rounded_up

Lacking: TypeAlias = Callable[[Mapping[str, Any]], list[str]]

SHOWN_ALPHA_QS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, math.inf)
EASED = 30.0  # measured on synthetic problems, not derived: docs/choosing-alpha.md
LEAST_EPSILON = 1e-6  # a smaller ε is taken to be 0
LEAST_NOISE = 1e-3  # a smaller multiplier is taken to pay for no round
LARGEST_SHARE = 0.1  # of a user, that δ may be without a caution
EXPERIMENT_KEYS = {"features": "dimension"}  # an experiment's word for what a plan asks for

ASKED = {  # what a plan cannot do without, and how it is asked for
    "population": "--population N: the number of enrolled users (1000)",
    "rate": (
        "--rate Q: the chance that a user takes part in a round (0.01), or --cohort-size for a "
        "fixed number of users"
    ),
    "rounds": (
        "--rounds T: the number of rounds (1000), or --passes with --samples-per-user and "
        "--batch-size"
    ),
    "samples-per-user": (
        "--samples-per-user S: the number of samples per user (100), to turn --passes into rounds"
    ),
    "delta": "--delta D: the δ at which ε is stated, well below 1/population (1e-5)",
    "epsilon": "--epsilon E: the ε that all rounds together may cost (2.0), or --noise-multiplier",
    "dimension": "--dimension D: the number of shared parameters in w (7850)",
    "batch-size": "--batch-size M: the number of samples that a user draws in a round (10)",
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a plan is made for.

    Give ``rate`` or ``cohort_size``, ``rounds`` or ``passes`` with ``samples_per_user``,
    ``epsilon`` or ``noise_multiplier``, as in an experiment file. ``gradient_std``,
    ``smoothness``, ``distance`` and ``spread`` are known from public data, or guesses; what is not
    given is assumed, and the plan says so.

    Args:
        population: N, the number of enrolled users.
        rate: q, the chance that a user takes part in a round.
        cohort_size: the exact number of users per round.
        rounds: T.
        passes: over each user's samples.
        samples_per_user: n, to turn passes into rounds.
        batch_size: m.
        dimension: d_w, the number of shared parameters.
        delta: δ.
        epsilon: ε of all rounds together.
        noise_multiplier: z.
        clip_norm: C; with 1, every length is in units of C.
        gradient_std: σ, the standard deviation of one sample's gradient at the optimum.
        smoothness: L.
        distance: ‖v‖, how far the users' common optimum is from the start.
        spread: the root mean square of the users' distances from it.
        secure_honest: h of a secure sum; None: the server is trusted.
        secure_colluding: t of a secure sum.
    """

    population: int
    rate: float | None = None
    cohort_size: int | None = None
    rounds: int | None = None
    passes: float | None = None
    samples_per_user: float | None = None
    batch_size: int
    dimension: int
    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    clip_norm: float = 1.0
    gradient_std: float | None = None
    smoothness: float | None = None
    distance: float | None = None
    spread: float = 0.0
    secure_honest: int | None = None
    secure_colluding: int | None = None

    def __post_init__(self) -> None:
        for name in ("rounds", "batch_size", "dimension"):
            value = getattr(self, name)
            key = key_of(name)
            holds = value is None or value >= 1
            require(
                holds,
                f"{key} must be at least 1",
                value,
                f"change {key}",
            )
        for name in ("passes", "samples_per_user", "gradient_std", "smoothness", "distance"):
            value = getattr(self, name)
            key = key_of(name)
            holds = value is None or 0 < value < math.inf
            require(
                holds,
                f"{key} must be positive and finite",
                value,
                f"change {key}",
            )
        same = "0 is users who share one optimum"
        require(
            0 <= self.spread < math.inf,
            "spread must not be negative",
            self.spread,
            same,
        )
        self._refuse_both("rate", "cohort_size")
        self._refuse_both("rounds", "passes")
        self.release(self.noise_multiplier or 0.0)
        Ledger(self.delta)

    def _refuse_both(self, one: str, other: str) -> None:
        if getattr(self, one) is not None and getattr(self, other) is not None:
            raise ValueError(f"{one} and {key_of(other)} are both given: leave one of them out")

    @classmethod
    def read(cls, flat: Mapping[str, Any]) -> Self:
        """From flat keys; an error asks for whatever is missing, one line for each."""
        lines = missing(flat)
        if lines:
            raise ValueError("\n  ".join(["a plan needs more numbers:", *lines]))
        hints = get_type_hints(cls)
        values = {}
        for key, value in part_of(flat, cls).items():
            name = name_of(key)
            values[name] = typed(key, value, hints[name])
        return cls(**values)

    def release(self, noise_multiplier: float) -> Release:
        """What is published in a round, at some noise multiplier."""
        rules = self.aggregation()
        return Release(self.cohort(), self.clip_norm, noise_multiplier, aggregation=rules)

    def aggregation(self) -> SecureSum | None:
        """The secure sum that is planned; None if the server is trusted."""
        return planned_sum(self.secure_honest, self.secure_colluding)

    def cohort(self) -> Cohort:
        """Who takes part in a round."""
        if self.cohort_size is not None:
            return FixedSize(self.population, self.cohort_size)
        return Poisson(self.population, self.rate or 0.0)

    @property
    def knows_constants(self) -> bool:
        """Whether σ, L and ‖v‖ are given, from which the advice on α follows."""
        return None not in (self.gradient_std, self.smoothness, self.distance)

    def planned_rounds(self) -> int:
        """T, or passes·n/(qm): a user takes part with chance q and then uses m of n samples."""
        if self.rounds is not None:
            return self.rounds
        if self.passes is None or self.samples_per_user is None:
            raise ValueError("a plan needs rounds, or passes and samples-per-user: give them")
        samples = self.passes * self.samples_per_user
        per_round = self.cohort().rate * self.batch_size
        return math.ceil(samples / per_round - 1e-9)


def planned_sum(honest: int | None, colluding: int | None) -> SecureSum | None:
    """A secure sum by its flat keys; None if neither is given."""
    if honest is None and colluding is None:
        return None
    if honest is None:
        raise ValueError("a secure sum needs secure-honest too: give both")
    return SecureSum(honest, colluding or 0)


def gather(path: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Flat keys of an experiment file, changed by those given on the command line.

    Args:
        path: the file, if there is one.
        given: by the name of a field; None is what was not given.
    """
    read = {} if path is None else with_keys(read_toml(path))
    flat = {EXPERIMENT_KEYS.get(key, key): value for key, value in read.items()}
    changes = {key_of(name): value for name, value in given.items() if value is not None}
    by_passes = "passes" in changes or "samples-per-user" in changes
    if by_passes and "rounds" not in changes:
        flat.pop("rounds", None)
    return override(flat, changes)


def missing(flat: Mapping[str, Any]) -> list[str]:
    """One line for each number that is not there and cannot be assumed."""
    has = set(flat)
    if "cohort-size" in has:
        has.add("rate")
    has.add("rounds" if "passes" in has else "samples-per-user")
    if "noise-multiplier" in has:
        has.add("epsilon")
    return [line for key, line in ASKED.items() if key not in has]


def ask(
    flat: Mapping[str, Any], reply: Callable[[str], str], lacking: Lacking = missing
) -> dict[str, Any]:
    """``flat`` with what is missing, asked for one line at a time.

    Args:
        flat: what is known.
        reply: shows a line and returns the answer.
        lacking: the lines that ask for what is missing.
    """
    answers = dict(flat)
    for key, line in ASKED.items():
        if line not in lacking(answers):
            continue
        answer = reply(line)
        try:
            answers[key] = tomllib.loads(f"value = {answer}")["value"]
        except tomllib.TOMLDecodeError:
            raise ValueError(f"{key} must be a number, got {answer!r}, as in {line}") from None
    return answers


@dataclass(frozen=True)
class Price:
    """What the planned rounds cost, and how much noise that takes.

    The noise is that on the average that moves w, in the units of ``clip_norm``.

    Args:
        rounds: T.
        epsilon: under zero-out neighbours, by PLD.
        epsilon_replace_one: under replace-one neighbours, by PLD.
        epsilon_rdp: under zero-out neighbours, by RDP.
        noise_multiplier: z.
        noise_multiplier_rdp: what RDP would need for the same ε.
        noise_multiplier_poisson: what Poisson cohorts need for the same ε.
        noise_multiplier_fixed_size: what cohorts of a fixed size need for the same ε.
        paper_epsilon_not_a_guarantee: ε as the authors' code computes it.
        affordable_rounds: the number of rounds that ε pays for.
        rounds_half_noise: the same with z/2, by RDP: at least this many.
        rounds_twice_noise: the same with 2z, by RDP: at least this many.
        noise_std: σ_ζ = zC/D.
        signal_to_noise: (C/√d_w)/σ_ζ.
        constant: the c that would make the formula of Theorem 5.1 (4.1 without sampling) exact.
        secure: what a secure sum asks for and costs; None if there is none.
    """

    rounds: int
    epsilon: float
    epsilon_replace_one: float
    epsilon_rdp: float
    noise_multiplier: float
    noise_multiplier_rdp: float
    noise_multiplier_poisson: float
    noise_multiplier_fixed_size: float
    paper_epsilon_not_a_guarantee: float
    affordable_rounds: int
    rounds_half_noise: int
    rounds_twice_noise: int
    noise_std: float
    signal_to_noise: float
    constant: float
    secure: "Secure | None" = None


@dataclass(frozen=True)
class Secure:
    """What a secure sum asks for and costs.

    Args:
        clients: of a round, on average.
        needed: how many of them must stay to the end of the round, so that it has a sum.
        may_drop_out: how many may go.
        neighbours: of each client.
        extra_noise: the standard deviation of the noise if all stay, over what is charged for.
        extra_noise_at_least_clients: the same if as many drop out as may.
        delta_for_neighbours: what random neighbours take of δ, over all rounds.
    """

    clients: int
    needed: int
    may_drop_out: int
    neighbours: int
    extra_noise: float
    extra_noise_at_least_clients: float
    delta_for_neighbours: float

    @classmethod
    def of(cls, release: Release, rounds: int) -> Self | None:
        """For a planned release; None if it has no secure sum."""
        rules = release.aggregation
        if rules is None:
            return None
        clients = math.floor(release.expected_users)
        needed = survivors_needed(rules, clients)
        return cls(
            clients=clients,
            needed=needed,
            may_drop_out=clients - needed,
            neighbours=design(rules, clients).neighbours,
            extra_noise=math.sqrt(clients / rules.honest),
            extra_noise_at_least_clients=math.sqrt(needed / rules.honest),
            delta_for_neighbours=rounds * release.failure,
        )


@dataclass(frozen=True)
class Advice:
    """Which side of Lemma 4.6 the plan is on, and the α to start with.

    Args:
        samples_used: per user, over all rounds.
        threshold_samples: n* of Lemma 4.6.
        threshold_noise_multiplier: z*, the noise multiplier at which the lemma turns.
        critical_gradient_std: the σ up to which local learning is favoured.
        favours: "local" or "global".
        alpha_q: the αQ for which Theorem B.4 for L/EASED is smallest.
        step_shared: s_w there.
        step_personal: s_θ there.
        untrained: L·(‖v‖² + spread²)/4, the most that f(0) − f* can be.
        bound_alpha_q: the αQ for which Theorem B.4 is smallest for L itself.
        bound_bias: the first term of that bound.
        bound_deviation: its second term.
        bounds: (αQ, bound on f − f*) for L, both choices included.
        is_known: whether σ, L and ‖v‖ were given; else αQ is that of assumptions.
        assumptions: what the advice rests on.
    """

    samples_used: float
    threshold_samples: float
    threshold_noise_multiplier: float
    critical_gradient_std: float
    favours: str
    alpha_q: float
    step_shared: float
    step_personal: float
    untrained: float
    bound_alpha_q: float
    bound_bias: float
    bound_deviation: float
    bounds: tuple[tuple[float, float], ...]
    is_known: bool
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The answers to a question."""

    price: Price
    advice: Advice

    def as_data(self) -> dict[str, Any]:
        """All answers by name, as valid JSON: infinity is a word."""
        data: dict[str, Any] = valid({**asdict(self.price), **asdict(self.advice)})
        return data


def make(question: Question) -> Plan:
    """Work everything out."""
    rounds = question.planned_rounds()
    release = question.release(_noise_multiplier(question, rounds))
    ledger = Ledger(question.delta).record(release, rounds)
    spent = ledger.epsilon()
    if spent < LEAST_EPSILON:
        raise ValueError(
            f"delta = {question.delta:g} alone pays for all {rounds} rounds, so that ε is 0 and "
            "nothing can be planned: lower delta, or raise epsilon (lower noise-multiplier)"
        )
    target = question.epsilon or spent
    return Plan(
        price=_price(question, release, ledger, target),
        advice=_advise(question, release, rounds, target),
    )


def _noise_multiplier(question: Question, rounds: int) -> float:
    """z as given, or the least that keeps all rounds within ε."""
    z = question.noise_multiplier
    if z == 0:
        raise ValueError(
            "noise-multiplier must be above 0, got 0: without noise ε is infinite and nothing can "
            "be planned"
        )
    if z is not None:
        return z
    if question.epsilon is None:
        raise ValueError("a plan needs epsilon or noise-multiplier: give one of them")
    return calibrate_noise(
        epsilon=question.epsilon,
        delta=question.delta,
        cohort=question.cohort(),
        rounds=rounds,
        aggregation=question.aggregation(),
    )


def _price(
    question: Question,
    release: Release,
    ledger: Ledger,
    target: float,
) -> Price:
    rounds = ledger.rounds
    delta = question.delta
    cohort = release.cohort
    z = release.noise_multiplier
    noise_std = release.usual_noise_std / release.denominator
    spent = ledger.epsilon()
    formula = noise_scale(
        clip_norm=question.clip_norm,
        rounds=rounds,
        total=cohort.population,
        epsilon=spent,
        delta=delta,
        constant=1.0,
    )
    poisson, fixed = _twins(cohort)
    by_rdp = calibrate_noise(
        epsilon=target,
        delta=delta,
        cohort=cohort,
        rounds=rounds,
        method="rdp",
        aggregation=release.aggregation,
    )
    z_poisson = z
    given = question.noise_multiplier is not None
    if cohort != poisson or given or release.aggregation is not None:
        z_poisson = calibrate_noise(
            epsilon=target,
            delta=delta,
            cohort=poisson,
            rounds=rounds,
        )
    z_fixed = calibrate_noise(
        epsilon=target,
        delta=delta,
        cohort=fixed,
        rounds=rounds,
    )
    affordable = rounds
    if question.noise_multiplier is not None and question.epsilon is not None:
        affordable = affordable_rounds(
            max_epsilon=target,
            delta=delta,
            release=release,
        )
    return Price(
        rounds=rounds,
        epsilon=spent,
        epsilon_replace_one=ledger.epsilon("replace-one"),
        epsilon_rdp=ledger.epsilon(method="rdp"),
        noise_multiplier=z,
        noise_multiplier_rdp=by_rdp,
        noise_multiplier_poisson=z_poisson,
        noise_multiplier_fixed_size=z_fixed,
        paper_epsilon_not_a_guarantee=ledger.paper_epsilon(),
        affordable_rounds=affordable,
        rounds_half_noise=_rounds_by_rdp(
            release,
            z * 0.5,
            target,
            delta,
        ),
        rounds_twice_noise=_rounds_by_rdp(
            release,
            z * 2.0,
            target,
            delta,
        ),
        noise_std=noise_std,
        signal_to_noise=release.signal_to_noise(question.dimension),
        constant=noise_std / formula,
        secure=Secure.of(release, rounds),
    )


def _twins(cohort: Cohort) -> tuple[Poisson, FixedSize]:
    """Cohorts with the same expected number of users per round, Poisson and of a fixed size."""
    size = max(1, round(cohort.rate * cohort.population))
    return Poisson(cohort.population, cohort.rate), FixedSize(cohort.population, size)


def _rounds_by_rdp(
    release: Release,
    z: float,
    epsilon: float,
    delta: float,
) -> int:
    """The rounds that ε pays for at another noise multiplier, by RDP: quick, a little too few."""
    other = replace(release, noise_multiplier=z)
    return affordable_rounds(
        max_epsilon=epsilon,
        delta=delta,
        release=other,
        method="rdp",
    )


@dataclass(frozen=True)
class _Known:
    """σ, L and ‖v‖: as given, or as assumed."""

    sigma: float
    smoothness: float
    distance: float

    @classmethod
    def of(cls, question: Question) -> "_Known":
        smoothness = question.smoothness or 2.0
        return cls(
            sigma=question.gradient_std or question.clip_norm,
            smoothness=smoothness,
            distance=question.distance or 2 * question.clip_norm / smoothness,
        )


def theorem(
    question: Question,
    release: Release,
    rounds: int,
    sigma: float,
    smoothness: float,
) -> Theorem:
    """Theorem B.4 for the plan's numbers, in the additive model."""
    variance = sigma**2 / question.batch_size
    return theorem_b_4(
        population=question.population,
        rate=release.cohort.rate,
        rounds=rounds,
        dimension=question.dimension,
        smoothness=smoothness,
        variance_w=variance,
        variance_theta=variance,
        noise_std=release.usual_noise_std / release.denominator,
    )


def _advise(
    question: Question,
    release: Release,
    rounds: int,
    epsilon: float,
) -> Advice:
    known = _Known.of(question)
    z_star = _threshold(question, release, known.sigma)
    threshold_rounds = _threshold_rounds(
        release,
        z_star,
        rounds,
        epsilon,
        question.delta,
    )
    critical = math.inf
    if z_star:
        critical = known.sigma * release.noise_multiplier / z_star
    bounds = theorem(
        question,
        release,
        rounds,
        known.sigma,
        known.smoothness,
    )
    minimiser = Minimiser.additive_norms(question.population, known.distance, question.spread)
    best = bounds.best(minimiser)
    advised = bounds.eased(EASED).best(minimiser)
    rate = release.cohort.rate
    return Advice(
        samples_used=rounds * rate * question.batch_size,
        threshold_samples=threshold_rounds * rate * question.batch_size,
        threshold_noise_multiplier=z_star,
        critical_gradient_std=critical,
        favours=_favoured(question, release, known.sigma),
        alpha_q=advised.alpha * bounds.denominator,
        step_shared=advised.steps.shared,
        step_personal=advised.steps.personal,
        untrained=known.smoothness * (known.distance**2 + question.spread**2) / 4,
        bound_alpha_q=best.alpha * bounds.denominator,
        bound_bias=best.bias,
        bound_deviation=best.deviation,
        bounds=_shown(bounds, minimiser, best, advised),
        is_known=question.knows_constants,
        assumptions=tuple(_assumptions(question, known)),
    )


def _threshold(
    question: Question,
    release: Release,
    sigma: float,
) -> float:
    """z* of Lemma 4.6."""
    return threshold_noise_multiplier(
        population=question.population,
        rate=release.cohort.rate,
        batch_size=question.batch_size,
        dimension=question.dimension,
        sigma=sigma,
        clip_norm=question.clip_norm,
    )


def _favoured(
    question: Question,
    release: Release,
    sigma: float,
) -> str:
    local = favours_local(
        population=question.population,
        rate=release.cohort.rate,
        batch_size=question.batch_size,
        dimension=question.dimension,
        sigma=sigma,
        noise_std=release.usual_noise_std / release.denominator,
    )
    return "local" if local else "global"


def _shown(
    bounds: Theorem,
    minimiser: Minimiser,
    *choices: Bound,
) -> tuple[tuple[float, float], ...]:
    """(αQ, bound) for a few αQ, those of the choices included."""
    alpha_qs = {*SHOWN_ALPHA_QS}
    alpha_qs.update(choice.alpha * bounds.denominator for choice in choices)
    shown = []
    for alpha_q in sorted(alpha_qs):
        bound = bounds.bound(alpha_q / bounds.denominator, minimiser)
        shown.append((alpha_q, bound.total))
    return tuple(shown)


def _threshold_rounds(
    release: Release,
    z_star: float,
    rounds: int,
    epsilon: float,
    delta: float,
) -> float:
    """The rounds T* for which the noise that ε needs is z*, so that n* = T*·q·m.

    It is found by RDP and scaled to be right at the plan's own (z, T): RDP is a few percent loose,
    and equally so nearby.
    """
    z = release.noise_multiplier
    without_sampling = rounds * (z_star / z) ** 2  # z² ∝ T exactly
    if not release.amplifies:
        return without_sampling
    unit = Release(release.cohort, 1.0, z)
    here = _rounds_by_rdp(unit, z, epsilon, delta) if z > LEAST_NOISE else 0
    if not here:
        return without_sampling
    there = _rounds_by_rdp(unit, z_star, epsilon, delta) if z_star > LEAST_NOISE else 0
    return there * rounds / here


def _assumptions(question: Question, known: _Known) -> list[str]:
    """What the advice rests on, in words; what was given is not repeated."""
    lines = [
        "f is convex and additive, ℓ(y, (w + θ_i)ᵀx), samples are fresh, and the model used is the "
        "average over rounds",
        f"no gradient is longer than the clip norm (G ≤ C = {question.clip_norm:g}): clipping is "
        "not in the theory",
    ]
    if question.spread == 0:
        lines.append(
            "all users share one optimum (--spread 0): if they differ, more local than this is "
            "better"
        )
    if question.gradient_std is None:
        lines.append(
            f"σ = C = {known.sigma:g}, the largest it can be (--gradient-std): smaller σ favours "
            "local learning"
        )
    if question.smoothness is None:
        lines.append(
            f"L = {known.smoothness:g}: squared loss with features of norm at most 1 (--smoothness)"
        )
    if question.distance is None:
        lines.append(
            f"‖v‖ = 2C/L = {known.distance:g}: the first gradients are about as long as C "
            "(--distance)"
        )
    return lines


def in_words(question: Question, plan: Plan) -> str:
    """The plan as it is printed."""
    price = _price_lines(question, plan.price)
    advice = _advice_lines(question, plan.price, plan.advice)
    return "\n".join([*price, "", *advice])


def _price_lines(question: Question, price: Price) -> list[str]:
    cohort = question.cohort()
    fixed = price.noise_multiplier_fixed_size
    poisson = price.noise_multiplier_poisson
    rows = [
        (
            "plan",
            f"{cohort.population} users, {_drawn(cohort)} per round, {price.rounds} rounds, "
            f"d = {question.dimension}",
        ),
        ("noise multiplier z", _noise_words(question, price)),
        (
            f"ε at δ = {question.delta:g}",
            f"{rounded_up(price.epsilon)} zero-out: a user contributes nothing "
            f"(RDP {rounded_up(price.epsilon_rdp)})",
        ),
        (
            "",
            f"{rounded_up(price.epsilon_replace_one)} replace-one: a user's data exchanged, the "
            "paper's definition",
        ),
        (
            "rounds affordable",
            f"{price.affordable_rounds}; with half the noise {price.rounds_half_noise} or more, "
            f"with twice {price.rounds_twice_noise} or more (RDP)",
        ),
        (
            "noise on the mean",
            f"σ_ζ = zC/D = {price.noise_std:.3g} per coordinate of w, for "
            f"C = {question.clip_norm:g}",
        ),
        (
            "signal to noise",
            f"{price.signal_to_noise:.3g} per coordinate and round: C/√d, all users agreeing, over "
            "σ_ζ",
        ),
        (
            "fixed-size cohorts",
            f"need z = {fixed:.4g}, Poisson {poisson:.4g}: {fixed / poisson:.3g} times the noise "
            "for the same ε",
        ),
        ("paper's formula", _formula(cohort, price)),
    ]
    if price.secure is not None:
        rows += secure_rows(price.secure, question.aggregation())
    rows += cautions(question.delta, cohort.population)
    return [f"{name:<19} {text}" for name, text in rows]


def cautions(delta: float, population: int) -> list[tuple[str, str]]:
    """A row about a δ that is too large to protect anybody."""
    if delta * population <= LARGEST_SHARE:
        return []
    return [("caution", f"δ should be well below 1/population = {1 / population:g}")]


def secure_rows(secure: Secure, rules: SecureSum | None) -> list[tuple[str, str]]:
    """A secure sum in words: what it asks for, and what it costs."""
    assert rules is not None
    rows = [
        (
            "secure sum",
            f"{secure.needed} of {secure.clients} clients must stay to the end of a round: "
            f"{secure.may_drop_out} may drop out, {rules.colluding} may collude; each has "
            f"{secure.neighbours} neighbours",
        ),
        (
            "",
            f"with all present the noise is {secure.extra_noise - 1:.1%} more than is charged for "
            f"(√({secure.clients}/{rules.honest})), with the fewest "
            f"{secure.extra_noise_at_least_clients - 1:.1%}; σ_ζ above is with all",
        ),
        ("", "sampling gains nothing: clients see who else takes part"),
    ]
    if secure.delta_for_neighbours:
        taken = f"{secure.delta_for_neighbours:.2g}"
        rows.append(("", f"random neighbours take {taken} of δ in all rounds"))
    return rows


def _drawn(cohort: Cohort) -> str:
    if isinstance(cohort, FixedSize):
        return f"exactly {cohort.size}"
    return f"each with chance {cohort.rate:g}"


def _noise_words(question: Question, price: Price) -> str:
    z = price.noise_multiplier
    rdp = price.noise_multiplier_rdp
    if question.noise_multiplier is None:
        return f"{z:.4g} by PLD; RDP would have needed {rdp:.4g}"
    needed = price.noise_multiplier_poisson
    if question.cohort_size is not None:
        needed = price.noise_multiplier_fixed_size
    target = question.epsilon or price.epsilon
    return f"{z:.4g}, as given; for ε = {target:.4g} it takes {needed:.4g} by PLD, {rdp:.4g} by RDP"


def _formula(cohort: Cohort, price: Price) -> str:
    """The theorem of the paper that is about these cohorts, and the constant it would need."""
    if cohort.rate == 1:
        return f"Theorem 4.1 gives this σ_ζ for c = {price.constant:.3g}"
    limit = cohort.rate**2 * price.rounds
    return (
        f"Theorem 5.1 gives this σ_ζ for c = {price.constant:.3g}; it asks for ε < c₁q²T, and here "
        f"q²T = {limit:.3g}"
    )


def _advice_lines(
    question: Question,
    price: Price,
    advice: Advice,
) -> list[str]:
    by_alpha_q = [f"{alpha_q:.3g}: {bound:.3g}" for alpha_q, bound in advice.bounds]
    lines = [
        _threshold_words(price, advice),
        _critical_words(question, advice),
        *_start_words(advice),
        "for L itself, which holds for every single sample, it is smallest at "
        f"αQ = {advice.bound_alpha_q:.3g}: {advice.bound_bias:.3g} (bias, from too few rounds) + "
        f"{advice.bound_deviation:.3g} (samples and noise).",
        "bound on f − f* by αQ:  " + "  ".join(by_alpha_q),
    ]
    if advice.bound_bias + advice.bound_deviation >= advice.untrained:
        lines.append(
            f"caution: not training at all costs at most {advice.untrained:.3g}; take the bound as "
            "a direction."
        )
    lines.append("assuming that")
    return lines + [f"  - {line}" for line in advice.assumptions]


def _start_words(advice: Advice) -> list[str]:
    """The αQ to start with; where it follows from assumptions and is 0, that it is not known."""
    if advice.alpha_q == 0 and not advice.is_known:
        return [
            "αQ: not known. Under the assumptions below the bound (Theorem B.4) is smallest at 0, "
            "local learning; whether sharing gains is in users' data.",
            "Give --gradient-std, --smoothness and --distance from public data, compare αQ in a "
            'sweep, or use method = "auto" (ppsgd plan without the options of the paper), where '
            "nothing is to be chosen.",
        ]
    step = max(advice.step_shared, advice.step_personal)
    lines = [
        f"start with αQ = {advice.alpha_q:.3g} and step = {step:.3g} "
        f"(s_w = {advice.step_shared:.3g}, s_θ = {advice.step_personal:.3g}): there the bound "
        f"(Theorem B.4) is smallest for L/{EASED:g}."
    ]
    if advice.alpha_q == 0:
        lines.append("αQ = 0 releases nothing: ε is then 0, whatever was planned.")
    return lines


def _threshold_words(price: Price, advice: Advice) -> str:
    threshold = f"{advice.threshold_samples:.4g} samples per user"
    if advice.threshold_samples * price.rounds < advice.samples_used:
        threshold = "less than one round"
    side = "below"
    better = "global learning (large α)"
    if advice.favours == "local":
        side = "above"
        better = "local learning (small α)"
    return (
        f"threshold n* of Lemma 4.6: {threshold}; you use {advice.samples_used:.4g} samples, "
        f"{side} it: the variance favours {better}."
    )


def _critical_words(question: Question, advice: Advice) -> str:
    critical = advice.critical_gradient_std
    line = f"with this noise it favours local up to σ = {critical:.3g}, global beyond"
    if question.gradient_std is None and critical >= question.clip_norm:
        return f"{line}; σ cannot exceed C, so local in any case."
    return f"{line}."


def valid(value: Any) -> Any:
    """The same with lists for tuples and words for infinite numbers, as JSON needs it."""
    if isinstance(value, dict):
        return {key: valid(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [valid(item) for item in value]
    if isinstance(value, float):
        return json_number(value)
    return value
