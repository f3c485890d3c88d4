"""What is promised, as finished numbers and words: what a privacy officer can paste into a report.

A :class:`Promise` is worked out once, by the server. The statement, its short form, the line that
clients get, ``privacy.json`` and every printed ε come from here. Text is rounded up, data is not.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flwr_ppsgd.algorithm import Cohort, FixedSize, Release, SecureSum
from flwr_ppsgd.recipe import RecipeValues
from flwr_ppsgd.training import Training

if TYPE_CHECKING:
    from flwr_ppsgd.epsilon import EpsilonBound, Relation
    from flwr_ppsgd.ledger import Ledger

# up to its colon each is short enough for a screen
TRUSTED_SERVER = "the server itself, which is trusted: it sees each clipped gradient"
TRUSTED_WITH_SOLUTIONS = (
    "the server itself, which is trusted: it sees each user's own fitted model, clipped; of a user "
    "with one row, that row's direction"
)
ALWAYS_OUTSIDE = (
    "who is enrolled, and how many are: both are taken to be public",
    "metrics, logs and timings: whatever leaves the server or a node by another way than the "
    "published parameters",
    "the initial parameters: taken to be from a public seed, or from weights that were never "
    "trained on these users",
    "the choice of settings: step, alpha, rounds or clip norm by looking at several runs",
    "a user behind more than one node: one node is taken to be one user",
    "other trainings on the same users: unless all of them are under one budget (budget_dir)",
    "whoever may submit a run to the SuperLink: they control the code on the clients, and Flower's "
    "counters of traffic show them how many clients take part",
    "the fact that a run ended: it can say that nobody's reply could be used",
)
OUTSIDE = (TRUSTED_SERVER, *ALWAYS_OUTSIDE)
NOTHING_PUBLISHED = "epsilon is 0: nothing is published"
EVALUATED = (
    "Evaluation on the users' own data was on: the server saw each user's measures, and they are "
    "outside the guarantee."
)
WHAT_DELTA_IS = (
    "Delta is a small slack in the bound: for every set of outcomes, its probability with your "
    "data is at most e^epsilon times its probability without them, plus delta."
)
DIGITS = 4
WEAK = 10.0  # an ε above this is said to be weak
SIMULATION_NOISE = "simulation noise: summed in floating point, for experiments only"


def why_void(ledger: "Ledger", cost: float) -> str:
    """Why the releases of a ledger, at an ε of ``cost``, guarantee nothing; empty if they do."""
    if not ledger.rounds:
        return ""
    if ledger.insecure_rounds:
        return (
            f"{ledger.insecure_rounds} of {ledger.rounds} rounds drew their random bits from a "
            "known seed (insecure_seed)."
        )
    if math.isinf(cost):
        return (
            "epsilon is infinite. Either nothing hides a user's contribution (noise multiplier "
            "0), or random neighbours need more than the whole delta: raise it."
        )
    return why_delta_is_void(ledger.delta, ledger.population)


def why_delta_is_void(delta: float, population: int) -> str:
    """Why δ protects nobody in a population of this size; empty if it protects."""
    if delta * population < 1:
        return ""
    return (
        f"delta = {delta:g} is at least 1/population, and publishing all data of one random user "
        f"would satisfy that: choose delta well below {1 / population:g}."
    )


@dataclass(frozen=True)
class Promise:
    """Everything that is stated about one training.

    ``cost`` and its like are what the stated rounds cost with secret noise. If nothing is
    guaranteed, none of them is called ε: the data hold the word "infinite", and
    ``deployed_epsilon`` is what the same rounds would cost in a deployment.

    Args:
        training: its settings.
        stated: all releases for which ε is stated, planned ones included.
        charged: those that were charged.
        rounds_trained: the number of rounds that w has had.
        cut: the probability that the sampler cut a tail of any noise, at most; δ pays for it.
        budget: ε of all trainings under the budget, for both kinds of neighbours; None without one.
        unit: who is protected: "user", or "node" if a user may come back as another node.
        simulation: why this is a simulation, which guarantees nothing; empty if it is not one.
        caveats: what else the reader must know, as sentences.
        evaluated: whether there was evaluation on the users' own data.
        terms: further terms of a simulation.
        values: what the recipe's releases before the first round gave so far.
    """

    training: Training
    stated: "Ledger"
    charged: "Ledger"
    rounds_trained: int = 0
    cut: float = 0.0
    budget: tuple[float, float] | None = None
    unit: str = "user"
    simulation: str = ""
    caveats: tuple[str, ...] = ()
    evaluated: bool = False
    terms: tuple[str, ...] = ()
    values: RecipeValues = field(default_factory=RecipeValues)

    # --- in numbers

    @functools.cached_property
    def _bound(self) -> "EpsilonBound":
        return self.stated.bound_with_cut(self.cut)

    @property
    def cost(self) -> float:
        """ε under zero-out neighbours."""
        return self._bound.epsilon if self.budget is None else self.budget[0]

    @functools.cached_property
    def replace_one(self) -> float:
        """ε if one user's data are exchanged for others."""
        if self.budget is not None:
            return self.budget[1]
        return self.stated.bound_with_cut(self.cut, "replace-one").epsilon

    @property
    def rdp(self) -> float:
        """The RDP bound on ε, under zero-out neighbours."""
        return self.stated.epsilon(method="rdp") if self.budget is None else self.cost

    @property
    def method(self) -> str:
        """The name of the bound that gave ε."""
        return self._bound.method if self.budget is None else "the budget's filter"

    def pooled(self, relation: "Relation" = "zero-out") -> float:
        """Of a secure sum, ε against the server and all other users; trainings under one budget
        have no such bound together."""
        return self.stated.pooled_epsilon(relation) if self.budget is None else math.inf

    @property
    def epsilon(self) -> float:
        """ε that is guaranteed: infinite if nothing is, 0 if nothing is published."""
        if not self.stated.rounds:
            return 0.0
        return math.inf if self.why_void else self.cost

    @property
    def why_void(self) -> str:
        """Why nothing is guaranteed; empty if something is."""
        return self.simulation or why_void(self.stated, self.cost)

    # --- in words

    @property
    def guarantee(self) -> str:
        """The name of what is promised."""
        if self.why_void:
            return "none"
        if self._secure is None:
            return f"{self.unit}-level joint differential privacy"
        return f"{self.unit}-level differential privacy against {self.others}"

    @property
    def others(self) -> str:
        """From whom a user is protected."""
        if self._secure is None:
            return "everybody else together"
        if not self._secure.colluding:
            return "the server alone"
        return f"the server and any {self._secure.colluding} of the other users together"

    @property
    def _secure(self) -> SecureSum | None:
        return self.training.release.aggregation

    def in_one_line(self) -> str:
        """For the users, with every Order: what the planned rounds promise them."""
        if not self.stated.rounds:
            return NOTHING_PUBLISHED
        if self.why_void:
            return f"NO GUARANTEE: {self.why_void}"
        trusted = "; the server is trusted" if self._secure is None else ""
        return (
            f"{self._numbers()} over {self.stated.rounds} planned rounds for each of "
            f"{self.training.population} {self.unit}s, {self.guarantee}{trusted}"
        )

    def _numbers(self) -> str:
        """All ε and δ of a promise that is not void."""
        found = (
            f"ε = {rounded_up(self.epsilon)} ({rounded_up(self.replace_one)} if one user's data "
            f"are exchanged for others), δ = {self.stated.delta:g}"
        )
        if self._secure is not None:
            found += f"; against all other users pooling ε = {rounded_up(self.pooled())}"
        return found

    def statement(self) -> str:
        """The promise in words: what is promised, its terms, and what it does not cover."""
        lines = [self._promise(), *self.terms, *self._terms(), *self.caveats]
        if self.evaluated:
            lines.append(EVALUATED)
        lines.append("Outside the guarantee: " + "; ".join(self.outside()) + ".")
        return "\n".join(lines)

    def short(self) -> str:
        """At most four lines for a screen: the numbers, caveats, and what is not covered."""
        if self.why_void:
            lines = [self._no_guarantee()]
        elif not self.stated.rounds:
            lines = [NOTHING_PUBLISHED]
        else:
            weak = " (weak)" if self.epsilon > WEAK else ""
            lines = [f"{self._numbers()}{weak} · {self.guarantee}"]
        if self.caveats:
            lines.append(up_to_colons(self.caveats))
        if self.evaluated:
            lines.append(up_to_colons([EVALUATED]))
        lines.append("Outside: " + up_to_colons(self.outside()))
        return "\n".join(lines)

    def outside(self) -> tuple[str, ...]:
        """What the guarantee does not cover."""
        if self._secure is not None:
            return (*_outside_secure_sums(self.training.release, self._secure), *ALWAYS_OUTSIDE)
        trusted = TRUSTED_SERVER if self.training.recipe is None else TRUSTED_WITH_SOLUTIONS
        return (trusted, *ALWAYS_OUTSIDE)

    def _promise(self) -> str:
        if self.why_void:
            return self._no_guarantee()
        if not self.training.steps.publishes and not self.stated.rounds:
            return (
                "Nothing was published about anybody (local learning, alpha = 0): epsilon is 0 for "
                "every user."
            )
        to_each = f"To each of the {self.training.population} enrolled {self.unit}s: {self.others}"
        bound = f"({rounded_up(self.epsilon)}, {self.stated.delta:g})"
        if self._secure is None:
            found = (
                f"{to_each}, even pooling their data and personal models, learns no more about "
                f"your data than {bound}-joint differential privacy allows"
            )
        else:
            learn = "learn" if self._secure.colluding else "learns"
            found = (
                f"{to_each} {learn} no more about your data than {bound}-differential privacy "
                "allows, as long as the server follows the protocol"
            )
        exchanged = "if one user's data are exchanged for others"
        found += f"; epsilon is {rounded_up(self.replace_one)} {exchanged}."
        if self._secure is not None:
            found += (
                " Against the server and all other users together, who know their own shares of "
                f"the noise, epsilon is {rounded_up(self.pooled())} "
                f"({rounded_up(self.pooled('replace-one'))} {exchanged})."
            )
        if self.epsilon > WEAK:
            found += (
                f" An epsilon above {WEAK:g} is a weak promise: it lets somebody's odds of "
                f"guessing right about you change by a factor of more than {math.exp(WEAK):,.0f}."
            )
        return found

    def _no_guarantee(self) -> str:
        """Why, and what the same rounds would cost with secret noise, if that is a number."""
        found = f"NO GUARANTEE: {self.why_void}"
        seeded = self.simulation or self.stated.insecure_rounds
        if seeded and math.isfinite(self.cost):
            cost = rounded_up(self.cost)
            found += f" A deployment would cost epsilon = {cost} at delta = {self.stated.delta:g}."
        return found

    def _terms(self) -> list[str]:
        if not self.stated.rounds:
            return []
        terms = [] if self.why_void else [self._cost(), WHAT_DELTA_IS]
        terms += [self._mechanism(), self._releases()]
        if self.training.recipe is not None:
            terms.append(
                "What is published (w, its variance, unit and size) may be shared. Personal models "
                "are worked out by the users from it and from their own rows, which are in them: "
                "that costs no epsilon, and they stay with their users."
            )
        if self.training.metrics is not None:
            names = ", ".join(self.training.metrics.bounds)
            terms.append(
                f"Training measures ({names}) are inside the guarantee: they have "
                f"{self.training.metrics.share:g} of the squared clip norm, the gradient the rest."
            )
        if isinstance(self.training.release.cohort, FixedSize):
            paper = f"{self.stated.paper_epsilon():.4g}"
            terms.append(f"The paper would print epsilon = {paper} here: not a guarantee.")
        return terms

    def _cost(self) -> str:
        kind = "rounds" if self.training.recipe is None else "releases"
        rounds = self.stated.rounds
        stopped = " (planned; stopped earlier)" if rounds > self.charged.rounds else ""
        return (
            f"Epsilon is stated at delta = {self.stated.delta:g} over {rounds} {kind}{stopped}: "
            f"{rounded_up(self.epsilon)} if a user contributes nothing instead (zero-out "
            f"neighbours; bound: {self.method}; RDP bound {rounded_up(self.rdp)}), "
            f"{rounded_up(self.replace_one)} for replace-one neighbours, the paper's definition."
        )

    def _releases(self) -> str:
        """Everything that is published, with its noise and its bound."""
        listed = "; ".join(
            f"{each['what']} (z = {each['noise_multiplier']:.4g}, bound {each['bound']:.4g}, "
            f"{each['times']} ×)"
            for each in self._releases_as_data()
        )
        found = f"Published: {listed}."
        if self.training.recipe is not None and self.training.recipe.before:
            found += " The size C follows from what was published, by a public rule."
        return found

    def _mechanism(self) -> str:
        release = self.training.release
        if release.aggregation is not None:
            return _secure_mechanism(release, release.aggregation)
        if self.training.recipe is None:
            bound = f"clipped by the server to norm C = {release.clip_norm:g}"
            noise = "z*C"
        else:
            bound = f"divided by the size C and clipped by the server to norm {release.clip_norm:g}"
            noise = "z"
        return (
            f"Mechanism: sum of one vector per user, {bound}, plus Gaussian noise of standard "
            f"deviation {noise} with z = {release.noise_multiplier:g}, divided by the fixed number "
            f"D = {release.denominator:g}; a client that fails counts as zero. "
            f"{_sampling(release.cohort)}"
        )

    # --- as data

    def as_data(self) -> dict[str, Any]:
        """Everything in the statement, ready for JSON."""
        stated = self.stated
        per_node = self.unit == "node"
        data = {
            "guarantee": self.guarantee,
            "unit": "one start of a node" if per_node else "one node, taken to be one user",
            "delta": stated.delta,
            "epsilon": json_number(self.epsilon),
            "epsilon_replace_one": self._epsilon_for_json(self.replace_one),
            "epsilon_rdp": self._epsilon_for_json(self.rdp),
            "epsilon_bound": self.method,
            "deployed_epsilon": json_number(self.cost),
            "deployed_epsilon_replace_one": json_number(self.replace_one),
            "paper_epsilon_not_a_guarantee": json_number(stated.paper_epsilon()),
            "delta_taken_by_finite_precision": self.cut * (1 + math.exp(min(self.cost, 600.0))),
            "delta_taken_by_random_neighbours": stated.failure,
            "protects_from": self.others,
            "rounds_trained": self.rounds_trained,
            "rounds_charged": self.charged.rounds,
            "rounds_stated": stated.rounds,
            "denominator": self.training.release.denominator,
            "releases": self._releases_as_data(),
            "unit_and_size": [self.values.unit, self.values.size] if self.training.recipe else None,
            "insecure_rounds": stated.insecure_rounds,
            "evaluation_on_client_data": self.evaluated,
            "conditional_on": [],
            "caveats": list(self.caveats),
            "outside_the_guarantee": list(self.outside()),
            "ledger": json.loads(self.charged.to_json()),
            "short": self.short(),
            "statement": self.statement(),
        }
        if self._secure is not None:
            # all other users pooling, which a secure sum does not cover by its ε
            exchanged = self._epsilon_for_json(self.pooled("replace-one"))
            data["epsilon_all_others_pooling"] = self._epsilon_for_json(self.pooled())
            data["epsilon_all_others_pooling_replace_one"] = exchanged
        if self.simulation:
            data["noise"] = SIMULATION_NOISE
        return data

    def _releases_as_data(self) -> list[dict[str, Any]]:
        before = self.training.recipe.before if self.training.recipe is not None else {}
        found = []
        for release, times in self.stated.releases:
            names = [name for name, each in before.items() if each == release]
            found.append(
                {
                    "what": ", ".join(names) or "w",
                    "noise_multiplier": release.noise_multiplier,
                    "bound": release.clip_norm,
                    "times": times,
                }
            )
        return found

    def _epsilon_for_json(self, cost: float) -> float | str:
        """A further ε for JSON, infinite if nothing is guaranteed."""
        return json_number(math.inf if self.why_void else cost)


def with_conditions(data: Mapping[str, Any], conditions: Sequence[str]) -> dict[str, Any]:
    """The data of a promise that holds only under conditions, which its texts then name.

    Args:
        data: of ``Promise.as_data``.
        conditions: each as "provided that …"; up to a colon it is short enough for a screen.
    """
    if not conditions:
        return dict(data)
    first, *rest = str(data["statement"]).splitlines()
    lines = [f"{text[:1].upper()}{text[1:]}." for text in conditions]
    first_short, *rest_short = str(data["short"]).splitlines()
    return {
        **data,
        "conditional_on": list(conditions),
        "statement": "\n".join([first, *lines, *rest]),
        "short": "\n".join([first_short, up_to_colons(conditions), *rest_short]),
    }


def raised_plan(before: "Ledger", after: "Ledger", charges: int) -> str:
    """The caveat if a plan costs more than the one before a first charge; empty if it does not.

    Whatever was chosen after looking is no promise made in advance, unless a budget limits it.

    Args:
        before: the ledger that was stated, planned releases included.
        after: the one that is stated now.
        charges: the number of releases of any kind that were charged in between or before.
    """
    if not charges or after == before:
        return ""
    if after.epsilon() <= before.epsilon() and after.epsilon("replace-one") <= before.epsilon(
        "replace-one"
    ):
        return ""
    return (
        f"the plan was raised after {charges} charges, from epsilon = "
        f"{rounded_up(before.epsilon())} to {rounded_up(after.epsilon())}; if that was decided by "
        "looking at results, epsilon is what was spent so far, and not a guarantee that was fixed "
        "in advance"
    )


def _outside_secure_sums(release: Release, rules: SecureSum) -> tuple[str, ...]:
    """What secure sums do not cover."""
    if rules.is_complete(release.cohort.population):
        liar = "it then gets a sum of fewer clients with less noise, never one vector alone"
    else:
        liar = "neighbours are drawn at random, and it can then read single vectors"
    return (
        f"more colluding users than {rules.colluding}, counting every client that leaves out its "
        "noise: whoever knows all other shares of the noise subtracts them",
        f"a server that does not follow the protocol: if it lies about who survived, {liar}; about "
        "keys or users, it can read single vectors; each still has its own share of the noise, and "
        "the epsilon against all others holds; other code on the clients can send everything, and "
        "a client with ppsgd-secure = true refuses plain requests",
        "invented users: whoever runs the server vouches for the list of users and their keys",
        "clients that drop out because of their data: dropping out is taken to be independent of "
        "it",
        "what hostile clients do to the parameters: nobody sees a single vector, so nobody can "
        "clip it, and they can spoil the sum or stop a round",
    )


def _secure_mechanism(release: Release, rules: SecureSum) -> str:
    failure = ""
    if release.failure:
        failure = (
            f" Delta pays {release.failure:.2g} per round for neighbours that are drawn at random."
        )
    return (
        "Mechanism: secure sum of one vector per user, clipped by the client itself to norm "
        f"C = {release.clip_norm:g}, to which each client adds its share of the noise before it "
        f"masks it. The noise of any {rules.honest} honest clients has the standard deviation z*C "
        f"with z = {release.noise_multiplier:g}. Nothing is unmasked unless {rules.least} clients "
        "stay to the end of the round; such a round is charged and changes nothing. The sum is "
        f"divided by the fixed number D = {release.denominator:g}; a client that fails counts as "
        "zero and adds its noise. It relies on X25519, HKDF, ChaCha20, Poly1305 and the clients' "
        "own random numbers. Sampling: no amplification is claimed, since clients see who else "
        f"takes part.{failure}"
    )


def _sampling(cohort: Cohort) -> str:
    if isinstance(cohort, FixedSize):
        return (
            f"Sampling: exactly {cohort.size} of {cohort.population} users per round; no "
            "amplification by sampling is claimed, since no theorem covers it with clients that "
            "keep state."
        )
    if not cohort.amplifies:
        return f"Sampling: none, all {cohort.population} users take part in every round."
    return (
        f"Sampling: each of {cohort.population} enrolled users independently and in secret with "
        f"probability {cohort.rate:g}; who took part must stay secret."
    )


def up_to_colons(texts: Sequence[str]) -> str:
    """Texts on one line, each up to its colon."""
    return " · ".join(text.partition(":")[0] for text in texts)


def rounded_up(value: float, digits: int = DIGITS) -> str:
    """Four digits, rounded up: a promise is never printed smaller than it is."""
    if not 0 < value < math.inf:
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    steps = math.ceil(value / unit * (1 - 1e-12))
    return f"{steps * unit:.{digits}g}"


def json_number(value: float) -> float | str:
    """JSON has no infinity: it is the word "infinite"."""
    if math.isfinite(value):
        return value
    return "infinite" if value > 0 else str(value)
