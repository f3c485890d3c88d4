"""What to know before training: noise, rounds, and what more users or a larger ε would change.

Everything follows from public numbers: the population, ε, δ and the number of parameters. Whether
users have anything in common does not, and a plan says so.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, get_type_hints

from flwr_ppsgd.algorithm import SecureSum
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
class Plan:
    """What a training would do and cost.

    Args:
        question: what was asked.
        recipe: its releases and rounds.
        epsilon: of everything, under zero-out neighbours.
        epsilon_replace_one: the same under replace-one neighbours.
        with_more_users: the recipe with twice as many users.
        with_more_epsilon: the recipe with twice the ε.
    """

    question: Question
    recipe: Recipe
    epsilon: float
    epsilon_replace_one: float
    with_more_users: Recipe
    with_more_epsilon: Recipe

    @property
    def signal_to_noise(self) -> float | None:
        """(C/√d)/σ per coordinate and round, all users agreeing; None without d."""
        if self.question.dimension is None:
            return None
        return self.recipe.release.signal_to_noise(self.question.dimension)

    def as_data(self) -> dict[str, Any]:
        """All answers by name, as valid JSON: infinity is a word."""
        release = self.recipe.release
        before = self.recipe.before.items()
        return {
            "question": asdict(self.question),
            "rounds": self.recipe.rounds,
            "rate": release.cohort.rate,
            "epsilon": self.epsilon,
            "epsilon_replace_one": json_number(self.epsilon_replace_one),
            "noise_multiplier": release.noise_multiplier,
            "before": {name: asked.noise_multiplier for name, asked in before},
            "noise": _noise_data(self.recipe),
            "signal_to_noise": self.signal_to_noise,
            "with_more_users": _noise_data(self.with_more_users),
            "with_more_epsilon": _noise_data(self.with_more_epsilon),
            "secure": secure_data(self.recipe),
            "not_known": NOT_KNOWN[0],
        }


def _noise_data(found: Recipe) -> dict[str, float]:
    return {"rounds": found.rounds, "in_prediction": found.noise_in_prediction}


def secure_data(found: Recipe) -> dict[str, float] | None:
    """What a secure sum asks for and costs; None if there is none.

    ``extra_noise`` is the standard deviation of the noise if all stay, over what is charged for;
    ``extra_noise_at_least_clients`` the same if as many drop out as may.
    """
    rules = found.release.aggregation
    if rules is None:
        return None
    clients = math.floor(found.release.expected_users)
    needed = survivors_needed(rules, clients)
    return {
        "clients": clients,
        "needed": needed,
        "may_drop_out": clients - needed,
        "neighbours": design(rules, clients).neighbours,
        "extra_noise": math.sqrt(clients / rules.honest),
        "extra_noise_at_least_clients": math.sqrt(needed / rules.honest),
        "delta_for_neighbours": found.rounds * found.release.failure,
    }


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
    more_users = replace(question, population=TIMES * question.population)
    more_epsilon = replace(question, epsilon=TIMES * question.epsilon)
    return Plan(
        question=question,
        recipe=found,
        epsilon=spent,
        epsilon_replace_one=ledger.epsilon("replace-one"),
        with_more_users=more_users.recipe(),
        with_more_epsilon=more_epsilon.recipe(),
    )


def plan_text(plan: Plan) -> str:
    """The plan as it is printed: a label and a text per line."""
    question = plan.question
    found = plan.recipe
    rate = found.release.cohort.rate
    who = "everyone"
    if rate < 1:
        who = f"each with chance {rate:g} (about {question.population * rate:.4g})"
    asked = [f"one number (z = {each.noise_multiplier:.4g})" for each in found.before.values()]
    zero_out = rounded_up(plan.epsilon)
    replace_one = rounded_up(plan.epsilon_replace_one)
    rows = [
        ("plan", f"{question.population:,} users, {who} in each of {found.rounds} rounds"),
        ("asked before", f"everyone, once: {' and '.join(asked)}"),
        ("noise multiplier z", f"{found.release.noise_multiplier:.4g} in each round"),
        (
            f"ε at δ = {question.delta:g}",
            f"{zero_out} zero-out, everything together: a user contributes nothing",
        ),
        ("", f"{replace_one} replace-one: a user's data exchanged, the paper's definition"),
        (
            "noise in prediction",
            f"at most about {found.noise_in_prediction:.2g} of C, the size of users' own models, "
            "for a row of unit length, whatever the number of parameters",
        ),
    ]
    if found.noise_in_prediction > DROWNED:
        rows.append(("", "users will mostly keep to their own models"))
    if plan.signal_to_noise is not None:
        text = (
            f"{plan.signal_to_noise:.3g} per parameter and round, all users agreeing: C/√d over "
            f"the noise, for d = {question.dimension:,}"
        )
        rows.append(("signal to noise", text))
    others = {"users": plan.with_more_users, "ε": plan.with_more_epsilon}
    for what, other in others.items():
        text = f"{other.rounds} rounds, at most about {other.noise_in_prediction:.2g} of C"
        rows.append((f"{TIMES} times the {what}", text))
    rows += [("not known", f"{NOT_KNOWN[0]}:"), ("", NOT_KNOWN[1])]
    rows += _secure_rows(found)
    if question.delta * question.population > LARGEST_SHARE:
        limit = 1 / question.population
        rows.append(("caution", f"δ should be well below 1/population = {limit:g}"))
    return "\n".join(f"{label:<19} {text}" for label, text in rows)


def _secure_rows(found: Recipe) -> list[tuple[str, str]]:
    secure = secure_data(found)
    rules = found.release.aggregation
    if secure is None or rules is None:
        return []
    most = secure["extra_noise"] - 1
    least = secure["extra_noise_at_least_clients"] - 1
    rows = [
        (
            "secure sum",
            f"{secure['needed']} of {secure['clients']} clients must stay to the end of a round: "
            f"{secure['may_drop_out']} may drop out, {rules.colluding} may collude; each has "
            f"{secure['neighbours']} neighbours",
        ),
        (
            "",
            f"with all present the noise is {most:.1%} more than is charged for "
            f"(√({secure['clients']}/{rules.honest})), with the fewest {least:.1%}",
        ),
        ("", "sampling gains nothing: clients see who else takes part"),
    ]
    if secure["delta_for_neighbours"]:
        taken = f"{secure['delta_for_neighbours']:.2g}"
        rows.append(("", f"random neighbours take {taken} of δ in all rounds"))
    return rows
