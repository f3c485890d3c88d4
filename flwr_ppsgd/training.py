"""All settings of one training, as one value that is checked once."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, cast, get_args

from flwr_ppsgd.algorithm import PrivateMetrics, Release, SecureSum, Steps
from flwr_ppsgd.checks import is_number, is_whole, require
from flwr_ppsgd.recipe import Recipe
from flwr_ppsgd.secure.graph import survivors_needed

log = logging.getLogger("flwr.ppsgd")

Identity: TypeAlias = int | str  # a node's id; or its name or public key, which outlive a restart
ReplyKind: TypeAlias = Literal["gradient", "parameters"]
LARGEST_DELTA = 0.1  # from here on δ itself is no protection


def _check_whole(name: str, value: object, least: int, remedy: str) -> None:
    fits = is_whole(value) and cast(int, value) >= least
    require(fits, f"{name} must be a whole number of at least {least}", value, remedy)


def _check_seconds(name: str, value: object) -> None:
    fits = is_number(value) and cast(float, value) > 0
    require(fits, f"{name} must be positive", value, "it is in seconds")


@dataclass(frozen=True)
class Enrolled:
    """Who forms the population, and how long a training waits for them.

    Args:
        nodes: by node id or, for nodes that outlive a restart, by the name or public key under
            which they are registered. None: the first nodes seen, which is for simulation.
        min_online: the share of the population to wait for before the first round. A node that
            is offline later counts as zero.
        wait_timeout: seconds to wait for ``min_online``.
    """

    nodes: Iterable[Identity] | None = None
    min_online: float = 0.5
    wait_timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.nodes is not None:
            object.__setattr__(self, "nodes", _identities(self.nodes))
        rule = "min_online must be in [0, 1]"
        fits = is_number(self.min_online) and 0 <= self.min_online <= 1
        require(fits, rule, self.min_online, "it is a share of the population")
        _check_seconds("wait_timeout", self.wait_timeout)


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
        enrolled: who forms the population.
        replies: "gradient" for clients made by ``client_app`` or ``PPSGDClient``; "parameters" for
            any client that returns trained parameters w_i, whose w − w_i is then clipped as the
            gradient. Arrays of whole numbers and BatchNorm's running statistics are not part of w
            there: they travel to the clients and keep their initial values.
        average: keep the average iterate (1/n)·Σ_{t<n} w_t, for which the paper's convergence
            theorems hold. The result's arrays are then the average.
        metrics: training measures to release along with the gradient, if any.
        checkpoint_dir: where charges and w are kept; a training that is found there is continued.
        checkpoint_every: write w in every round that this number divides, and when a run ends: a
            server that is killed goes back to the last w that was written. Charges are written in
            every round.
        budget_dir: a budget that several trainings of one population share, made before the first
            of them by ``ppsgd budget``; None if there is no such budget.
        round_timeout: seconds after which a round goes on with the replies it has; a later one
            counts as zero.
        insecure_seed: makes cohorts and noise repeatable, for simulation and tests. It voids the
            guarantee, and the ledger and every report say so.
        recipe: what ``auto`` releases before and in the rounds; None is the paper's method.
    """

    release: Release
    steps: Steps
    delta: float
    max_epsilon: float | None = None
    evaluate_every: int = 0
    enrolled: Enrolled = Enrolled()
    replies: ReplyKind = "gradient"
    average: bool = False
    metrics: PrivateMetrics | None = None
    checkpoint_dir: Path | None = None
    checkpoint_every: int = 1
    budget_dir: Path | None = None
    round_timeout: float = 3600.0
    insecure_seed: int | None = None
    recipe: Recipe | None = None

    @classmethod
    def of(
        cls,
        *,
        release: Release | Recipe,
        enrolled: Enrolled | Iterable[Identity] | None,
        checkpoint_dir: Path | str | None,
        budget_dir: Path | str | None,
        **more: Any,
    ) -> Self:
        """From the arguments of a strategy: lists and texts become values and paths."""
        recipe = release if isinstance(release, Recipe) else None
        if not isinstance(enrolled, Enrolled):
            enrolled = Enrolled(enrolled)
        return cls(
            release=recipe.release if recipe else release,  # type: ignore[arg-type]
            recipe=recipe,
            enrolled=enrolled,
            checkpoint_dir=_directory("checkpoint_dir", checkpoint_dir),
            budget_dir=_directory("budget_dir", budget_dir),
            **more,
        )

    def __post_init__(self) -> None:
        """ValueError for a wrong argument, before anything is opened."""
        remedy = "write Release(Poisson(population, rate), clip_norm, noise_multiplier), or auto"
        _check_kind("release", self.release, Release, remedy)
        remedy = "write Steps(shared, personal) or Steps.from_paper(eta, alpha, denominator)"
        _check_kind("steps", self.steps, Steps, remedy)
        _check_kind("average", self.average, bool, "True or False")
        if self.metrics is not None:
            remedy = "write PrivateMetrics({'loss': 10.0}, share=.1)"
            _check_kind("metrics", self.metrics, PrivateMetrics, remedy)
        rule = f"delta must be a number in (0, {LARGEST_DELTA:g})"
        fits = is_number(self.delta) and 0 < self.delta < LARGEST_DELTA
        require(fits, rule, self.delta, "choose it well below 1/population")
        if self.max_epsilon is not None:
            fits = is_number(self.max_epsilon) and 0 < self.max_epsilon < math.inf
            rule = "max_epsilon must be positive and finite"
            require(fits, rule, self.max_epsilon, "leave it out for no budget")
        _check_whole("evaluate_every", self.evaluate_every, 0, "0 is never")
        _check_whole("checkpoint_every", self.checkpoint_every, 1, "1 writes w in every round")
        _check_seconds("round_timeout", self.round_timeout)
        fits = self.insecure_seed is None or is_whole(self.insecure_seed)
        rule = "insecure_seed must be a whole number"
        require(fits, rule, self.insecure_seed, "leave it out for a guarantee")
        known = isinstance(self.replies, str) and self.replies in get_args(ReplyKind)
        rule = "replies must be 'gradient' or 'parameters'"
        require(known, rule, self.replies, "it says what clients send")
        if self.replies == "parameters":
            needs_orders = {
                "metrics": self.metrics,
                "auto": self.recipe,
                "aggregation": self.release.aggregation,
            }
            for name, value in needs_orders.items():
                if value is not None:
                    raise ValueError(
                        f"{name} needs clients that obey Orders, got replies='parameters': use "
                        "replies='gradient'"
                    )
        if self.release.aggregation is not None:
            self._check_secure(self.release.aggregation)

    def _check_secure(self, rules: SecureSum) -> None:
        """A secure sum needs enough clients to lose a few."""
        expected = math.floor(self.release.expected_users)
        needed = survivors_needed(rules, expected)
        rule = f"a secure sum of {expected} clients needs {needed} of them to stay to the end"
        remedy = "raise honest: more than half of a client's neighbours must hold its shares"
        require(needed <= rules.least, rule, rules.least, remedy)
        rule = f"honest + colluding must be at most the {expected} clients of a round, on average"
        require(rules.least <= expected, rule, rules.least, "lower honest, or draw more clients")

    @property
    def population(self) -> int:
        """The number of people who are protected: D, δ, the grid and the ledger rest on it."""
        return self.release.cohort.population

    @property
    def nodes(self) -> int:
        """The number of nodes that are enrolled: today each is one person's."""
        return self.population

    @property
    def secure(self) -> bool:
        """Whether the server sees sums only."""
        return self.release.aggregation is not None and self.steps.publishes

    def with_rounds(self, wanted: int) -> Self:
        """The recipe for fewer rounds than it would choose: each then has less noise."""
        assert self.recipe is not None
        fewer = self.recipe.with_rounds(wanted)
        return replace(self, recipe=fewer, release=fewer.release)


def _check_kind(name: str, value: object, kind: type, remedy: str) -> None:
    article = "" if kind.__name__.endswith("s") else "a "
    require(isinstance(value, kind), f"{name} must be {article}{kind.__name__}", value, remedy)


def _identities(nodes: object) -> tuple[Identity, ...]:
    """A list of nodes; a text is not one, although it can be iterated over."""
    rule = "enrolled must be a list of node ids, names or public keys"
    remedy = "write [1, 'ada'] for two nodes"
    if not isinstance(nodes, Iterable) or isinstance(nodes, str):
        raise ValueError(f"{rule}, got {nodes!r}: {remedy}")
    found = tuple(nodes)
    fits = all(is_whole(node) or isinstance(node, str) for node in found)
    require(fits, rule, nodes, remedy)
    return found


def _directory(name: str, path: Path | str | None) -> Path | None:
    if path is None:
        return None
    rule = f"{name} must be a path"
    fits = isinstance(path, Path) or (isinstance(path, str) and bool(path.strip()))
    require(fits, rule, path, "leave it out to keep nothing on disk")
    return Path(path)
