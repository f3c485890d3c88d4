"""Who the population is: a fixed list of nodes, whoever happens to be online."""

import functools
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from cryptography.hazmat.primitives import serialization
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

log = logging.getLogger("flwr.ppsgd")

POLL_SECONDS = 1.0
Identity: TypeAlias = int | str  # a node's id; or its name or its public key's fingerprint, which outlive a restart
RESTARTS = (
    "nodes are known by their ids, and without authentication a node that restarts comes back under a new one: for a "
    "while one user may hold two places. Start the SuperLink with --enable-supernode-auth, register each SuperNode "
    "with a --name, and enrol by name or public key"
)


class Present(NamedTuple):
    """A node that is online: where to send messages, by which names it may be enrolled, and whether it is a machine of
    its own, which can restart."""

    address: Identity
    name: str = ""
    fingerprint: str = ""
    real: bool = False

    @classmethod
    def of(cls, node: NodeInfo) -> "Present":
        """Flower's simulation gives its nodes random bytes for a key; a SuperNode has a real one."""
        real = node.public_key.startswith(b"-----BEGIN")
        return cls(node.node_id, node.name, fingerprint(node.public_key) if real else "", real)


def present_in(grid: Grid) -> list[Present]:
    """Who is online."""
    if type(grid).get_nodes is Grid.get_nodes:  # nothing but ids is known: no need to wrap them
        return [_by_id(node) for node in grid.get_node_ids()]
    return [Present.of(node) for node in grid.get_nodes()]


@functools.lru_cache(maxsize=1 << 16)
def _by_id(node: int) -> Present:
    return Present(node)


def fingerprint(public_key: bytes) -> str:
    """A public key as a short name: ``key:`` and its SHA-256."""
    return "key:" + hashlib.sha256(public_key.strip()).hexdigest()


def identity(enrolled: Identity) -> Identity:
    """An entry of the enrolled list: a node id, a name, or a public key as ``ssh-keygen`` or OpenSSL writes it."""
    if not isinstance(enrolled, str) or not enrolled.startswith(("ecdsa-", "-----BEGIN")):
        return enrolled
    load = serialization.load_ssh_public_key if enrolled.startswith("ecdsa-") else serialization.load_pem_public_key
    key = load(enrolled.encode())
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return fingerprint(pem)


class Enrolment:
    """The fixed list of nodes that form the population; coins are flipped over it, never over who is online."""

    def __init__(self, population: int, enrolled: Iterable[Identity] | None, min_online: float) -> None:
        self.known: list[Identity] = [] if enrolled is None else list(dict.fromkeys(map(identity, enrolled)))
        self._population = population
        self.open = enrolled is None
        self._min_online = min_online
        self._begun = False
        self._warned = False
        self._latest: list[Present] = []
        self._online: dict[Identity, Identity] = {}
        self.caveat = ""
        if not 0 <= min_online <= 1:
            raise ValueError(f"min_online must be in [0, 1], got {min_online!r}: it is a share of the population")
        if enrolled is not None and len(self.known) != population:
            raise ValueError(
                f"enrolled names {len(self.known)} different nodes but the cohort's population is {population}: the "
                "denominator and the guarantee rest on that number, make them equal"
            )

    def refresh(self, look: Callable[[], Iterable[Present]]) -> dict[Identity, Identity]:
        """Who is online now, and at which address. The first call waits for ``min_online`` of the population and fixes
        who belongs to it."""
        online = self._identified(look()) if self._begun else self._await(look)
        if self.open and len(self.known) < self._population:
            fresh = sorted(set(online).difference(self.known), key=_in_order)
            self.known += fresh[: self._population - len(self.known)]
        if self.open and not self._warned and not set(online).issubset(self.known):
            self._warned = True
            log.warning("More nodes than population=%d have come: only the first ones take part", self._population)
        self._begun = True
        return online

    def nodes(self, places: Iterable[int]) -> list[Identity]:
        """The nodes at these places of the population; a place that nobody has taken yet is nobody."""
        return [self.known[place] for place in places if place < len(self.known)]

    def _identified(self, present: Iterable[Present]) -> dict[Identity, Identity]:
        """Each node under the name by which it is enrolled. Of two under one name only the first counts."""
        look = list(present)
        if look != self._latest:
            self._latest, self._online = look, self._named(look)
        return self._online

    def _named(self, present: Iterable[Present]) -> dict[Identity, Identity]:
        listed = set(self.known)
        online: dict[Identity, Identity] = {}
        for node in present:
            own = self._own_name(node, listed) if node.real else node.address
            if own in online:
                log.warning("Two nodes are online under one name: only one of them takes part")
            online.setdefault(own, node.address)
            if node.real and own == node.address and (self.open or own in listed):
                self.caveat = RESTARTS
        return online

    @staticmethod
    def _own_name(node: Present, listed: set[Identity]) -> Identity:
        """The name by which it is on the list; if it is not, the one that lasts longest."""
        names = [name for name in (node.name, node.fingerprint, node.address) if name]
        return next((name for name in names if name in listed), node.name or node.address)

    def _await(self, look: Callable[[], Iterable[Present]]) -> dict[Identity, Identity]:
        wanted, seen = math.ceil(self._min_online * self._population), -1
        while True:
            online = self._identified(look())
            belonging = set(online) if self.open else set(online).intersection(self.known)
            if self.open and len(online) > self._population:
                raise ValueError(
                    f"{len(online)} nodes are online but the cohort's population is {self._population}: set "
                    f"population={len(online)}, or name the population with enrolled=[…]"
                )
            if len(belonging) >= wanted:
                return online
            if len(belonging) != seen:
                seen = len(belonging)
                log.info(
                    "Waiting for %d of %d enrolled nodes (min_online=%g): %d online",
                    wanted, self._population, self._min_online, seen,
                )  # fmt: skip
            time.sleep(POLL_SECONDS)


def _in_order(own: Identity) -> tuple[int, str]:
    return (own, "") if isinstance(own, int) else (0, own)
