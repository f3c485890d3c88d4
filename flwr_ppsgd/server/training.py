"""All settings of one training, as one value that is checked once."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

from flwr_ppsgd.algorithm import PrivateMetrics, Release, SecureSum, Steps
from flwr_ppsgd.checks import is_whole, one_of, require
from flwr_ppsgd.optimizers import PLAIN, Optimizer
from flwr_ppsgd.secure.graph import survivors_needed
from flwr_ppsgd.tuning import AdaptiveClip, SizeVote
from flwr_ppsgd.wire import Making

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
        optimizer: what the server does with a released gradient; free post-processing. Its steps
            have the size ``steps.shared``.
        personal: how θ is made: "step" moves it by ``steps.personal`` in every visit; "solve" lets
            each user work out the best θ for the published w, which is free too.
        solve_in_training: with "solve", take gradients at the solved θ; else at θ = 0.
        full_batch: ask for gradients over all of a user's rows instead of a minibatch.
        vote: on the size of users' own solutions, before the first round: ``steps.shared`` is then
            in units of that size. None is no vote.
        default_size: stands in for the size if the vote finds none.
        adaptive_clip: lets the clip norm follow a quantile of the users' norms; ``clip_norm`` is
            then that of the first round. None keeps it.
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
    optimizer: Optimizer = PLAIN
    personal: Making = "step"
    solve_in_training: bool = False
    full_batch: bool = False
    vote: SizeVote | None = None
    default_size: float = 1.0
    adaptive_clip: AdaptiveClip | None = None

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
        if self.measures is not None and self.replies != "gradient":
            raise ValueError(
                "private metrics need clients that know of them: use replies='gradient'"
            )
        self._check_making()
        self._check_secure()

    def _check_making(self) -> None:
        one_of("personal", self.personal, get_args(Making))
        asked = {
            "personal='solve'": self.personal == "solve",
            "full_batch": self.full_batch,
            "vote": self.vote is not None,
        }
        for name, is_asked in asked.items():
            if is_asked and self.replies != "gradient":
                raise ValueError(f"{name} needs clients that obey Orders: use replies='gradient'")
        if self.solve_in_training and self.personal != "solve":
            raise ValueError("solve_in_training needs personal='solve': nothing is solved else")
        if self.adaptive_clip is not None and self.release.normalise:
            raise ValueError(
                "adaptive_clip and a release with normalise exclude each other: a normalised "
                "gradient has norm C anyway; leave one out"
            )
        rule = "default_size must be positive and finite"
        require(0 < self.default_size < math.inf, rule, self.default_size, "1 is none")
        if self.vote is None:
            return
        voters = self.vote.release.cohort.population
        rule = f"a vote must ask the population of {self.release.cohort.population}"
        same = voters == self.release.cohort.population
        require(same, rule, voters, "give both the same population")

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
        if self.vote is not None and self.vote.release.aggregation != rules:
            raise ValueError(
                f"the rounds have aggregation={rules} and the vote has "
                f"{self.vote.release.aggregation}: give both the same, the server sees either"
            )

    @property
    def secure(self) -> bool:
        """Whether the server sees sums only."""
        return self.release.aggregation is not None and self.steps.publishes

    @property
    def measures(self) -> PrivateMetrics | None:
        """Everything that is released along with the gradient."""
        if self.adaptive_clip is None:
            return self.metrics
        return self.adaptive_clip.measures(self.metrics)

    @classmethod
    def of(
        cls,
        *,
        enrolled: Iterable[Identity] | None,
        checkpoint_dir: Path | str | None,
        budget_dir: Path | str | None,
        release: Release,
        aggregation: SecureSum | None = None,
        vote: SizeVote | None = None,
        **more: Any,
    ) -> Self:
        """From the arguments of a strategy: lists and texts become tuples and paths.

        ``aggregation`` becomes part of the release, and of that of the vote.
        """
        if aggregation is not None:
            release = replace(release, aggregation=aggregation)
            if vote is not None:
                vote = replace(vote, release=replace(vote.release, aggregation=aggregation))
        return cls(
            release=release,
            vote=vote,
            enrolled=None if enrolled is None else tuple(enrolled),
            checkpoint_dir=None if checkpoint_dir is None else Path(checkpoint_dir),
            budget_dir=None if budget_dir is None else Path(budget_dir),
            **more,
        )
