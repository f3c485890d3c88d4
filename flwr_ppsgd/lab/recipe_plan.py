"""What to know before the recipe runs: rounds, noise, what more users or a larger ε would change.

Everything here follows from public numbers: ε, δ and the population. Whether users have anything in
common does not, and the plan says so.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, cast, get_type_hints

from flwr_ppsgd.algorithm import SecureSum
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
from flwr_ppsgd.ledger import Ledger
from flwr_ppsgd.recipe import DROWNED, Recipe, Task, recipe
from flwr_ppsgd.settings import AUTO, name_of, part_of, typed
from flwr_ppsgd.statement import rounded_up

NEEDED = ("population", "delta", "epsilon")  # what cannot be assumed
# any of these asks for the paper's method, about which the recipe says nothing
OF_PAPER = (
    "cohort-size",
    "passes",
    "samples-per-user",
    "batch-size",
    "clip-norm",
    "noise-multiplier",
    "gradient-std",
    "smoothness",
    "distance",
    "spread",
    "step",
    "alpha-q",
)
SEEN = ("population",)  # what the recipe's plan takes from users' rows
UNKNOWN = (
    "how much users agree, and so whether sharing gains, does not follow from public numbers.",
    "There is no α to choose: each user weighs w against own models by leave-one-out errors, on "
    "the device and free of charge, and leaves a w aside that does not help.",
)
TIMES = 2  # as many users, or as large an ε, in what the plan compares with


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


def missing(flat: Mapping[str, Any]) -> list[str]:
    """One line for each number that is not there and cannot be assumed."""
    return [ASKED[key] for key in NEEDED if key not in flat]


@dataclass(frozen=True, kw_only=True)
class RecipeQuestion:
    """What the recipe is planned for.

    Args:
        population: N, the number of enrolled users.
        delta: δ.
        epsilon: ε of everything together.
        task: "classification", "multi-label" or "regression"; it decides what is asked before the
            first round.
        rounds: T; the recipe's own if None.
        rate: q, a user's chance to take part in a round; None is everyone.
        secure_honest: h of a secure sum; None: the server is trusted.
        secure_colluding: t of a secure sum.
    """

    population: int
    delta: float
    epsilon: float
    task: str = "classification"
    rounds: int | None = None
    rate: float | None = None
    secure_honest: int | None = None
    secure_colluding: int | None = None

    def __post_init__(self) -> None:
        count("population", self.population)
        rule = "epsilon must be positive and finite"
        remedy = "without noise there is nothing to plan"
        require(0 < self.epsilon < math.inf, rule, self.epsilon, remedy)
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
            if value != "":
                values[name_of(key)] = typed(key, value, hints[name_of(key)])
        if "cohort-mean" in flat:
            mean: float = typed("cohort-mean", flat["cohort-mean"], float)
            values["rate"] = mean / values["population"]
        return cls(**values)

    def recipe(self) -> Recipe:
        """Everything that ``method = "auto"`` decides."""
        task = "classification" if self.task == "multi-label" else self.task
        return recipe(
            population=self.population,
            delta=self.delta,
            epsilon=self.epsilon,
            task=cast(Task, task),
            rounds=self.rounds,
            rate=self.rate,
            aggregation=self.aggregation(),
        )

    def aggregation(self) -> SecureSum | None:
        """The secure sum that is planned; None if the server is trusted."""
        return planned_sum(self.secure_honest, self.secure_colluding)


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
    def of(cls, found: Recipe) -> Self:
        """Of a recipe."""
        return cls(found.rounds, found.noise_in_prediction)


@dataclass(frozen=True)
class RecipePlan:
    """What the recipe will do and cost.

    Args:
        noise: of this plan.
        rate: q.
        epsilon: of everything, under zero-out neighbours.
        epsilon_replace_one: the same under replace-one neighbours.
        noise_multiplier: z of a round.
        before: z of what everybody is asked before the first round, by name.
        with_more_users: the noise with twice as many users.
        with_more_epsilon: the noise with twice the ε.
        secure: what a secure sum asks for and costs; None if there is none.
    """

    noise: Noise
    rate: float
    epsilon: float
    epsilon_replace_one: float
    noise_multiplier: float
    before: Mapping[str, float]
    with_more_users: Noise
    with_more_epsilon: Noise
    secure: Secure | None

    def as_data(self) -> dict[str, Any]:
        """All answers by name, as valid JSON."""
        data: dict[str, Any] = valid(
            {
                "method": AUTO,
                "rounds": self.noise.rounds,
                **asdict(self),
                "not_known": UNKNOWN[0],
            }
        )
        return data


def make(question: RecipeQuestion) -> RecipePlan:
    """Work everything out."""
    found = question.recipe()
    release = found.release
    ledger = Ledger(question.delta)
    for before in found.before.values():
        ledger = ledger.record(before)
    ledger = ledger.record(release, found.rounds)
    spent = ledger.epsilon()
    if spent < LEAST_EPSILON:
        raise ValueError(
            f"delta = {question.delta:g} alone pays for all {found.rounds} rounds, so that ε is 0 "
            "and nothing can be planned: lower delta, or raise epsilon"
        )
    more_users = replace(question, population=TIMES * question.population)
    more_epsilon = replace(question, epsilon=TIMES * question.epsilon)
    return RecipePlan(
        noise=Noise.of(found),
        rate=release.cohort.rate,
        epsilon=spent,
        epsilon_replace_one=ledger.epsilon("replace-one"),
        noise_multiplier=release.noise_multiplier,
        before={name: own.noise_multiplier for name, own in found.before.items()},
        with_more_users=Noise.of(more_users.recipe()),
        with_more_epsilon=Noise.of(more_epsilon.recipe()),
        secure=Secure.of(release, found.rounds),
    )


def in_words(question: RecipeQuestion, plan: RecipePlan) -> str:
    """The plan as it is printed."""
    asked = ", ".join(f"{name} (z = {z:.4g})" for name, z in plan.before.items())
    rows = [
        ("plan", _who(question, plan)),
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
        ("noise in prediction", _noise_words(plan.noise)),
        (f"{TIMES} times the users", _changed(plan.with_more_users)),
        (f"{TIMES} times the ε", _changed(plan.with_more_epsilon)),
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
    return f"{question.population:,} users, {who} in each of {plan.noise.rounds} rounds"


def _noise_words(noise: Noise) -> str:
    words = (
        f"at most about {noise.in_prediction:.2g} of C, the size of users' own models, for a row "
        "of unit length, whatever the number of parameters"
    )
    if noise.in_prediction > DROWNED:
        words += ": users will mostly keep to their own models"
    return words


def _changed(noise: Noise) -> str:
    return f"{noise.rounds} rounds, at most about {noise.in_prediction:.2g} of C"
