"""What is promised, as finished numbers and words: what a privacy officer can paste into a report.

A :class:`Promise` is worked out once, by whoever holds the ledger. The statement, the line that
clients get, ``privacy.json`` and every printed ε come from here. Text is rounded up, data is not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr_ppsgd.algorithm import Cohort, FixedSize, PrivateMetrics, Release

OUTSIDE = (
    "the server itself, which is trusted: it sees each clipped gradient",
    "metrics, logs and timings that leave the server or a node by any other way than the published "
    "parameters",
    "the choice of settings (step, alpha, rounds, clip norm) by looking at results of several runs",
    "a user who is behind more than one node: one node is taken to be one user",
    "other trainings on the same users: their epsilons add up",
)
NOTHING_PUBLISHED = "epsilon is 0: nothing is published"
DIGITS = 4


@dataclass(frozen=True)
class Headline:
    """The part of a promise that clients get with every Order.

    Args:
        epsilon: ε over the stated rounds, under zero-out neighbours.
        delta: δ.
        rounds: the number of rounds for which ε is stated.
        insecure_rounds: how many of them drew their coins from a known seed.
        population: the number of enrolled users.
        unit: who is protected: "user", or "node" if a user may come back as another node.
    """

    epsilon: float
    delta: float
    rounds: int
    insecure_rounds: int
    population: int
    unit: str = "user"

    @property
    def void(self) -> bool:
        """Whether nothing is guaranteed."""
        return self.insecure_rounds > 0 or math.isinf(self.epsilon)

    def in_one_line(self) -> str:
        """For the users: what the planned rounds promise them."""
        if not self.rounds:
            return NOTHING_PUBLISHED
        if self.void:
            return "NO GUARANTEE: coins from a known seed, or no noise"
        return (
            f"({rounded_up(self.epsilon)}, {self.delta:g})-joint differential privacy over "
            f"{self.rounds} planned rounds for each of {self.population} {self.unit}s; the server "
            "is trusted"
        )


@dataclass(frozen=True)
class Promise:
    """Everything that is stated about one training.

    Args:
        headline: ε, δ and whom they are about.
        release: what is published in a round.
        publishes: whether anything is published at all; not so at α = 0.
        epsilon_replace_one: ε if a user's data are exchanged for any other.
        epsilon_rdp: the RDP bound on ε, under zero-out neighbours.
        paper_epsilon: what the paper's figures would print; not a guarantee.
        delta_taken_by_cap: the part of δ that a cap on the cohort takes, zero-out.
        delta_taken_by_cap_replace_one: the same for replace-one neighbours.
        delta_added_by_finite_precision: what the sampler's cut tail adds to δ at most.
        rounds_trained: the number of rounds that w has had.
        rounds_charged: the number of releases that were charged.
        metrics: training measures that are released along with the gradient.
        caveat: why a place in the population may not be one user; empty if it is.
        evaluated: whether there was evaluation on the users' own data.
        simulation: terms of a simulation, which guarantees nothing; the first says why.
        ledger: the ledger as data.
        release_data: the release as data.
    """

    headline: Headline
    release: Release
    publishes: bool
    epsilon_replace_one: float
    epsilon_rdp: float
    paper_epsilon: float
    delta_taken_by_cap: float
    delta_taken_by_cap_replace_one: float
    delta_added_by_finite_precision: float
    rounds_trained: int
    rounds_charged: int
    metrics: PrivateMetrics | None = None
    caveat: str = ""
    evaluated: bool = False
    simulation: tuple[str, ...] = ()
    ledger: Mapping[str, Any] = field(default_factory=dict)
    release_data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def void(self) -> bool:
        """Whether nothing is guaranteed."""
        return bool(self.simulation) or self.headline.void

    def statement(self) -> str:
        """The promise in words: what is promised, its terms, and what it does not cover."""
        lines = [self._promise(), *self.simulation[1:], *self._terms()]
        if self.caveat:
            lines.append(
                f"User-level privacy across restarts of a node is NOT claimed: {self.caveat}."
            )
        if self.evaluated:
            lines.append(
                "Evaluation on the users' own data was on. Its results are outside the guarantee."
            )
        lines.append("Outside the guarantee: " + "; ".join(OUTSIDE) + ".")
        return "\n".join(lines)

    def as_data(self) -> dict[str, Any]:
        """Everything in the statement, ready for JSON."""
        head = self.headline
        level = f"{head.unit}-level joint differential privacy"
        unit = "one start of a node" if self.caveat else "one node, taken to be one user"
        data = {
            "guarantee": "none" if self.void else level,
            "unit": unit,
            "delta": head.delta,
            "epsilon": json_number(head.epsilon),
            "epsilon_replace_one": json_number(self.epsilon_replace_one),
            "epsilon_rdp": json_number(self.epsilon_rdp),
            "paper_epsilon_not_a_guarantee": json_number(self.paper_epsilon),
            "delta_taken_by_cap": json_number(self.delta_taken_by_cap),
            "delta_taken_by_cap_replace_one": json_number(self.delta_taken_by_cap_replace_one),
            "delta_added_by_finite_precision": self.delta_added_by_finite_precision,
            "rounds_trained": self.rounds_trained,
            "rounds_charged": self.rounds_charged,
            "rounds_stated": head.rounds,
            "denominator": self.release.denominator,
            "release": dict(self.release_data),
            "insecure_rounds": head.insecure_rounds,
            "evaluation_on_client_data": self.evaluated,
            "outside_the_guarantee": list(OUTSIDE),
            "ledger": dict(self.ledger),
            "statement": self.statement(),
        }
        if self.simulation:
            data["noise"] = "simulation noise: summed in floating point, for experiments only"
        return data

    def _promise(self) -> str:
        head = self.headline
        if self.simulation:
            cost = rounded_up(head.epsilon)
            return f"{self.simulation[0]} A deployment would cost epsilon = {cost}."
        if not self.publishes and not head.rounds:
            return (
                "Nothing was published about anybody (local learning, alpha = 0): epsilon is 0 for "
                "every user."
            )
        if head.insecure_rounds:
            return (
                f"NO GUARANTEE: {head.insecure_rounds} of {head.rounds} rounds drew their coins "
                "from a known seed (insecure_seed). With secret coins the same rounds would have "
                f"cost epsilon = {rounded_up(head.epsilon)} at delta = {head.delta:g}."
            )
        if math.isinf(head.epsilon):
            return (
                "NO GUARANTEE: epsilon is infinite. Either nothing hides a user's contribution "
                "(noise multiplier 0), or a cap on the cohort needs more than the whole delta: "
                "raise it."
            )
        return (
            f"To each of the {head.population} enrolled {head.unit}s: everybody else together, "
            "even pooling their data and personal models, learns no more about your data than "
            f"({rounded_up(head.epsilon)}, {head.delta:g})-joint differential privacy allows."
        )

    def _terms(self) -> list[str]:
        if not self.headline.rounds:
            return []
        terms = [self._cost(), self._mechanism()]
        if self.delta_taken_by_cap:
            terms.append(
                "Delta is the total: the cap on the users of a round takes "
                f"{self.delta_taken_by_cap:.2g} of it for zero-out and "
                f"{self.delta_taken_by_cap_replace_one:.2g} for replace-one neighbours."
            )
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
            f"Epsilon at delta = {head.delta:g} over {head.rounds} rounds{stopped}: "
            f"{rounded_up(head.epsilon)} if a user contributes nothing instead (zero-out "
            f"neighbours; RDP bound {rounded_up(self.epsilon_rdp)}), "
            f"{rounded_up(self.epsilon_replace_one)} if a user's data are exchanged for any other "
            "(replace-one neighbours, the paper's definition)."
        )

    def _mechanism(self) -> str:
        release = self.release
        return (
            "Mechanism: sum of one vector per user, clipped by the server to norm "
            f"C = {release.clip_norm:g}, plus Gaussian noise of standard deviation z*C with "
            f"z = {release.noise_multiplier:g}, divided by the fixed number "
            f"D = {release.denominator:g}; a client that fails counts as zero. "
            f"{_sampling(release.cohort)}"
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


def rounded_up(value: float) -> str:
    """Four digits, rounded up: a promise is never printed smaller than it is."""
    if not 0 < value < math.inf:
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - DIGITS + 1)
    steps = math.ceil(value / unit * (1 - 1e-12))
    return f"{steps * unit:.{DIGITS}g}"


def json_number(value: float) -> float | str:
    """JSON has no infinity: it is the word "infinite"."""
    if math.isfinite(value):
        return value
    return "infinite" if value > 0 else str(value)
