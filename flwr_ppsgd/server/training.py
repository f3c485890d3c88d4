"""All settings of one training, as one value that is checked once."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

from flwr_ppsgd.algorithm import PrivateMetrics, Release, SecureSum, Steps
from flwr_ppsgd.checks import is_whole, require
from flwr_ppsgd.recipe import Recipe
from flwr_ppsgd.secure.graph import survivors_needed

log = logging.getLogger("flwr.ppsgd")

Identity: TypeAlias = int | str  # a node's id; or its name or public key, which outlive a restart
ReplyKind: TypeAlias = Literal["gradient", "parameters"]
LARGEST_DELTA = 0.1  # from here on δ itself is no protection


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a training publishes, how far it moves, what it may cost, and who takes part.

    Args:
        release: what is published in a round.
        steps: how far w and θ move.
        delta: δ at which the guarantee is stated.
        max_epsilon: the budget under zero-out neighbours; None is no budget.
        evaluate_every: ask all enrolled nodes to evaluate in every round that this number divides,
            and in the last one; 0 is never. The results are outside the guarantee.
        enrolled: the population, by node id or, for nodes that outlive a restart, by the name or
            public key under which they are registered. None: the first ``population`` nodes seen,
            which is for simulation.
        min_online: the share of the population to wait for before the first round. Whoever is
            offline later counts as zero.
        wait_timeout: seconds to wait for ``min_online`` before the first round.
        round_timeout: seconds after which a round goes on with the replies it has; whoever is later
            counts as zero.
        replies: "gradient" for clients made by ``client_app`` or ``PPSGDClient``; "parameters" for
            any client that returns trained parameters w_i, whose w − w_i is then clipped as the
            gradient. Arrays of whole numbers and BatchNorm's running statistics are not part of w
            there: they travel to the clients and keep their initial values.
        average: keep the average iterate (1/n)·Σ_{t<n} w_t, for which the paper's convergence
            theorems hold. The result's arrays are then the average.
        checkpoint_dir: where the journal of charges and the checkpoints of w live; a training that
            is found there is continued.
        checkpoint_every: write w in every round that this number divides. The journal is written in
            every round.
        budget_dir: a budget that several trainings of one population share, made before the first
            of them by ``ppsgd budget``; None is none.
        metrics: training measures to release along with the gradient; None is none.
        recipe: what ``auto`` releases before and in the rounds; None is the paper's method.
        insecure_seed: makes cohorts and noise repeatable, for simulation and tests. It voids the
            guarantee, and the ledger and every report say so.
    """

    release: Release
    steps: Steps
    delta: float
    max_epsilon: float | None = None
    evaluate_every: int = 0
    enrolled: tuple[Identity, ...] | None = None
    min_online: float = 0.5
    wait_timeout: float = 600.0
    round_timeout: float = 3600.0
    replies: ReplyKind = "gradient"
    average: bool = False
    checkpoint_dir: Path | None = None
    checkpoint_every: int = 1
    budget_dir: Path | None = None
    metrics: PrivateMetrics | None = None
    insecure_seed: int | None = None
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        rule = f"delta must be in (0, {LARGEST_DELTA:g})"
        remedy = "choose it well below 1/population"
        require(0 < self.delta < LARGEST_DELTA, rule, self.delta, remedy)
        if self.max_epsilon is not None:
            rule = "max_epsilon must be positive and finite"
            fits = 0 < self.max_epsilon < math.inf
            require(fits, rule, self.max_epsilon, "leave it out for no budget")
        whole = is_whole(self.evaluate_every) and self.evaluate_every >= 0
        rule = "evaluate_every must be a whole number that is not negative"
        require(whole, rule, self.evaluate_every, "0 is never")
        whole = is_whole(self.checkpoint_every) and self.checkpoint_every >= 1
        rule = "checkpoint_every must be a whole number of at least 1"
        require(whole, rule, self.checkpoint_every, "1 writes w in every round")
        rule = "min_online must be in [0, 1]"
        require(0 <= self.min_online <= 1, rule, self.min_online, "it is a share of the population")
        rule = "wait_timeout must be positive"
        require(self.wait_timeout > 0, rule, self.wait_timeout, "it is in seconds")
        rule = "round_timeout must be positive"
        require(self.round_timeout > 0, rule, self.round_timeout, "it is in seconds")
        rule = "replies must be 'gradient' or 'parameters'"
        known = self.replies in get_args(ReplyKind)
        require(known, rule, self.replies, "it says what clients send")
        if self.metrics is not None and self.replies != "gradient":
            raise ValueError(
                "private metrics need clients that know of them: use replies='gradient'"
            )
        if self.recipe is not None and self.replies != "gradient":
            raise ValueError("auto needs clients that obey Orders: use replies='gradient'")
        self._check_secure()

    def _check_secure(self) -> None:
        """A secure sum needs clients that know it, and enough of them to lose a few."""
        rules = self.release.aggregation
        if rules is None:
            return
        if self.replies != "gradient":
            raise ValueError(
                f"aggregation={rules} needs clients that obey Orders: use replies='gradient'"
            )
        expected = math.floor(self.release.expected_users)
        needed = survivors_needed(rules, expected)
        rule = f"a secure sum of {expected} clients needs {needed} of them to stay to the end"
        remedy = "raise honest: more than half of a client's neighbours must hold its shares"
        require(needed <= rules.least, rule, rules.least, remedy)
        rule = f"honest + colluding must be at most the {expected} clients of a round, on average"
        require(rules.least <= expected, rule, rules.least, "lower honest, or draw more clients")

    def rounds_or(self, wanted: int | None, default: int) -> int:
        """The number of rounds to run: what is wanted, and no more than the recipe has planned.

        Args:
            wanted: None if nobody has said a number.
            default: without a recipe.
        """
        if self.recipe is None:
            return default if wanted is None else wanted
        planned = self.recipe.rounds
        if wanted is None:
            return planned
        if wanted > planned:
            log.info("auto needs %d rounds: num_rounds=%d is not used", planned, wanted)
        elif wanted < planned:
            log.warning(
                "auto has planned %d rounds and calibrated the noise for them, and num_rounds=%d: "
                "each round has more noise than it needs; leave num_rounds out, or give "
                "rounds=%d to auto",
                planned,
                wanted,
                wanted,
            )
        return min(wanted, planned)

    @property
    def secure(self) -> bool:
        """Whether the server sees sums only."""
        return self.release.aggregation is not None and self.steps.publishes

    @classmethod
    def of(
        cls,
        *,
        enrolled: Iterable[Identity] | None,
        checkpoint_dir: Path | str | None,
        budget_dir: Path | str | None,
        release: Release,
        aggregation: SecureSum | None = None,
        **more: Any,
    ) -> Self:
        """From the arguments of a strategy: lists and texts become tuples and paths.

        ``aggregation`` becomes part of the release.
        """
        if aggregation is not None:
            release = replace(release, aggregation=aggregation)
        return cls(
            release=release,
            enrolled=None if enrolled is None else tuple(enrolled),
            checkpoint_dir=None if checkpoint_dir is None else Path(checkpoint_dir),
            budget_dir=None if budget_dir is None else Path(budget_dir),
            **more,
        )
