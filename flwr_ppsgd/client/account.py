"""What a device's answers cost: one account over all servers and trainings, and f of each training.

Closed form, without an accounting library: answers whose noise multipliers are z_1, z_2, … and
whose vectors are bounded to f times the bound are together one Gaussian mechanism with
μ² = Σ (f/z_j)². Refusing what would pass a μ² that was fixed before the first answer is a filter:
it holds also if z and w are chosen after looking.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from flwr_ppsgd.client.policy import DELTA, MAX_EPSILON, MAX_OWN_EPSILON, OWN_EPSILON, Policy
from flwr_ppsgd.client.refusal import RefusalCode, RefusedError, limit_refusal
from flwr_ppsgd.noise import CUT_TAIL
from flwr_ppsgd.secure.terms import SecureTerms
from flwr_ppsgd.wire import Order, Plan

FOR_NOISE = 0.9  # of δ; the rest is for what may go wrong in secure sums
ROUNDING = 1e-9  # relative, on the side of more privacy
LARGEST_EPSILON = 1e6  # beyond it nothing is protected
LARGEST_EXPONENT = 600.0
ULP = 2.0**-52
ROOT_TWO = math.sqrt(2)


# --- the closed form


def delta_of(mu: float, epsilon: float) -> float:
    """δ of a Gaussian mechanism with sensitivity/σ = μ at this ε, never below the exact value.

    Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ); a second term that is too small for a float is left out.
    """
    if mu == 0:
        return 0.0
    at = epsilon / mu - mu / 2
    above = math.erfc(at / ROOT_TWO) / 2
    beyond = epsilon / mu + mu / 2
    below = math.erfc(beyond / ROOT_TWO) / 2
    if below == 0 or epsilon > LARGEST_EXPONENT:
        return above
    rounding = (8 + at**2) * ULP * above  # of both terms, which may nearly cancel
    return max(0.0, above - math.exp(epsilon) * below + rounding)


def largest_mu(epsilon: float, delta: float) -> float:
    """The largest μ whose Gaussian mechanism is (ε, δ)-differentially private."""
    high = 1.0
    while delta_of(high, epsilon) <= delta and high < LARGEST_EPSILON:
        high *= 2
    low, _ = _bisect(high, lambda mu: delta_of(mu, epsilon) <= delta)
    return low


def epsilon_of(mu: float, delta: float) -> float:
    """The smallest ε at which a Gaussian mechanism with this μ has δ; infinite if it is huge."""
    if delta_of(mu, LARGEST_EPSILON) > delta:
        return math.inf
    _, high = _bisect(LARGEST_EPSILON, lambda epsilon: delta_of(mu, epsilon) > delta)
    return high


def _bisect(high: float, is_below: Callable[[float], bool]) -> tuple[float, float]:
    """Both sides of the number between 0 and ``high`` up to which ``is_below`` holds."""
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        if is_below(middle):
            low = middle
        else:
            high = middle
    return low, high


# --- one training


@dataclass(frozen=True)
class Agreement:
    """What one training may not change, and how often it was answered.

    Args:
        plan: the Order's plan, as the first one had it.
        terms: of secure sums, by what was asked for, as they first were.
        last: the start of the server and the round of the last answer to exchange 3 or 4 of a
            secure sum, by what was asked for and the exchange.
        answers: how many vectors have left, by what was asked for.
        factor: f; the bound of everything that leaves is f times the release's own.
    """

    plan: Plan = field(default_factory=dict)
    terms: dict[str, dict[str, Any]] = field(default_factory=dict)
    last: dict[str, tuple[int, int]] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)
    factor: float = 1.0

    def with_order(self, order: Order, policy: Policy) -> Self:
        """With the Order's plan, terms and f; RefusedError if they were others before."""
        is_fixed = order.terms is not None or policy.needs_plan
        if is_fixed and not order.plan and order.publishes:
            raise _plan_refusal(
                order,
                "an Order without a plan: what the training will cost this user is not known; the "
                "server's operator has to install the same flwr-ppsgd",
            )
        plan = order.plan
        if is_fixed and self.plan:
            self._refuse_growth(order)
            plan = self.plan
        factor = factor_of(order, policy, plan)
        if self.answers and factor != self.factor:
            raise _plan_refusal(
                order,
                f"f = {factor:.3g} in a training that was answered with {self.factor:.3g}: it is "
                f"fixed before the first answer; set {OWN_EPSILON} and {DELTA} as they were",
            )
        agreed = replace(self, plan=plan, factor=factor)
        return agreed if order.terms is None else agreed._with_terms(order, order.terms)

    def _refuse_growth(self, order: Order) -> None:
        for part, (z, times) in order.plan.items():
            planned, most = self.plan.get(part, (math.inf, 0))
            if z < planned or times > most:
                raise _plan_refusal(
                    order,
                    f"the plan has {times} times {part} with noise multiplier {z:g}, and the first "
                    f"Order of this training had {most} with {planned:g}: it is fixed; nothing is "
                    "sent",
                )

    def _with_terms(self, order: Order, terms: SecureTerms) -> Self:
        now = terms.to_flat()
        for name, value in self.terms.get(order.asks, now).items():
            if now[name] != value:
                raise _plan_refusal(
                    order,
                    f"{name} of the secure sum was {value} in this training and is {now[name]} "
                    "now: it is fixed; nothing is sent",
                )
        z = terms.noise_multiplier
        planned, _ = self.plan.get(order.asks, (z, 0))
        if planned != z:
            raise _plan_refusal(
                order,
                f"a secure sum with noise multiplier {z:g} where the plan has {planned:g}: nothing "
                "is sent",
            )
        return replace(self, terms={**self.terms, order.asks: now})

    def with_answer(self, order: Order) -> Self:
        """After one more vector; RefusedError if a secure sum asks twice, or beyond the plan."""
        number = self.answers.get(order.asks, 0) + 1
        counted = replace(self, answers={**self.answers, order.asks: number})
        if order.terms is None:
            return counted
        _, times = self.plan.get(order.asks, (0.0, 0))
        restarts = max(0, len(order.starts) - 1)
        if number > times + restarts:
            raise _plan_refusal(
                order,
                f"{number - 1} answers were given and {times} are planned, with {restarts} "
                "restarts of the server: no more are given",
            )
        return counted.with_exchange(order, stage=3)

    def with_exchange(self, order: Order, stage: int) -> Self:
        """After this exchange of a secure sum; RefusedError unless it comes after the last one."""
        name = f"{order.asks} {stage}"
        here = (len(order.starts), order.round)
        start, round_ = self.last.get(name, (-1, 0))
        if here <= (start, round_):
            raise _plan_refusal(
                order,
                f"exchange {stage} of round {order.round} in the server's start {here[0]}, after "
                f"round {round_} in start {start}: a round is answered once",
            )
        return replace(self, last={**self.last, name: here})

    def cost(self, part: str) -> float:
        """(f/z)² of one answer; infinite if the server states no noise."""
        z, _ = self.plan.get(part, (0.0, 0))
        if z == 0:
            return math.inf
        return (self.factor / z) ** 2 * (1 + ROUNDING)

    def rest(self, order: Order) -> float:
        """Σ (f/z)² of what is still planned; of one answer, if a round asks a part of the users."""
        if order.sampled:
            return self.cost(order.asks)
        total = 0.0
        for part, (_, times) in self.plan.items():
            missing = times - self.answers.get(part, 0)
            if missing > 0:
                total += missing * self.cost(part)
        return total


def factor_of(order: Order, policy: Policy, plan: Plan) -> float:
    """f: the largest number up to 1 with which the plan costs the user's own ε; 1 without one."""
    if math.isinf(policy.epsilon) or not order.publishes:
        return 1.0
    noiseless = any(z == 0 for z, _ in plan.values())
    unbounded = bool(order.metrics) and order.terms is None  # measures that the server bounds
    if order.sampled or noiseless or unbounded:
        raise _plan_refusal(
            order,
            f"{OWN_EPSILON} needs everybody in every round, noise, and no private measures that "
            "the server bounds: nothing is sent; remove it to take part",
        )
    mu_squared = sum(times / z**2 for z, times in plan.values())
    answers = sum(times for _, times in plan.values())
    delta = policy.delta
    if order.terms is not None:
        delta -= order.terms.release.failure * answers
    if delta <= 0:
        raise _plan_refusal(order, f"{DELTA} is less than secure sums take from it: raise it")
    allowed = largest_mu(policy.epsilon, delta) * (1 - ROUNDING)
    return min(1.0, allowed / math.sqrt(mu_squared))


def _plan_refusal(order: Order, reason: str) -> RefusedError:
    code = RefusalCode.REFUSED_POLICY if order.terms is None else RefusalCode.REFUSED_SECURE
    return RefusedError(code, reason)


# --- all trainings


@dataclass(frozen=True)
class DeviceAccount:
    """What has left about one user, over all servers and trainings.

    Args:
        trusted: Σ (f/z)² of vectors that a server saw, and adds noise to.
        secure: Σ (f/z)² of vectors in secure sums.
        alone: Σ h·(f/z)² of these: what they cost if nobody else's noise is trusted.
        failure: Σ η of these, which δ pays.
        shares: Σ h·d of these: the number of shares of noise whose cut tails δ pays too.
        unpriced: the number of answers outside every ε: evaluations, stock strategies, no noise.
        limit: the largest ``ppsgd-max-own-epsilon`` that was ever set; 0: never.
        delta: the ``ppsgd-delta`` of the first answer that had one.
        promised: the largest ε that each training has promised, by its number.
        by_key: Σ (f/z)² by the key of the training.
    """

    trusted: float = 0.0
    secure: float = 0.0
    alone: float = 0.0
    failure: float = 0.0
    shares: float = 0.0
    unpriced: int = 0
    limit: float = 0.0
    delta: float = 0.0
    promised: dict[str, float] = field(default_factory=dict)
    by_key: dict[str, float] = field(default_factory=dict)

    @property
    def mu_squared(self) -> float:
        """μ² of everything that has left, if the noise is as stated."""
        return self.trusted + self.secure

    def admit(self, order: Order, agreement: Agreement, policy: Policy) -> None:
        """RefusedError if the rest of this training does not fit within the owner's limits."""
        total = sum(self.with_promise(order).promised.values())
        if not total <= policy.max_epsilon:
            raise _plan_refusal(
                order,
                f"an Order with epsilon {order.epsilon:g}, which makes {total:g} over all "
                f"trainings, where {MAX_EPSILON} is {policy.max_epsilon:g}",
            )
        if policy.limits_own and order.publishes:
            self._check_own(policy, self.mu_squared + agreement.rest(order))

    def with_charge(self, order: Order, agreement: Agreement, policy: Policy, size: int) -> Self:
        """After one more vector; RefusedError if it would pass the owner's limit.

        Args:
            order: what is answered.
            agreement: f of this training.
            policy: the owner's limits.
            size: the number of coordinates of the vector.
        """
        after = replace(self.with_promise(order), delta=self.delta or policy.delta)
        if policy.limits_own:
            after = replace(after, limit=max(self.limit, policy.max_own_epsilon))
        after = after._with_cost(order, agreement.cost(order.asks), size)
        if policy.limits_own:
            after._check_own(policy, after.mu_squared)
        return after

    def _with_cost(self, order: Order, cost: float, size: int) -> Self:
        if math.isinf(cost):
            return self.with_unpriced()
        key = order.server_key
        by_key = {**self.by_key, key: self.by_key.get(key, 0.0) + cost}
        terms = order.terms
        if terms is None:
            return replace(self, by_key=by_key, trusted=self.trusted + cost)
        return replace(
            self,
            by_key=by_key,
            secure=self.secure + cost,
            alone=self.alone + terms.honest * cost,
            failure=self.failure + terms.release.failure,
            shares=self.shares + terms.honest * size,
        )

    def with_unpriced(self) -> Self:
        """After one more answer outside every ε."""
        return replace(self, unpriced=self.unpriced + 1)

    def with_promise(self, order: Order) -> Self:
        """A training counts whole from its first answer on, with the most that it has promised."""
        name = f"{order.training:016x}"
        promised = max(order.epsilon, self.promised.get(name, 0.0))
        return replace(self, promised={**self.promised, name: promised})

    def _check_own(self, policy: Policy, spent: float) -> None:
        """RefusedError unless μ² and what secure sums take from δ stay within ε_max at δ."""
        limit = policy.max_own_epsilon
        noise_delta = FOR_NOISE * policy.delta
        if self.unpriced:
            raise limit_refusal(
                f"{self.unpriced} answers were outside every ε before {MAX_OWN_EPSILON} was set: "
                "it cannot be kept any more; remove it, or begin a new store",
            )
        if self.delta and self.delta != policy.delta:
            raise limit_refusal(
                f"{DELTA} is {policy.delta:g} and the account was begun with {self.delta:g}: set "
                "that one",
            )
        if not spent <= largest_mu(limit, noise_delta) ** 2:
            raise limit_refusal(
                "by this device's own account ε would be "
                f"{epsilon_of(math.sqrt(spent), noise_delta):.4g} where {MAX_OWN_EPSILON} is "
                f"{limit:g}: nothing is sent",
            )
        tails = (1 + math.exp(min(limit, LARGEST_EXPONENT))) * self.shares * CUT_TAIL
        if not self.failure + tails <= policy.delta - noise_delta:
            raise limit_refusal(
                f"secure sums would take {self.failure + tails:.2g} from δ, more than a tenth of "
                f"{DELTA} = {policy.delta:g}: nothing is sent",
            )
