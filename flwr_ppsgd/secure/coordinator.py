"""The server's part of a secure sum: it passes messages on and learns the sum, or nothing.

A message that is malformed, late or double is left out, as if its sender had dropped out. Vectors
are added as they come: memory does not grow with their number.
"""

from collections.abc import Callable, Hashable
from enum import IntEnum
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.noise import RandomStream
from flwr_ppsgd.secure.crypto import SHARE_SIZE, KeyPair, Words, add_mask, join
from flwr_ppsgd.secure.graph import Design, design, draw_graph, survivors_needed
from flwr_ppsgd.secure.protocol import (
    KEY,
    SEED,
    Partners,
    PublicKeys,
    Roster,
    Shares,
    bitmap,
    members_hash,
    own_key,
    pair_key,
    pair_sign,
    seed_hash,
    share_hash,
    unpack_parts,
)
from flwr_ppsgd.secure.terms import Session

Node = TypeVar("Node", bound=Hashable)
Message = TypeVar("Message")


class NoSumError(RuntimeError):
    """A sum cannot be unmasked. Its text says who and how many: for the server's private file."""


class SecureStage(IntEnum):
    """The exchange whose replies the coordinator waits for."""

    KEYS = 1
    SHARES = 2
    MASKED = 3
    REVEALED = 4


class Coordinator(Generic[Node]):
    """One secure sum, from the first keys to the sum.

    Args:
        session: the sum, and its terms.
        size: the number of coordinates.
        stream: for the graph; None is a secret one.
    """

    def __init__(self, session: Session, size: int, stream: RandomStream | None = None) -> None:
        self.session = session
        self._stream = stream or RandomStream.secret()
        self._rules = session.terms.rules
        self._stage = SecureStage.KEYS
        self._probe = KeyPair.new()
        self._keys: dict[Node, PublicKeys] = {}
        self._known: set[bytes] = set()
        self._nodes: list[Node] = []  # by place
        self._public: list[PublicKeys] = []  # by place
        self._places: dict[Node, int] = {}
        self._count = 0  # n
        self._design: Design  # when the keys are there
        self._graph: list[frozenset[int]] = []
        self._shares: dict[int, Shares] = {}
        self._members: frozenset[int] = frozenset()  # U₂
        self._survivors: set[int] = set()  # U₃
        self._revealed: dict[int, dict[int, bytes]] = {}  # by owner and holder
        self._answered: set[int] = set()
        self._total: Words = np.zeros(size, np.uint64)

    # --- exchange 1

    def take_keys(self, node: Node, data: bytes) -> bool:
        """Whether these are usable keys, and the node's first."""
        self._require(SecureStage.KEYS)
        keys = _parse(lambda: PublicKeys.from_bytes(data))
        if keys is None or node in self._keys:
            return False
        halves = set(keys)
        if len(halves) < 2 or halves & self._known or not all(map(self._is_public, halves)):
            return False
        self._known |= halves
        self._keys[node] = keys
        return True

    def _is_public(self, key: bytes) -> bool:
        """Whether a public key can be used: some give the same secret to everybody."""
        try:
            self._probe.secret_with(key)
        except ValueError:
            return False
        return True

    def rosters(self) -> dict[Node, bytes]:
        """Exchange 2, down: each participant's neighbours. The graph is drawn here."""
        self._enter(SecureStage.SHARES, len(self._keys), "sent keys")
        self._nodes = list(self._keys)
        self._public = list(self._keys.values())
        self._places = {node: place for place, node in enumerate(self._nodes)}
        self._count = len(self._nodes)
        try:
            self._design = design(self._rules, self._count)
        except ValueError as error:
            raise NoSumError(str(error)) from None
        self._graph = draw_graph(self._design, self._count, self._stream)
        rosters = {}
        for node, place in self._places.items():
            others = {other: self._public[other] for other in self._graph[place]}
            rosters[node] = Roster(place, self._count, others).to_bytes()
        return rosters

    # --- exchange 2

    def take_shares(self, node: Node, data: bytes) -> bool:
        """Whether these are shares for exactly the node's neighbours."""
        self._require(SecureStage.SHARES)
        place = self._places.get(node)
        if place is None or place in self._shares:
            return False
        shares = _parse(lambda: Shares.from_bytes(data, self._count))
        if shares is None or shares.portions.keys() != self._graph[place]:
            return False
        self._shares[place] = shares
        return True

    def partners(self) -> dict[Node, bytes]:
        """Exchange 3, down: U₂, and for each of its members the shares that it holds."""
        self._enter(SecureStage.MASKED, len(self._shares), "sent shares")
        self._members = frozenset(self._shares)
        partners = {}
        for place in sorted(self._members):
            present = self._graph[place] & self._members
            sealed = {other: self._shares[other].portions[place].sealed for other in present}
            message = Partners(self._members, sealed).to_bytes(self._count)
            partners[self._nodes[place]] = message
        return partners

    # --- exchange 3

    def take_masked(self, node: Node, vector: NDArray[np.uint64]) -> bool:
        """Whether this is the node's first vector of the right form; it is added."""
        self._require(SecureStage.MASKED)
        place = self._places.get(node)
        if place not in self._members or place in self._survivors:
            return False
        if vector.dtype != np.uint64 or vector.shape != self._total.shape:
            return False
        self._total += vector
        self._survivors.add(place)
        return True

    def survivors(self) -> dict[Node, bytes]:
        """Exchange 4, down: U₃. Charge the release before this is sent."""
        needed = survivors_needed(self._rules, self._count)
        self._enter(SecureStage.REVEALED, len(self._survivors), "sent a masked vector", needed)
        named = bitmap(self._survivors, self._count)
        return {self._nodes[place]: named for place in sorted(self._survivors)}

    # --- exchange 4

    def take_revealed(self, node: Node, data: bytes) -> bool:
        """Whether the answer can be read. Each share in it that is wrong is left out."""
        self._require(SecureStage.REVEALED)
        holder = self._places.get(node)
        if holder not in self._survivors or holder in self._answered:
            return False
        revealed = _parse(lambda: unpack_parts(data, SHARE_SIZE, self._count))
        if revealed is None:
            return False
        self._answered.add(holder)
        owners = self._graph[holder] & self._members
        for owner in owners & revealed.keys():
            share = revealed[owner]
            portion = self._shares[owner].portions[holder]
            if owner in self._survivors:
                secret = SEED
                expected = portion.seed_share_hash
            else:
                secret = KEY
                expected = portion.key_share_hash
            if share_hash(share, self.session, secret, owner, holder) == expected:
                self._revealed.setdefault(owner, {})[holder] = share
        return True

    def total(self) -> NDArray[np.int64]:
        """Σ_{u ∈ U₃} x_u, exactly if it is below 2⁶³; NoSumError if a mask cannot be taken off."""
        self._require(SecureStage.REVEALED)
        members = members_hash(self._members, self._count)
        total = self._total.copy()
        for place in sorted(self._survivors):
            seed = self._secret(place)
            if seed_hash(seed, self.session, place) != self._shares[place].seed_hash:
                raise NoSumError(f"client {self._nodes[place]} gave shares of something else")
            add_mask(total, own_key(seed, self.session, place, members), sign=-1)
        for place in sorted(self._members - self._survivors):
            self._take_off_pair_masks(total, place, members)
        return total.view(np.int64)

    def _take_off_pair_masks(self, total: Words, dropped: int, members: bytes) -> None:
        """Take off what the survivors share with somebody who dropped out."""
        neighbours = sorted(self._graph[dropped] & self._survivors)
        if not neighbours:
            return
        pair = KeyPair(self._secret(dropped))
        if pair.public != self._public[dropped].mask:
            raise NoSumError(f"client {self._nodes[dropped]} gave shares of something else")
        for other in neighbours:
            secret = pair.secret_with(self._public[other].mask)
            key = pair_key(secret, self.session, (dropped, other), members)
            add_mask(total, key, sign=-pair_sign(other, dropped))

    def _secret(self, owner: int) -> bytes:
        """A secret from the shares that fit; NoSumError if there are too few."""
        shares = self._revealed.get(owner, {})
        threshold = self._design.threshold(len(self._graph[owner]))
        try:
            return join(shares, threshold)
        except ValueError as error:
            raise NoSumError(f"client {self._nodes[owner]} cannot be unmasked: {error}") from None

    # --- stages

    def _enter(self, stage: SecureStage, count: int, did: str, needed: int = 0) -> None:
        """Go on to the next exchange; NoSumError if too few are left for it."""
        self._require(SecureStage(stage - 1))
        needed = max(needed, self._rules.least)
        if count < needed:
            raise NoSumError(f"{count} clients {did}, {needed} are needed")
        self._stage = stage

    def _require(self, stage: SecureStage) -> None:
        if self._stage != stage:
            raise RuntimeError(f"the sum is at {self._stage.name}, not at {stage.name}")


def _parse(read: Callable[[], Message]) -> Message | None:
    """A client's message; None if it is malformed."""
    try:
        return read()
    except ValueError:
        return None
