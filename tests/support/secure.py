"""A secure sum from end to end without Flower, with dropouts wherever a test wants them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd import Poisson, Release, SecureSum
from flwr_ppsgd.secure.coordinator import Coordinator
from flwr_ppsgd.secure.crypto import Words
from flwr_ppsgd.secure.protocol import (
    KeysSent,
    Partners,
    Roster,
    SharesSent,
    VectorSent,
    members_of,
    pack_parts,
)
from flwr_ppsgd.secure.terms import SecureTerms, Session

Vectors = NDArray[np.int64]  # one row per client


def session_of(rules: SecureSum, population: int, round_: int = 5) -> Session:
    release = Release(Poisson(population, 1.0), 1.0, 1.0, aggregation=rules)
    return Session(SecureTerms.of(release, None), training=7, run=3, start=1, round=round_)


@dataclass
class Play:
    """One round. Each step takes the clients that answer; the others have dropped out.

    Args:
        rules: h, t and η.
        vectors: x of each client.
    """

    rules: SecureSum
    vectors: Vectors
    keyed: dict[int, KeysSent] = field(default_factory=dict)
    shared: dict[int, SharesSent] = field(default_factory=dict)
    masked: dict[int, VectorSent] = field(default_factory=dict)
    seen: list[bytes] = field(default_factory=list)  # everything that the server gets

    def __post_init__(self) -> None:
        self.session = session_of(self.rules, len(self.vectors))
        self.server = Coordinator[int](self.session, self.vectors.shape[1])

    def keys(self, who: Collection[int]) -> None:
        for node in who:
            self.keyed[node] = KeysSent.new(self.session)
            message = self.keyed[node].public.to_bytes()
            self.seen.append(message)
            assert self.server.take_keys(node, message)

    def shares(self, who: Collection[int]) -> dict[int, bytes]:
        rosters = self.server.rosters()
        sent = {}
        for node in sorted(rosters.keys() & set(who)):
            roster = Roster.from_bytes(rosters[node])
            self.shared[node], shares = self.keyed[node].share(roster)
            sent[node] = shares.to_bytes()
            self.seen.append(sent[node])
            assert self.server.take_shares(node, sent[node])
        return sent

    def mask(self, who: Collection[int]) -> dict[int, Words]:
        named = self.server.partners()
        sent = {}
        for node in sorted(named.keys() & set(who)):
            partners = Partners.from_bytes(named[node], len(self.keyed))
            after, words = self.shared[node].mask_vector(partners, self.vectors[node])
            self.masked[node] = after
            self.seen.append(words.tobytes())
            sent[node] = words
            assert self.server.take_masked(node, words)
        return sent

    def reveal(self, who: Collection[int]) -> Mapping[int, bytes]:
        named = self.server.survivors()
        sent = {}
        for node in sorted(named.keys() & set(who)):
            survivors = members_of(named[node], len(self.keyed))
            sent[node] = pack_parts(self.masked[node].reveal(survivors))
            self.seen.append(sent[node])
            assert self.server.take_revealed(node, sent[node])
        return sent

    def total(self) -> NDArray[np.int64]:
        return self.server.total()


def played(rules: SecureSum, vectors: Vectors, stay: list[Collection[int]]) -> Play:
    """All four exchanges, with those who stay up to each."""
    play = Play(rules, vectors)
    play.keys(stay[0])
    play.shares(stay[1])
    play.mask(stay[2])
    play.reveal(stay[3])
    return play


def ready(rules: SecureSum, clients: int, size: int = 3) -> Play:
    """A round before exchange 3, in which everybody still takes part."""
    play = Play(rules, some_vectors(clients, size))
    play.keys(range(clients))
    play.shares(range(clients))
    return play


def some_vectors(clients: int, size: int, seed: int = 0) -> Vectors:
    """Whole numbers of both signs, far below 2⁵³ in sum."""
    source = np.random.default_rng(seed)
    return source.integers(-(2**40), 2**40, (clients, size))
