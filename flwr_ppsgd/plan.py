"""What to know before training: noise, rounds, and what more users or a larger ε would change.

Everything follows from public numbers: the population, ε, δ and the number of parameters. Whether
users have anything in common does not, and a plan says so.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, get_type_hints

from flwr_ppsgd.algorithm import Release, SecureSum
from flwr_ppsgd.checks import count, require
from flwr_ppsgd.ledger import Ledger
from flwr_ppsgd.recipe import DROWNED, Recipe, recipe
from flwr_ppsgd.secure.graph import design, survivors_needed
from flwr_ppsgd.settings import name_of, part_of, typed_value
from flwr_ppsgd.statement import json_number, rounded_up

REQUIRED = {"population": "500", "epsilon": "2", "delta": "1e-5"}  # with an example each
LEAST_EPSILON = 1e-6  # a smaller ε is taken to be 0
LARGEST_SHARE = 0.1  # of a user, that δ may be without a caution
TIMES = 2  # as many users, or as large an ε, in what a plan compares with
NOT_KNOWN = (
    "how much users agree, and so whether sharing gains, does not follow from public numbers",
    "each user weighs w against own models by leave-one-out errors, on the device and free of "
    "charge, and leaves a w aside that does not help",
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a plan is made for.

    Args:
        population: N, the number of enrolled users.
        epsilon: ε of everything together.
        delta: δ.
        dimension: d, the number of shared parameters; None if it is not known.
        rate: q, a user's chance to take part in a round; None is everyone.
        rounds: T; None is the recipe's own number.
        secure_honest: h of a secure sum; None: the server is trusted.
        secure_colluding: t of a secure sum.
    """

    population: int
    epsilon: float
    delta: float
    dimension: int | None = None
    rate: float | None = None
    rounds: int | None = None
    secure_honest: int | None = None
    secure_colluding: int | None = None

    def __post_init__(self) -> None:
        count("population", self.population)
        rule = "epsilon must be positive and finite"
        remedy = "without noise there is nothing to plan"
        require(0 < self.epsilon < math.inf, rule, self.epsilon, remedy)
        Ledger(self.delta)  # checks δ
        if self.dimension is not None:
            count("dimension", self.dimension)

    @classmethod
    def read(cls, flat: Mapping[str, Any]) -> Self:
        """From flat keys, of which others are ignored; an error names what is missing."""
        missing = [key for key in REQUIRED if key not in flat]
        if missing:
            given = {key: flat.get(key, example) for key, example in REQUIRED.items()}
            command = " ".join(f"--{key} {value}" for key, value in given.items())
            names = " and ".join(f"--{key}" for key in missing)
            raise ValueError(f"a plan needs {names}, as in: ppsgd plan {command}")
        hints = get_type_hints(cls)
        values = {}
        for key, value in part_of(flat, cls).items():
            values[name_of(key)] = typed_value(key, value, hints[name_of(key)])
        return cls(**values)

    def recipe(self) -> Recipe:
        """The releases and rounds that ``PPSGD.auto`` would plan."""
        return recipe(
            population=self.population,
            epsilon=self.epsilon,
            delta=self.delta,
            task="classification",  # regression releases another number, at the same price
            rounds=self.rounds,
            rate=self.rate,
            aggregation=self.aggregation(),
        )

    def aggregation(self) -> SecureSum | None:
        """The secure sum that is planned; None if the server is trusted."""
        if self.secure_honest is None and self.secure_colluding is None:
            return None
        if self.secure_honest is None:
            raise ValueError("a secure sum needs secure-honest too: give both")
        return SecureSum(self.secure_honest, self.secure_colluding or 0)


@dataclass(frozen=True)
class Noise:
    """How many rounds there are, and how much noise they bring.

    Args:
        rounds: T.
        in_prediction: the most that the noise is in w's prediction for a row of unit length, in
            units of C, the size of users' own models: σ₁·T/N.
    """

    rounds: int
    in_prediction: float

    @classmethod
    def of(cls, question: Question) -> Self:
        """Of the recipe that answers a question."""
        found = question.recipe()
        return cls(found.rounds, found.noise_in_prediction)


@dataclass(frozen=True)
class Secure:
    """What a secure sum asks for and costs.

    Args:
        clients: of a round.
        needed: how many of them must stay to the end of the round, so that it has a sum.
        may_drop_out: how many may leave.
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
class Plan:
    """What a training would do and cost.

    Args:
        question: what was asked.
        rounds: T.
        rate: q.
        epsilon: of everything, under zero-out neighbours.
        epsilon_replace_one: the same under replace-one neighbours.
        noise_multiplier: z of a round.
        before: z of what everybody is asked once before the first round, by name.
        noise: of this plan.
        signal_to_noise: (C/√d)/σ per coordinate and round, all users agreeing; None without d.
        with_more_users: the noise with twice as many users.
        with_more_epsilon: the noise with twice the ε.
        secure: what a secure sum asks for and costs; None if there is none.
    """

    question: Question
    rounds: int
    rate: float
    epsilon: float
    epsilon_replace_one: float
    noise_multiplier: float
    before: dict[str, float]
    noise: Noise
    signal_to_noise: float | None
    with_more_users: Noise
    with_more_epsilon: Noise
    secure: Secure | None

    def as_data(self) -> dict[str, Any]:
        """All answers by name, as valid JSON: infinity is a word."""
        data = {**asdict(self), "not_known": NOT_KNOWN[0]}
        replace_one = json_number(self.epsilon_replace_one)
        return {**data, "epsilon_replace_one": replace_one}


def make_plan(question: Question) -> Plan:
    """The releases of the recipe, what they cost, and what would change it."""
    found = question.recipe()
    ledger = Ledger(question.delta)
    for release in found.before.values():
        ledger = ledger.record(release)
    ledger = ledger.record(found.release, found.rounds)
    spent = ledger.epsilon()
    if spent < LEAST_EPSILON:
        raise ValueError(
            f"delta = {question.delta:g} alone pays for all {found.rounds} rounds, so that ε is 0 "
            "and nothing can be planned: lower delta, or raise epsilon"
        )
    signal = None
    if question.dimension is not None:
        signal = found.release.signal_to_noise(question.dimension)
    more_users = replace(question, population=TIMES * question.population)
    more_epsilon = replace(question, epsilon=TIMES * question.epsilon)
    return Plan(
        question=question,
        rounds=found.rounds,
        rate=found.release.cohort.rate,
        epsilon=spent,
        epsilon_replace_one=ledger.epsilon("replace-one"),
        noise_multiplier=found.release.noise_multiplier,
        before={name: release.noise_multiplier for name, release in found.before.items()},
        noise=Noise.of(question),
        signal_to_noise=signal,
        with_more_users=Noise.of(more_users),
        with_more_epsilon=Noise.of(more_epsilon),
        secure=Secure.of(found.release, found.rounds),
    )


def plan_text(plan: Plan) -> str:
    """The plan as it is printed: a label and a text per line."""
    question = plan.question
    who = "everyone"
    if plan.rate < 1:
        expected = question.population * plan.rate
        who = f"each with chance {plan.rate:g} (about {expected:.4g})"
    asked = " and ".join(f"one number (z = {z:.4g})" for z in plan.before.values())
    rows = [
        ("plan", f"{question.population:,} users, {who} in each of {plan.rounds} rounds"),
        ("asked before", f"everyone, once: {asked}"),
        ("noise multiplier z", f"{plan.noise_multiplier:.4g} in each round"),
        (
            f"ε at δ = {question.delta:g}",
            f"{rounded_up(plan.epsilon)} zero-out, everything together: a user contributes nothing",
        ),
        (
            "",
            f"{rounded_up(plan.epsilon_replace_one)} replace-one: a user's data exchanged, the "
            "paper's definition",
        ),
        ("noise in prediction", _prediction_text(plan.noise)),
        *_dimension_rows(plan),
        (f"{TIMES} times the users", _changed_text(plan.with_more_users)),
        (f"{TIMES} times the ε", _changed_text(plan.with_more_epsilon)),
        ("not known", f"{NOT_KNOWN[0]}:"),
        ("", NOT_KNOWN[1]),
        *_secure_rows(plan),
    ]
    if question.delta * question.population > LARGEST_SHARE:
        limit = 1 / question.population
        rows.append(("caution", f"δ should be well below 1/population = {limit:g}"))
    return "\n".join(f"{label:<19} {text}" for label, text in rows)


def _prediction_text(noise: Noise) -> str:
    text = (
        f"at most about {noise.in_prediction:.2g} of C, the size of users' own models, for a row "
        "of unit length, whatever the number of parameters"
    )
    if noise.in_prediction > DROWNED:
        text += ": users will mostly keep to their own models"
    return text


def _changed_text(noise: Noise) -> str:
    return f"{noise.rounds} rounds, at most about {noise.in_prediction:.2g} of C"


def _dimension_rows(plan: Plan) -> list[tuple[str, str]]:
    if plan.signal_to_noise is None:
        return []
    text = (
        f"{plan.signal_to_noise:.3g} per parameter and round, all users agreeing: C/√d over the "
        f"noise, for d = {plan.question.dimension:,}"
    )
    return [("signal to noise", text)]


def _secure_rows(plan: Plan) -> list[tuple[str, str]]:
    secure = plan.secure
    rules = plan.question.aggregation()
    if secure is None or rules is None:
        return []
    most = secure.extra_noise - 1
    least = secure.extra_noise_at_least_clients - 1
    rows = [
        (
            "secure sum",
            f"{secure.needed} of {secure.clients} clients must stay to the end of a round: "
            f"{secure.may_drop_out} may drop out, {rules.colluding} may collude; each has "
            f"{secure.neighbours} neighbours",
        ),
        (
            "",
            f"with all present the noise is {most:.1%} more than is charged for "
            f"(√({secure.clients}/{rules.honest})), with the fewest {least:.1%}",
        ),
        ("", "sampling gains nothing: clients see who else takes part"),
    ]
    if secure.delta_for_neighbours:
        taken = f"{secure.delta_for_neighbours:.2g}"
        rows.append(("", f"random neighbours take {taken} of δ in all rounds"))
    return rows
