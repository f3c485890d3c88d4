"""What to know before training: noise, rounds, and what more users or a larger ε would change.

Everything follows from public numbers: the population, ε, δ and the number of parameters. Whether
users have anything in common does not, and a plan says so.
"""

import functools
import itertools
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
class Plan:
    """What a training with these public numbers would do and cost.

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

    @functools.cached_property
    def recipe(self) -> Recipe:
        """The releases and rounds of ``PPSGD.auto``."""
        aggregation = None
        if self.secure_honest is not None:
            aggregation = SecureSum(self.secure_honest, self.secure_colluding or 0)
        elif self.secure_colluding is not None:
            raise ValueError("a secure sum needs secure-honest too: give both")
        return recipe(
            population=self.population,
            epsilon=self.epsilon,
            delta=self.delta,
            task="classification",  # regression releases another number, at the same price
            rounds=self.rounds,
            rate=self.rate,
            aggregation=aggregation,
        )

    @functools.cached_property
    def ledger(self) -> Ledger:
        """All releases of the recipe. ValueError if δ alone pays for them."""
        before = [(asked, 1) for asked in self.recipe.before.values()]
        rounds = (self.recipe.release, self.recipe.rounds)
        ledger = Ledger(self.delta).record_all([*before, rounds])
        if ledger.epsilon() < LEAST_EPSILON:
            raise ValueError(
                f"delta = {self.delta:g} alone pays for all {self.recipe.rounds} rounds, so that "
                "ε is 0 and nothing can be planned: lower delta, or raise epsilon"
            )
        return ledger

    @property
    def signal_to_noise(self) -> float | None:
        """(C/√d)/σ per coordinate and round, all users agreeing; None without d."""
        if self.dimension is None:
            return None
        return self.recipe.release.signal_to_noise(self.dimension)

    def alternatives(self) -> dict[str, Recipe]:
        """The recipe with more users, and with a larger ε."""
        more_users = replace(self, population=TIMES * self.population)
        larger_epsilon = replace(self, epsilon=TIMES * self.epsilon)
        return {"users": more_users.recipe, "epsilon": larger_epsilon.recipe}

    def secure_sum(self) -> dict[str, float] | None:
        """What a secure sum asks for and costs; None if the server is trusted.

        ``extra_noise`` is the standard deviation of the noise if all stay, over what is charged
        for; ``extra_noise_at_least_clients`` the same if as many drop out as may.
        """
        release = self.recipe.release
        rules = release.aggregation
        if rules is None:
            return None
        clients = math.floor(release.expected_users)
        needed = survivors_needed(rules, clients)
        return {
            "clients": clients,
            "needed": needed,
            "may_drop_out": clients - needed,
            "neighbours": design(rules, clients).neighbours,
            "extra_noise": math.sqrt(clients / rules.honest),
            "extra_noise_at_least_clients": math.sqrt(needed / rules.honest),
            "delta_for_neighbours": self.recipe.rounds * release.failure,
        }

    def as_data(self) -> dict[str, Any]:
        """All answers by name, as valid JSON: infinity is a word."""
        release = self.recipe.release
        before = self.recipe.before.items()
        recipes = {"noise": self.recipe}
        for what, other in self.alternatives().items():
            recipes[f"with_more_{what}"] = other
        noise = {
            name: {"rounds": each.rounds, "in_prediction": each.noise_in_prediction}
            for name, each in recipes.items()
        }
        return {
            "question": asdict(self),
            "rounds": self.recipe.rounds,
            "rate": release.cohort.rate,
            "epsilon": self.ledger.epsilon(),
            "epsilon_replace_one": json_number(self.ledger.epsilon("replace-one")),
            "noise_multiplier": release.noise_multiplier,
            "before": {name: asked.noise_multiplier for name, asked in before},
            "signal_to_noise": self.signal_to_noise,
            **noise,
            "secure": self.secure_sum(),
            "not_known": NOT_KNOWN[0],
        }

    def text(self) -> str:
        """The plan as it is printed: a label and a text per line."""
        found = self.recipe
        who = "everyone"
        if found.release.cohort.rate < 1:
            rate = found.release.cohort.rate
            who = f"each with chance {rate:g} (about {self.population * rate:.4g})"
        asked = [f"one number (z = {each.noise_multiplier:.4g})" for each in found.before.values()]
        zero_out = rounded_up(self.ledger.epsilon())
        replace_one = rounded_up(self.ledger.epsilon("replace-one"))
        rows = [
            ("plan", f"{self.population:,} users, {who} in each of {found.rounds} rounds"),
            ("asked before", f"everyone, once: {' and '.join(asked)}"),
            ("noise multiplier z", f"{found.release.noise_multiplier:.4g} in each round"),
            (
                f"ε at δ = {self.delta:g}",
                f"{zero_out} zero-out, everything together: a user contributes nothing",
            ),
            ("", f"{replace_one} replace-one: a user's data exchanged, the paper's definition"),
            (
                "noise in prediction",
                f"at most about {found.noise_in_prediction:.2g} of C, the size of users' own "
                "models, for a row of unit length, whatever the number of parameters",
            ),
        ]
        if found.noise_in_prediction > DROWNED:
            rows.append(("", "users will mostly keep to their own models"))
        if self.signal_to_noise is not None:
            text = (
                f"{self.signal_to_noise:.3g} per parameter and round, all users agreeing: C/√d "
                f"over the noise, for d = {self.dimension:,}"
            )
            rows.append(("signal to noise", text))
        for what, other in self.alternatives().items():
            text = f"{other.rounds} rounds, at most about {other.noise_in_prediction:.2g} of C"
            rows.append((f"{TIMES} times the {'ε' if what == 'epsilon' else what}", text))
        rows += [("not known", f"{NOT_KNOWN[0]}:"), ("", NOT_KNOWN[1])]
        labels = itertools.chain(["secure sum"], itertools.repeat(""))
        rows += zip(labels, self._secure_texts(), strict=False)
        if self.delta * self.population > LARGEST_SHARE:
            limit = 1 / self.population
            rows.append(("caution", f"δ should be well below 1/population = {limit:g}"))
        return "\n".join(f"{label:<19} {text}" for label, text in rows)

    def _secure_texts(self) -> list[str]:
        secure = self.secure_sum()
        if secure is None:
            return []
        most = secure["extra_noise"] - 1
        least = secure["extra_noise_at_least_clients"] - 1
        texts = [
            f"{secure['needed']} of {secure['clients']} clients must stay to the end of a round: "
            f"{secure['may_drop_out']} may drop out, {self.secure_colluding or 0} may collude; "
            f"each has {secure['neighbours']} neighbours",
            f"with all present the noise is {most:.1%} more than is charged for "
            f"(√({secure['clients']}/{self.secure_honest})), with the fewest {least:.1%}",
            "sampling gains nothing: clients see who else takes part",
        ]
        if secure["delta_for_neighbours"]:
            taken = f"{secure['delta_for_neighbours']:.2g}"
            texts.append(f"random neighbours take {taken} of δ in all rounds")
        return texts
