"""The guarantee in words and as data: what a privacy officer can paste into a report."""

import functools
import json
import math
from typing import Any

from flwr_ppsgd.algorithm import Cohort, FixedSize
from flwr_ppsgd.noise import residual_delta
from flwr_ppsgd.privacy import Ledger, release_to_dict
from flwr_ppsgd.server.curator import Curator

OUTSIDE = (
    "the server itself, which is trusted: it sees each clipped gradient",
    "metrics, logs and timings that leave the server or a node by any other way than the published parameters",
    "the choice of settings (step, alpha, rounds, clip norm) by looking at results of several runs",
    "a user who is behind more than one node: one node is taken to be one user",
    "other trainings on the same users: their epsilons add up",
)


def charged(curator: Curator) -> Ledger:
    """The ledger for which ε is stated: what was released, and the planned rounds that were not run."""
    missing = max(0, curator.planned_charges - curator.ledger.rounds)
    return curator.ledger.record(curator.release, missing, insecure=curator.insecure_seed is not None)


def as_data(curator: Curator, *, size: int = 0) -> dict[str, Any]:
    """Everything in the statement, for ``privacy.json``."""
    ledger = charged(curator)
    return {
        "guarantee": "none" if _voided(ledger) else f"{_level(curator)}-level joint differential privacy",
        "unit": "one start of a node" if curator.caveat else "one node, taken to be one user",
        "delta": ledger.delta,
        "epsilon": json_number(ledger.epsilon()),
        "epsilon_replace_one": json_number(ledger.epsilon("replace-one")),
        "epsilon_rdp": json_number(ledger.epsilon(method="rdp")),
        "paper_epsilon_not_a_guarantee": json_number(ledger.paper_epsilon()),
        "delta_taken_by_cap": json_number(ledger.delta_added()),
        "delta_taken_by_cap_replace_one": json_number(ledger.delta_added("replace-one")),
        "delta_added_by_finite_precision": residual_delta(size, ledger.rounds, ledger.epsilon("replace-one")),
        "rounds_trained": curator.rounds_done,
        "rounds_charged": curator.ledger.rounds,
        "rounds_stated": ledger.rounds,
        "denominator": curator.release.denominator,
        "release": release_to_dict(curator.release),
        "insecure_rounds": ledger.insecure_rounds,
        "evaluation_on_client_data": curator.evaluated,
        "outside_the_guarantee": list(OUTSIDE),
        "ledger": json.loads(curator.ledger.to_json()),
        "statement": in_words(curator),
    }


def in_words(curator: Curator) -> str:
    """The statement to print. It holds the promise, its terms, and what it does not cover."""
    ledger = charged(curator)
    lines = [_promise(curator, ledger), *_terms(curator, ledger)]
    if curator.caveat:
        lines.append(f"User-level privacy across restarts of a node is NOT claimed: {curator.caveat}.")
    if curator.evaluated:
        lines.append("Evaluation on the users' own data was on. Its results are outside the guarantee.")
    lines.append("Outside the guarantee: " + "; ".join(OUTSIDE) + ".")
    return "\n".join(lines)


def in_one_line(curator: Curator) -> str:
    """For the users: what the planned rounds promise them. Public, and the same in every round of a plan."""
    if not curator.planned_charges:
        return "epsilon is 0: nothing is published" if not curator.steps.publishes else ""
    return _one_line(charged(curator), curator.release.cohort.population, _level(curator))


@functools.lru_cache(maxsize=64)
def _one_line(ledger: Ledger, population: int, level: str) -> str:
    if _voided(ledger):
        return "NO GUARANTEE: coins from a known seed, or no noise"
    return (
        f"({_up(ledger.epsilon())}, {ledger.delta:g})-joint differential privacy over {ledger.rounds} planned rounds "
        f"for each of {population} {level}s; the server is trusted"
    )


def _promise(curator: Curator, ledger: Ledger) -> str:
    if not curator.steps.publishes and not ledger.rounds:
        return "Nothing was published about anybody (local learning, alpha = 0): epsilon is 0 for every user."
    if ledger.insecure_rounds:
        return (
            f"NO GUARANTEE: {ledger.insecure_rounds} of {ledger.rounds} rounds drew their coins from a known seed "
            f"(insecure_seed). With secret coins the same rounds would have cost epsilon = {_up(ledger.epsilon())} at "
            f"delta = {ledger.delta:g}."
        )
    if math.isinf(ledger.epsilon()):
        return (
            "NO GUARANTEE: epsilon is infinite. Either nothing hides a user's contribution (noise multiplier 0), or a "
            "cap on the cohort needs more than the whole delta: raise it."
        )
    return (
        f"To each of the {curator.release.cohort.population} enrolled {_level(curator)}s: everybody else together, "
        f"even pooling their data and personal models, learns no more about your data than ({_up(ledger.epsilon())}, "
        f"{ledger.delta:g})-joint differential privacy allows."
    )


def _level(curator: Curator) -> str:
    """Who is protected: a user, or no more than one start of a node."""
    return "node" if curator.caveat else "user"


def _terms(curator: Curator, ledger: Ledger) -> list[str]:
    if not ledger.rounds:
        return []
    release = curator.release
    stopped = " (planned; stopped earlier)" if ledger.rounds > curator.ledger.rounds else ""
    rdp = _up(ledger.epsilon(method="rdp"))
    terms = [
        f"Epsilon at delta = {ledger.delta:g} over {ledger.rounds} rounds{stopped}: {_up(ledger.epsilon())} if a user "
        f"contributes nothing instead (zero-out neighbours; RDP bound {rdp}), {_up(ledger.epsilon('replace-one'))} if "
        f"a user's data are exchanged for any other (replace-one neighbours, the paper's definition).",
        f"Mechanism: sum of one vector per user, clipped by the server to norm C = {release.clip_norm:g}, plus "
        f"Gaussian noise of standard deviation z*C with z = {release.noise_multiplier:g}, divided by the fixed number "
        f"D = {release.denominator:g}; a client that fails counts as zero. {_sampling(release.cohort)}",
    ]
    if taken := ledger.delta_added():
        terms.append(
            f"Delta is the total: the cap on the users of a round takes {taken:.2g} of it for zero-out and "
            f"{ledger.delta_added('replace-one'):.2g} for replace-one neighbours."
        )
    if curator.metrics is not None:
        terms.append(
            f"Training measures ({', '.join(curator.metrics.bounds)}) are inside the guarantee: they have "
            f"{curator.metrics.share:g} of the squared clip norm, the gradient the rest."
        )
    if isinstance(release.cohort, FixedSize):
        terms.append(f"The paper would print epsilon = {ledger.paper_epsilon():.4g} here: not a guarantee.")
    return terms


def _sampling(cohort: Cohort) -> str:
    if isinstance(cohort, FixedSize):
        return (
            f"Sampling: exactly {cohort.size} of {cohort.population} users a round; no amplification by sampling is "
            "claimed, since no theorem covers it with clients that keep state."
        )
    if not cohort.amplifies:
        return f"Sampling: none, all {cohort.population} users take part in every round."
    return (
        f"Sampling: each of {cohort.population} enrolled users by an independent secret coin with probability "
        f"{cohort.rate:g}; who took part must stay secret."
    )


def _voided(ledger: Ledger) -> bool:
    return ledger.insecure_rounds > 0 or math.isinf(ledger.epsilon())


def _up(value: float) -> str:
    """Four digits, rounded up: a promise is never printed smaller than it is."""
    if not 0 < value < math.inf:
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.4g}"


def json_number(value: float) -> float | str:
    """JSON has no infinity: it is the word "infinite"."""
    return value if math.isfinite(value) else "infinite" if value > 0 else str(value)
