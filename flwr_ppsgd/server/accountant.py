"""The ledger of a training, readable as Flower's ``PrivacyAccountant``."""

import math
from dataclasses import asdict, dataclass, replace
from typing import NoReturn

from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    PrivacySpent,
    SamplingMethod,
)

from flwr_ppsgd.algorithm import Poisson, Release
from flwr_ppsgd.ledger import Ledger

LEAST_DELTA = 1e-15
HALVINGS = 40  # of the interval in which log δ is looked for


@dataclass(frozen=True)
class LedgerAccountant:
    """What was released, as Flower's tools ask for it; neighbours are zero-out.

    It is read only: the strategy charges each release itself, before it is published.

    Args:
        ledger: what was released.
        release: what is published in a round.
        max_epsilon: the budget, if there is one.
    """

    ledger: Ledger
    release: Release
    max_epsilon: float | None = None

    @property
    def config(self) -> PrivacyConfig:
        """The settings, as far as Flower has words for them."""
        sampled = self.release.amplifies
        return PrivacyConfig(
            target_delta=self.ledger.delta,
            population_size=self.release.cohort.population,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=SamplingMethod.POISSON if sampled else SamplingMethod.NO_AMPLIFICATION,
            max_epsilon=self.max_epsilon,
        )

    @property
    def num_releases(self) -> int:
        """The number of releases that were charged."""
        return self.ledger.rounds

    def get_epsilon(self, delta: float) -> float:
        """ε of everything released so far, at any δ; infinite if noise came from a known seed."""
        return self.get_privacy_spent(delta).epsilon

    def get_delta(self, epsilon: float) -> float:
        """A δ at which everything released so far has at most this ε; 1 if no smaller one does."""
        low = math.log(LEAST_DELTA)
        high = 0.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if self.get_epsilon(math.exp(middle)) <= epsilon:
                high = middle
            else:
                low = middle
        return math.exp(high)

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """ε and δ, the number of releases, and the bound that gave ε."""
        delta = self.ledger.delta if delta is None else delta
        if self.ledger.insecure_rounds:
            return PrivacySpent(math.inf, delta, self.num_releases, "insecure_seed")
        bound = replace(self.ledger, delta=delta).bound()
        return PrivacySpent(bound.epsilon, delta, self.num_releases, bound.method)

    def would_exceed(
        self, event: GaussianPrivacyEvent, max_epsilon: float | None = None, count: int = 1
    ) -> bool:
        """Whether further releases would bring ε above a limit."""
        limit = self.max_epsilon if max_epsilon is None else max_epsilon
        if limit is None:
            raise ValueError("would_exceed needs max_epsilon: this training has none; give one")
        rate = 1.0
        if self.release.amplifies:
            rate = event.sample_size / event.population_size
        cohort = Poisson(event.population_size, rate)
        more = Release(cohort, clip_norm=1.0, noise_multiplier=event.noise_multiplier)
        return self.ledger.record(more, count).epsilon() > limit

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> NoReturn:
        """Refused: a charge comes with its release."""
        raise TypeError(
            f"{event} × {count} cannot be charged from outside: the strategy charges each release "
            "before it publishes it; give max_epsilon to the strategy to set a limit"
        )

    def state_dict(self) -> dict[str, object]:
        """The ledger as JSON, with the settings."""
        return {"ledger": self.ledger.to_json(), "config": asdict(self.config)}

    def load_state_dict(self, state: dict[str, object]) -> NoReturn:
        """Refused: charges are kept in ``checkpoint_dir``."""
        raise TypeError(
            f"an account of {len(state)} entries cannot be loaded into a strategy: its charges "
            "are kept in checkpoint_dir, and a new strategy there goes on with them"
        )
