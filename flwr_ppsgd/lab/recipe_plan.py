"""What to know before the recipe runs: rounds, noise, the vote, and what signal w can carry.

Everything here follows from public numbers: ε, δ, the population, the number of shared parameters.
Whether users have anything in common does not, and the plan says so.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self, get_type_hints

from flwr_ppsgd.algorithm import Release, SecureSum
from flwr_ppsgd.checks import count, require
from flwr_ppsgd.lab.plan import (
    ASKED,
    LEAST_EPSILON,
    Secure,
    cautions,
    planned_sum,
    secure_rows,
    valid,
)
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.promise import rounded_up
from flwr_ppsgd.recipe import (
    MOST_VOTE_SHARE,
    PEOPLE_PER_NOISE,
    Recipe,
    least_voters,
    least_voters_for,
    noise_alone,
    recipe,
)
from flwr_ppsgd.settings import AUTO, name_of, part_of, typed

NEEDED = ("population", "delta", "epsilon")  # what cannot be assumed
# any of these asks for the paper's method, about which the recipe says nothing
OF_PAPER = (
    "cohort-size",
    "passes",
    "samples-per-user",
    "batch-size",
    "clip-norm",
    "gradient-std",
    "smoothness",
    "distance",
    "spread",
    "step",
    "alpha-q",
)
OWN = ("signal-to-noise", "agreement")  # which the paper's plan has no use for
SEEN = ("population", "dimension")  # what the recipe's plan takes from users' rows
UNKNOWN = (
    "how much users agree, and so whether sharing gains, does not follow from public numbers.",
    "There is no α to choose: each user weighs w against own rows by leave-one-out errors, on the "
    "device and free of charge, and leaves a w aside that does not help.",
)


def is_asked(flat: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether the recipe is planned: it is, unless something of the paper's method is there.

    Args:
        flat: flat keys of a file and the command line together.
        given: by the name of a field, those of the command line, which win.
    """
    if any(given.get(name_of(key)) is not None for key in OF_PAPER):
        return False
    if "method" in flat:
        return bool(flat["method"] == AUTO)
    return not any(key in flat for key in OF_PAPER)


def refuse_own_options(given: Mapping[str, Any]) -> None:
    """ValueError for what the plan of the paper's method would not heed."""
    for key in OWN:
        if given.get(name_of(key)) is not None:
            raise ValueError(
                f"--{key} is for the recipe, and options of the paper's method are given: leave "
                f"out --{key}, or {', '.join(f'--{other}' for other in OF_PAPER[:-2])}"
            )


def missing(flat: Mapping[str, Any]) -> list[str]:
    """One line for each number that is not there and cannot be assumed."""
    has = set(flat)
    if "noise-multiplier" in has:
        has.add("epsilon")
    return [ASKED[key] for key in NEEDED if key not in has]


@dataclass(frozen=True, kw_only=True)
class RecipeQuestion:
    """What the recipe is planned for.

    Args:
        population: N, the number of enrolled users.
        delta: δ.
        epsilon: ε of everything together.
        noise_multiplier: z of the rounds, in place of ``epsilon``.
        dimension: d, the number of shared parameters; None if it is not known yet.
        rounds: T; the recipe's own if None.
        rate: q, a user's chance to take part in a round; 1 is everyone.
        signal_to_noise: what the plan is to say how to reach.
        agreement: the length of the mean of all users' directions: 1 if all agree, which is the
            best there can be.
        secure_honest: h of a secure sum; None: the server is trusted.
        secure_colluding: t of a secure sum.
    """

    population: int
    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    dimension: int | None = None
    rounds: int | None = None
    rate: float = 1.0
    signal_to_noise: float = 1.0
    agreement: float = 1.0
    secure_honest: int | None = None
    secure_colluding: int | None = None

    def __post_init__(self) -> None:
        count("population", self.population)
        if self.dimension is not None:
            count("dimension", self.dimension)
        if self.epsilon is not None:
            rule = "epsilon must be positive and finite"
            remedy = "without noise there is nothing to plan"
            require(0 < self.epsilon < math.inf, rule, self.epsilon, remedy)
        if self.noise_multiplier is not None:
            rule = "noise-multiplier must be above 0 and finite"
            remedy = "without noise ε is infinite and there is nothing to plan"
            require(0 < self.noise_multiplier < math.inf, rule, self.noise_multiplier, remedy)
        rule = "signal-to-noise must be positive and finite"
        remedy = "1 is as much signal as noise"
        require(0 < self.signal_to_noise < math.inf, rule, self.signal_to_noise, remedy)
        rule = "agreement must be in (0, 1]"
        require(0 < self.agreement <= 1, rule, self.agreement, "1 is users who all agree")
        Ledger(self.delta)

    @classmethod
    def read(cls, flat: Mapping[str, Any]) -> Self:
        """From flat keys; an error asks for whatever is missing, one line for each."""
        lines = missing(flat)
        if lines:
            raise ValueError("\n  ".join(["a plan needs more numbers:", *lines]))
        hints = get_type_hints(cls)
        values = {}
        for key, value in part_of(flat, cls).items():
            values[name_of(key)] = typed(key, value, hints[name_of(key)])
        if "cohort-mean" in flat:
            mean: float = typed("cohort-mean", flat["cohort-mean"], float)
            values["rate"] = mean / values["population"]
        return cls(**values)

    def recipe(self) -> Recipe:
        """Everything that ``method = "auto"`` decides."""
        return recipe(
            population=self.population,
            delta=self.delta,
            epsilon=self.epsilon,
            noise_multiplier=self.noise_multiplier,
            rounds=self.rounds,
            rate=self.rate,
            aggregation=self.aggregation(),
        )

    def aggregation(self) -> SecureSum | None:
        """The secure sum that is planned; None if the server is trusted."""
        return planned_sum(self.secure_honest, self.secure_colluding)


@dataclass(frozen=True)
class VotePlan:
    """The vote on the server's rate.

    Args:
        noise_multiplier: its own z; None if there is no vote.
        share: of the budget, in units of 1/z²; None if there is no vote.
        least_population: from which on there is one.
        rate_from: in words, where the rate comes from.
    """

    noise_multiplier: float | None
    share: float | None
    least_population: int
    rate_from: str

    @classmethod
    def of(cls, question: RecipeQuestion, found: Recipe, spent: float) -> Self:
        """For a recipe that costs ``spent``."""
        if question.epsilon is None:
            least = least_voters_for(found.release.noise_multiplier)
        else:
            least = least_voters(question.epsilon, question.delta)
        if found.vote is None:
            return cls(None, None, least, found.rate_from)
        own = found.vote.release.noise_multiplier
        share = (noise_alone(spent, question.delta) / own) ** 2
        return cls(own, share, least, found.rate_from)


@dataclass(frozen=True)
class RecipePlan:
    """What the recipe will do and cost, and what w can carry.

    The noise is that on the mean that moves w, for gradients of norm 1. Signal to noise is that of
    all rounds together: the length of what users say over the length of the noise.

    Args:
        rounds: T.
        rate: q.
        epsilon: of everything, under zero-out neighbours.
        epsilon_replace_one: the same under replace-one neighbours.
        noise_multiplier: z of a round.
        vote: on the server's rate.
        noise_std: of each coordinate of the mean, in one round.
        signal_to_noise: at the stated agreement; None if d is not known.
        wanted: the signal to noise that the next two are about.
        population_needed: about how many users it takes; None if d is not known.
        dimension_carried: how many shared parameters this population can carry.
        secure: what a secure sum asks for and costs; None if there is none.
    """

    rounds: int
    rate: float
    epsilon: float
    epsilon_replace_one: float
    noise_multiplier: float
    vote: VotePlan
    noise_std: float
    signal_to_noise: float | None
    wanted: float
    population_needed: int | None
    dimension_carried: int
    secure: Secure | None

    def as_data(self) -> dict[str, Any]:
        """All answers by name, as valid JSON."""
        data: dict[str, Any] = valid({"method": AUTO, **asdict(self), "not_known": UNKNOWN[0]})
        return data


def make(question: RecipeQuestion) -> RecipePlan:
    """Work everything out."""
    found = question.recipe()
    release = found.release
    ledger = Ledger(question.delta)
    if found.vote is not None:
        ledger = ledger.record(found.vote.release)
    ledger = ledger.record(release, found.rounds)
    spent = ledger.epsilon()
    if spent < LEAST_EPSILON:
        raise ValueError(
            f"delta = {question.delta:g} alone pays for all {found.rounds} rounds, so that ε is 0 "
            "and nothing can be planned: lower delta, or raise epsilon (lower noise-multiplier)"
        )
    of_one = question.agreement * reach(release, found.rounds, 1)
    reached = None
    needed = None
    if question.dimension is not None:
        reached = of_one / math.sqrt(question.dimension)
        times_as_many = question.signal_to_noise / reached
        needed = math.ceil(question.population * times_as_many)
    return RecipePlan(
        rounds=found.rounds,
        rate=release.cohort.rate,
        epsilon=spent,
        epsilon_replace_one=ledger.epsilon("replace-one"),
        noise_multiplier=release.noise_multiplier,
        vote=VotePlan.of(question, found, spent),
        noise_std=release.usual_noise_std / release.denominator,
        signal_to_noise=reached,
        wanted=question.signal_to_noise,
        population_needed=needed,
        dimension_carried=math.floor((of_one / question.signal_to_noise) ** 2),
        secure=Secure.of(release, found.rounds),
    )


def reach(release: Release, rounds: int, size: int) -> float:
    """√T·qN/(z√d): the signal to noise of all rounds together, if all users agree."""
    return math.sqrt(rounds) * release.signal_to_noise(size)


def in_words(question: RecipeQuestion, plan: RecipePlan) -> str:
    """The plan as it is printed."""
    rows = [
        ("plan", _who(question, plan)),
        ("noise multiplier z", f"{plan.noise_multiplier:.4g} in each round, by PLD"),
        ("vote on the rate", _vote_words(question, plan.vote)),
        (
            f"ε at δ = {question.delta:g}",
            f"{rounded_up(plan.epsilon)} zero-out, everything together: a user contributes nothing",
        ),
        (
            "",
            f"{rounded_up(plan.epsilon_replace_one)} replace-one: a user's data exchanged, the "
            "paper's definition",
        ),
        (
            "noise on the mean",
            f"zC/D = {plan.noise_std:.3g} per coordinate of w and round, for gradients of norm "
            f"C = 1; {plan.noise_std / math.sqrt(plan.rounds):.3g} on the mean of all rounds",
        ),
        ("signal to noise", _signal_words(question, plan)),
        *_needed_rows(question, plan),
        ("not known", UNKNOWN[0]),
        ("", UNKNOWN[1]),
    ]
    if plan.secure is not None:
        rows += secure_rows(plan.secure, question.aggregation())
    rows += cautions(question.delta, question.population)
    return "\n".join(f"{name:<19} {text}" for name, text in rows)


def _who(question: RecipeQuestion, plan: RecipePlan) -> str:
    who = "everyone"
    if plan.rate < 1:
        expected = question.population * plan.rate
        who = f"each with chance {plan.rate:g} (about {expected:.4g})"
    size = "" if question.dimension is None else f", d = {question.dimension:,} shared parameters"
    return f"{question.population:,} users, {who} in each of {plan.rounds} rounds{size}"


def _vote_words(question: RecipeQuestion, vote: VotePlan) -> str:
    if vote.noise_multiplier is None or vote.share is None:
        limit = "" if question.epsilon is None else f" for {MOST_VOTE_SHARE:.0%} of the budget"
        return (
            f"none: its noise would exceed a {PEOPLE_PER_NOISE}th of the users{limit}; it takes "
            f"{vote.least_population:,} users. The rate is {vote.rate_from}"
        )
    return (
        f"z = {vote.noise_multiplier:.4g}, {vote.share:.1%} of the budget (in units of 1/z²). The "
        f"rate is {vote.rate_from}"
    )


def _signal_words(question: RecipeQuestion, plan: RecipePlan) -> str:
    if plan.signal_to_noise is None:
        return "not known without --dimension, the number of shared parameters"
    over = f"over all {plan.rounds} rounds"
    if question.agreement < 1:
        return f"{plan.signal_to_noise:.3g} {over}, at an agreement of {question.agreement:g}"
    words = f"at best {plan.signal_to_noise:.3g} {over}, if all users agree"
    if plan.signal_to_noise < 1:
        return f"{words}: more noise than users can say; only what few parameters hold stands out"
    return f"{words} (--agreement A < 1 gives A times as much)"


def _needed_rows(question: RecipeQuestion, plan: RecipePlan) -> list[tuple[str, str]]:
    here = f"for a ratio of {plan.wanted:g}"
    carried = f"{plan.dimension_carried:,} shared parameters"
    if plan.population_needed is None:
        return [(here, f"this population carries at most {carried}")]
    return [
        (
            here,
            f"it takes about {plan.population_needed:,} users with these parameters, or at most "
            f"{carried} with these {question.population:,} users",
        )
    ]
