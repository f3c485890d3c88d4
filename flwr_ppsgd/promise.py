"""What is promised, as finished numbers and words: what a privacy officer can paste into a report.

A :class:`Promise` is worked out once, by whoever holds the ledger. The statement, the line that
clients get, ``privacy.json`` and every printed ε come from here. Text is rounded up, data is not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr_ppsgd.algorithm import Cohort, FixedSize, PrivateMetrics, Release, SecureSum
from flwr_ppsgd.recipe import Recipe, Values

# up to its colon each is short enough for a screen
TRUSTED_SERVER = "the server itself, which is trusted: it sees each clipped gradient"
ALWAYS_OUTSIDE = (
    "metrics, logs and timings: whatever leaves the server or a node by another way than the "
    "published parameters",
    "the choice of settings: step, alpha, rounds or clip norm by looking at several runs",
    "a user behind more than one node: one node is taken to be one user",
    "other trainings on the same users: unless all of them are under one budget (budget_dir)",
    "whoever may submit a run to the SuperLink: they control the code on the clients, and Flower's "
    "counters of traffic show them how many clients take part",
    "the fact that a run ended: it can say that nobody's reply could be used",
)
OUTSIDE = (TRUSTED_SERVER, *ALWAYS_OUTSIDE)
NOTHING_PUBLISHED = "epsilon is 0: nothing is published"
DIGITS = 4
WEAK = 10.0  # an ε above this is said to be weak
SIMULATION_NOISE = "simulation noise: summed in floating point, for experiments only"


@dataclass(frozen=True)
class Headline:
    """The part of a promise that clients get with every Order.

    Args:
        cost: ε that the stated rounds cost with secret coins, under zero-out neighbours.
        delta: δ.
        rounds: the number of rounds for which ε is stated.
        insecure_rounds: how many of them drew their coins from a known seed.
        population: the number of enrolled users.
        unit: who is protected: "user", or "node" if a user may come back as another node.
        simulation: why this is a simulation, which guarantees nothing; empty if it is none.
        secure: of a training whose server sees sums only; None: the server is trusted.
    """

    cost: float
    delta: float
    rounds: int
    insecure_rounds: int
    population: int
    unit: str = "user"
    simulation: str = ""
    secure: SecureSum | None = None

    @property
    def epsilon(self) -> float:
        """ε that is guaranteed: infinite if nothing is, 0 if nothing is published."""
        if not self.rounds:
            return 0.0
        return math.inf if self.void else self.cost

    @property
    def void(self) -> bool:
        """Whether nothing is guaranteed."""
        return bool(self.why_void())

    def why_void(self) -> str:
        """Why nothing is guaranteed; empty if something is."""
        if self.simulation:
            return self.simulation
        if not self.rounds:
            return ""
        if self.insecure_rounds:
            return (
                f"{self.insecure_rounds} of {self.rounds} rounds drew their coins from a known "
                "seed (insecure_seed)."
            )
        if math.isinf(self.cost):
            return (
                "epsilon is infinite. Either nothing hides a user's contribution (noise multiplier "
                "0), or a cap on the cohort or random neighbours need more than the whole delta: "
                "raise it."
            )
        return why_delta_is_void(self.delta, self.population)

    def in_one_line(self) -> str:
        """For the users: what the planned rounds promise them."""
        if not self.rounds:
            return NOTHING_PUBLISHED
        if self.void:
            return "NO GUARANTEE: " + self.why_void()
        return (
            f"({rounded_up(self.epsilon)}, {self.delta:g})-joint differential privacy over "
            f"{self.rounds} planned rounds for each of {self.population} {self.unit}s; "
            f"{self._against()}"
        )

    def _against(self) -> str:
        """From whom it protects."""
        if self.secure is None:
            return "the server is trusted"
        return f"from the server too, together with up to {self.secure.colluding} other clients"


def why_delta_is_void(delta: float, population: int) -> str:
    """Why δ protects nobody among so many users; empty if it protects."""
    if delta * population < 1:
        return ""
    return (
        f"delta = {delta:g} is at least 1/population, and publishing all data of one random user "
        f"would satisfy that: choose delta well below {1 / population:g}."
    )


@dataclass(frozen=True)
class Promise:
    """Everything that is stated about one training.

    The numbers are what the stated rounds cost with secret coins. If nothing is guaranteed, none of
    them is called ε: the data hold the word "infinite", and ``deployed_epsilon`` is what the same
    rounds would cost in a deployment.

    Args:
        headline: ε, δ and whom they are about.
        release: what is published in a round.
        publishes: whether anything is published at all; not so at α = 0.
        method: the name of the bound that gave ε.
        replace_one: ε if a user's data are exchanged for any other.
        rdp: the RDP bound on ε, under zero-out neighbours.
        paper_epsilon: what the paper's figures would print; not a guarantee.
        delta_taken_by_cap: the part of δ that a cap on the cohort takes, zero-out.
        delta_taken_by_cap_replace_one: the same for replace-one neighbours.
        delta_taken_by_precision: the part of δ that the sampler's cut tail takes at most.
        delta_taken_by_neighbours: the part of δ that random neighbours of secure sums take.
        rounds_trained: the number of rounds that w has had.
        rounds_charged: the number of releases that were charged.
        metrics: training measures that are released along with the gradient.
        caveats: what else the reader must know.
        evaluated: whether there was evaluation on the users' own data.
        terms: further terms of a simulation.
        ledger: the ledger as data.
        release_data: the release as data.
        recipe: what ``auto`` releases; None is the paper's method.
        values: what its releases before the first round gave so far.
    """

    headline: Headline
    release: Release
    publishes: bool
    method: str
    replace_one: float
    rdp: float
    paper_epsilon: float
    delta_taken_by_cap: float
    delta_taken_by_cap_replace_one: float
    delta_taken_by_precision: float
    rounds_trained: int
    rounds_charged: int
    delta_taken_by_neighbours: float = 0.0
    metrics: PrivateMetrics | None = None
    caveats: tuple[str, ...] = ()
    evaluated: bool = False
    terms: tuple[str, ...] = ()
    ledger: Mapping[str, Any] = field(default_factory=dict)
    release_data: Mapping[str, Any] = field(default_factory=dict)
    recipe: Recipe | None = None
    values: Values = field(default_factory=Values)

    def statement(self) -> str:
        """The promise in words: what is promised, its terms, and what it does not cover."""
        lines = [self._promise(), *self.terms, *self._terms(), *self.caveats]
        if self.evaluated:
            lines.append(
                "Evaluation on the users' own data was on. Its results are outside the guarantee."
            )
        lines.append("Outside the guarantee: " + "; ".join(outside_of(self.release)) + ".")
        return "\n".join(lines)

    def as_data(self) -> dict[str, Any]:
        """Everything in the statement, ready for JSON."""
        head = self.headline
        level = f"{head.unit}-level joint differential privacy"
        per_node = head.unit == "node"
        data = {
            "guarantee": "none" if head.void else level,
            "unit": "one start of a node" if per_node else "one node, taken to be one user",
            "delta": head.delta,
            "epsilon": json_number(head.epsilon),
            "epsilon_replace_one": json_number(self._stated(self.replace_one)),
            "epsilon_rdp": json_number(self._stated(self.rdp)),
            "epsilon_bound": self.method,
            "deployed_epsilon": json_number(head.cost),
            "deployed_epsilon_replace_one": json_number(self.replace_one),
            "paper_epsilon_not_a_guarantee": json_number(self.paper_epsilon),
            "delta_taken_by_cap": json_number(self.delta_taken_by_cap),
            "delta_taken_by_cap_replace_one": json_number(self.delta_taken_by_cap_replace_one),
            "delta_taken_by_finite_precision": self.delta_taken_by_precision,
            "delta_taken_by_random_neighbours": self.delta_taken_by_neighbours,
            "protects_from": self._others(),
            "rounds_trained": self.rounds_trained,
            "rounds_charged": self.rounds_charged,
            "rounds_stated": head.rounds,
            "denominator": self.release.denominator,
            "release": dict(self.release_data),
            "recipe": self._recipe_as_data(),
            "insecure_rounds": head.insecure_rounds,
            "evaluation_on_client_data": self.evaluated,
            "caveats": list(self.caveats),
            "outside_the_guarantee": list(outside_of(self.release)),
            "ledger": dict(self.ledger),
            "statement": self.statement(),
        }
        if head.simulation:
            data["noise"] = SIMULATION_NOISE
        return data

    def _recipe_as_data(self) -> dict[str, Any] | None:
        if self.recipe is None:
            return None
        before = {
            name: {"noise_multiplier": release.noise_multiplier, "bound": release.clip_norm}
            for name, release in self.recipe.before.items()
        }
        return {
            "task": self.recipe.task,
            "rounds": self.recipe.rounds,
            "before_the_rounds": before,
            "unit": self.values.unit,
            "size": self.values.size,
        }

    def _stated(self, cost: float) -> float:
        """A further ε, infinite if nothing is guaranteed."""
        return math.inf if self.headline.void else cost

    def _promise(self) -> str:
        head = self.headline
        if head.void:
            return f"NO GUARANTEE: {head.why_void()}{self._deployed()}"
        if not self.publishes and not head.rounds:
            return (
                "Nothing was published about anybody (local learning, alpha = 0): epsilon is 0 for "
                "every user."
            )
        weak = ""
        if head.epsilon > WEAK:
            weak = (
                f" An epsilon above {WEAK:g} is a weak promise: it lets somebody's odds of "
                "guessing right about you change by a factor of more than "
                f"{math.exp(WEAK):,.0f}."
            )
        return (
            f"To each of the {head.population} enrolled {head.unit}s: {self._others()}, "
            "even pooling their data and personal models, learns no more about your data than "
            f"({rounded_up(head.epsilon)}, {head.delta:g})-joint differential privacy allows.{weak}"
        )

    def _others(self) -> str:
        """Those from whom a user is protected."""
        rules = self.release.aggregation
        if rules is None:
            return "everybody else together"
        if not rules.colluding:
            return "the server alone, which sees sums only"
        return f"the server, which sees sums only, together with any {rules.colluding} other users"

    def _deployed(self) -> str:
        """What the same rounds would cost with secret coins, if that is a number."""
        head = self.headline
        seeded = head.simulation or head.insecure_rounds
        if not seeded or math.isinf(head.cost):
            return ""
        cost = rounded_up(head.cost)
        return f" A deployment would cost epsilon = {cost} at delta = {head.delta:g}."

    def _terms(self) -> list[str]:
        if not self.headline.rounds:
            return []
        terms = [] if self.headline.void else [self._cost()]
        terms.append(self._mechanism())
        if self.delta_taken_by_cap:
            terms.append(
                "Delta is the total: the cap on the users of a round takes "
                f"{self.delta_taken_by_cap:.2g} of it for zero-out and "
                f"{self.delta_taken_by_cap_replace_one:.2g} for replace-one neighbours, finite "
                f"precision at most {self.delta_taken_by_precision:.2g}."
            )
        if self.recipe is not None:
            terms += self._recipe_terms(self.recipe)
        if self.metrics is not None:
            names = ", ".join(self.metrics.bounds)
            terms.append(
                f"Training measures ({names}) are inside the guarantee: they have "
                f"{self.metrics.share:g} of the squared clip norm, the gradient the rest."
            )
        if isinstance(self.release.cohort, FixedSize):
            paper = f"{self.paper_epsilon:.4g}"
            terms.append(f"The paper would print epsilon = {paper} here: not a guarantee.")
        return terms

    def _cost(self) -> str:
        head = self.headline
        stopped = " (planned; stopped earlier)" if head.rounds > self.rounds_charged else ""
        return (
            f"Epsilon at delta = {head.delta:g} over {self._releases()}{stopped}: "
            f"{rounded_up(head.epsilon)} if a user contributes nothing instead (zero-out "
            f"neighbours; bound: {self.method}; RDP bound {rounded_up(self.rdp)}), "
            f"{rounded_up(self.replace_one)} if a user's data are exchanged for any other "
            "(replace-one neighbours, the paper's definition)."
        )

    def _releases(self) -> str:
        """The number of releases for which ε is stated."""
        kind = "rounds" if self.recipe is None else "releases"
        return f"{self.headline.rounds} {kind}"

    def _recipe_terms(self, recipe: Recipe) -> list[str]:
        """What is released before the rounds, what the server sees, and what stays with users."""
        terms = []
        if recipe.before:
            listed = ", ".join(
                f"{name} (bound {release.clip_norm:.4g}, z = {release.noise_multiplier:.4g})"
                for name, release in recipe.before.items()
            )
            terms.append(
                f"Before the rounds everybody was asked once for: {listed}. They are inside the "
                "guarantee, and the unit and the size C follow from them by a public rule."
            )
        if recipe.release.aggregation is None:
            terms.append(
                "The server, which is trusted, sees each user's own fitted model, clipped; of a "
                "user with one row, that row's direction."
            )
        terms.append(
            "Personal models are worked out by the users from the published parameters and their "
            "own data. That costs no epsilon; what they chose and gained stays with them."
        )
        return terms

    def _mechanism(self) -> str:
        release = self.release
        if release.aggregation is not None:
            return _secure_mechanism(release, release.aggregation)
        return (
            "Mechanism: sum of one vector per user, clipped by the server to norm "
            f"C = {release.clip_norm:g}, plus Gaussian noise of standard deviation z*C with "
            f"z = {release.noise_multiplier:g}, divided by the fixed number "
            f"D = {release.denominator:g}; a client that fails counts as zero. "
            f"{_sampling(release.cohort)}"
        )


def outside_of(release: Release) -> tuple[str, ...]:
    """What no guarantee of this release covers."""
    rules = release.aggregation
    if rules is None:
        return OUTSIDE
    fewer = "it could then sum fewer clients with less noise"
    if not release.failure:
        fewer += ", never one alone"
    return (
        f"more than {rules.colluding} colluding clients, counting every client that leaves out its "
        "noise: whoever knows all other shares of the noise subtracts them",
        f"a server that lies: about keys, about who survived ({fewer}), by shipping other code to "
        "the clients, or by asking for plain vectors, which a client with ppsgd-secure = true "
        "refuses",
        "clients that drop out because of their data: dropping out is taken to be independent of "
        "it",
        "what hostile clients do to the parameters: nobody sees a single vector, so nobody can "
        "clip it, and they can spoil the sum or stop a round",
        *ALWAYS_OUTSIDE,
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
        f"stay to the end of the round; such a round is charged and changes nothing. The sum is "
        f"divided by the fixed number D = {release.denominator:g}; a client that fails counts as "
        "zero and adds its noise. It rests on X25519 and ChaCha20. Sampling: no amplification is "
        f"claimed, since clients see who else takes part.{failure}"
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
        f"Sampling: each of {cohort.population} enrolled users by an independent secret coin with "
        f"probability {cohort.rate:g}; who took part must stay secret."
    )


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
