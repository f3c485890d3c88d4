"""A secure sum from end to end without Flower, with dropouts wherever a test wants them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd import SecureSum
from flwr_ppsgd.secure.coordinator import Coordinator
from flwr_ppsgd.secure.masks import Words
from flwr_ppsgd.secure.messages import Partners, Roster, members_of
from flwr_ppsgd.secure.participant import Keyed, Masked, Session, Shared

SESSION = Session(training=7, run=3, start=1, round=5)
Vectors = NDArray[np.int64]  # one row per client


@dataclass
class Play:
    """One round. Each step takes the clients that answer; the others have dropped out.

    Args:
        rules: h, t and η.
        vectors: x of each client.
    """

    rules: SecureSum
    vectors: Vectors
    keyed: dict[int, Keyed] = field(default_factory=dict)
    shared: dict[int, Shared] = field(default_factory=dict)
    masked: dict[int, Masked] = field(default_factory=dict)
    seen: list[bytes] = field(default_factory=list)  # everything that the server gets

    def __post_init__(self) -> None:
        self.server = Coordinator[int](self.rules, SESSION, self.vectors.shape[1])

    def keys(self, who: Collection[int]) -> None:
        for node in who:
            self.keyed[node] = Keyed.new(SESSION)
            message = self.keyed[node].message.to_bytes()
            self.seen.append(message)
            assert self.server.take_keys(node, message)

    def shares(self, who: Collection[int]) -> dict[int, bytes]:
        rosters = self.server.rosters()
        sent = {}
        for node in sorted(rosters.keys() & set(who)):
            roster = Roster.from_bytes(rosters[node])
            self.shared[node], shares = self.keyed[node].share(roster, self.rules)
            sent[node] = shares.to_bytes()
            self.seen.append(sent[node])
            assert self.server.take_shares(node, sent[node])
        return sent

    def mask(self, who: Collection[int]) -> dict[int, Words]:
        named = self.server.partners()
        sent = {}
        for node in sorted(named.keys() & set(who)):
            partners = Partners.from_bytes(named[node], len(self.keyed))
            after, words = self.shared[node].masked(partners, self.rules, self.vectors[node])
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
            sent[node] = self.masked[node].reveal(survivors, self.rules).to_bytes()
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


def some_vectors(clients: int, size: int, seed: int = 0) -> Vectors:
    """Whole numbers of both signs, far below 2⁵³ in sum."""
    source = np.random.default_rng(seed)
    return source.integers(-(2**40), 2**40, (clients, size))
