"""What the clients of a secure sum agree on, and which sum it is."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, get_type_hints

from flwr_ppsgd.algorithm import Poisson, PrivateMetrics, Release, SecureSum
from flwr_ppsgd.secure.crypto import labelled_hash


@dataclass(frozen=True)
class SecureTerms:
    """Everything that a client needs to bound its vector and to add its share of the noise.

    Fixed for a training, in every Order, and part of every key: clients under different terms
    cannot read each other's shares or take off each other's masks.

    Args:
        population: N; the grid follows from it, and no sum has more participants.
        clip_norm: C of the release.
        noise_multiplier: z.
        honest: h.
        colluding: t.
        failure: η.
        neighbours: the least number of neighbours.
        share: of the squared clip norm, for private measures; 0 without any.
        bounds: of the private measures, as numbers with commas.
    """

    population: int
    clip_norm: float
    noise_multiplier: float
    honest: int
    colluding: int
    failure: float
    neighbours: int
    share: float
    bounds: str

    @classmethod
    def of(cls, release: Release, metrics: PrivateMetrics | None) -> Self:
        """The terms of a release with a ``SecureSum``."""
        rules = release.aggregation
        assert rules is not None
        bounds = list(metrics.bounds.values()) if metrics else []
        return cls(
            population=release.cohort.population,
            clip_norm=release.clip_norm,
            noise_multiplier=release.noise_multiplier,
            honest=rules.honest,
            colluding=rules.colluding,
            failure=rules.failure,
            neighbours=rules.neighbours,
            share=metrics.share if metrics else 0.0,
            bounds=",".join(repr(float(bound)) for bound in bounds),
        )

    @property
    def rules(self) -> SecureSum:
        """h, t and η; ValueError if they are out of range."""
        rules = self.release.aggregation
        assert rules is not None
        return rules

    @property
    def release(self) -> Release:
        """The release, as far as a client needs it; its grid is that of the server."""
        return _release(self)

    def metrics(self, names: Sequence[str]) -> PrivateMetrics | None:
        """The private measures of these names; ValueError if the bounds are not theirs."""
        bounds = [float(bound) for bound in self.bounds.split(",")] if self.bounds else []
        if len(bounds) != len(names):
            raise ValueError(f"{len(bounds)} bounds for {len(names)} private measures")
        if not names:
            return None
        return PrivateMetrics(dict(zip(names, bounds, strict=True)), self.share)

    def to_flat(self) -> dict[str, Any]:
        """The terms by name."""
        return {name: getattr(self, name) for name in TYPES}


TYPES: dict[str, type] = dict(get_type_hints(SecureTerms))


@functools.lru_cache(maxsize=8)
def _release(terms: SecureTerms) -> Release:
    """Cached, since all clients of a simulation have the same terms."""
    rules = SecureSum(terms.honest, terms.colluding, terms.failure, terms.neighbours)
    return Release(
        Poisson(terms.population, 1.0),
        terms.clip_norm,
        terms.noise_multiplier,
        aggregation=rules,
    )


@dataclass(frozen=True)
class Session:
    """Which sum this is: every key is for one session only.

    Args:
        terms: what was agreed.
        training: the number of the training.
        run: the number of Flower's run.
        start: which start of the server this is.
        round: counted over the whole training.
        part: which release of the round it is.
    """

    terms: SecureTerms
    training: int
    run: int
    start: int
    round: int
    part: str = "gradient"

    @functools.cached_property
    def label(self) -> bytes:
        """A hash of all fields; every key, seal and labelled_hash of the sum depends on it."""
        numbers = (self.training, self.run, self.start, self.round)
        terms = json.dumps(self.terms.to_flat(), sort_keys=True)
        return labelled_hash(terms.encode(), b"session", *numbers, self.part.encode())
