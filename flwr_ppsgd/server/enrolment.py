"""Who the population is: a fixed list of nodes, whoever happens to be online."""

import functools
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from flwr_ppsgd.server.training import Identity

log = logging.getLogger("flwr.ppsgd")

POLL_SECONDS = 1.0
RESTARTS = (
    "nodes are known by their ids, and without authentication a node that restarts comes back "
    "under a new one: for a while one user may hold two places. Start the SuperLink with "
    "--enable-supernode-auth, register each SuperNode with a --name, and enrol by name or public "
    "key"
)


class Present(NamedTuple):
    """A node that is online.

    address: where to send messages. name, fingerprint: by which it may be enrolled. real: whether
    it is a machine of its own, which can restart.
    """

    address: Identity
    name: str = ""
    fingerprint: str = ""
    real: bool = False

    @classmethod
    def of(cls, node: NodeInfo) -> "Present":
        """Flower's simulation gives nodes random bytes for a key; a SuperNode has a real one."""
        real = node.public_key.startswith(b"-----BEGIN")
        known_by = fingerprint(node.public_key) if real else ""
        return cls(node.node_id, node.name, known_by, real)


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
    """An entry of the enrolled list: a node id, a name, or a public key.

    Keys are as ``ssh-keygen`` or OpenSSL write them.
    """
    if not isinstance(enrolled, str):
        return enrolled
    if enrolled.startswith("ecdsa-"):
        return fingerprint(_pem(serialization.load_ssh_public_key(enrolled.encode())))
    if enrolled.startswith("-----BEGIN"):
        return fingerprint(_pem(serialization.load_pem_public_key(enrolled.encode())))
    return enrolled


def _pem(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(
        serialization.Encoding.PEM,
        serialization.PublicFormat.SubjectPublicKeyInfo,
    )


class Enrolment:
    """The fixed list of nodes that form the population.

    Coins are flipped over it, never over who is online.

    Args:
        population: the number of places.
        enrolled: who has them; None: the first nodes seen.
        min_online: the share of the population to wait for before the first round.
    """

    def __init__(
        self,
        population: int,
        enrolled: Iterable[Identity] | None,
        min_online: float,
    ) -> None:
        self.known: list[Identity] = []
        self.open = enrolled is None
        self.caveat = ""
        self._population = population
        self._min_online = min_online
        self._begun = False
        self._warned = False
        self._latest: list[Present] = []
        self._online: dict[Identity, Identity] = {}
        if enrolled is not None:
            self.known = list(dict.fromkeys(map(identity, enrolled)))
            self._check_count()

    def _check_count(self) -> None:
        if len(self.known) != self._population:
            raise ValueError(
                f"enrolled names {len(self.known)} different nodes but the cohort's population is "
                f"{self._population}: the denominator and the guarantee rest on that number, make "
                "them equal"
            )

    def refresh(self, look: Callable[[], Iterable[Present]]) -> dict[Identity, Identity]:
        """Who is online now, and at which address.

        The first call waits for ``min_online`` of the population and fixes who belongs to it.
        """
        online = self._identified(look()) if self._begun else self._await(look)
        if self.open:
            self._enrol(online)
        self._begun = True
        return online

    def _enrol(self, online: dict[Identity, Identity]) -> None:
        """Give free places to whoever is new."""
        free = self._population - len(self.known)
        if free > 0:
            fresh = sorted(set(online).difference(self.known), key=_in_order)
            self.known += fresh[:free]
        if not self._warned and not set(online).issubset(self.known):
            self._warned = True
            log.warning(
                "More nodes than population=%d have come: only the first ones take part",
                self._population,
            )

    def nodes(self, places: Iterable[int]) -> list[Identity]:
        """The nodes at these places of the population; a free place is nobody."""
        return [self.known[place] for place in places if place < len(self.known)]

    def _identified(self, present: Iterable[Present]) -> dict[Identity, Identity]:
        """Each node under the name by which it is enrolled; of two under one the first counts."""
        look = list(present)
        if look != self._latest:
            self._latest = look
            self._online = self._named(look)
        return self._online

    def _named(self, present: Iterable[Present]) -> dict[Identity, Identity]:
        listed = set(self.known)
        online: dict[Identity, Identity] = {}
        for node in present:
            own = self._own_name(node, listed) if node.real else node.address
            if own in online:
                log.warning("Two nodes are online under one name: only one of them takes part")
            online.setdefault(own, node.address)
            takes_part = self.open or own in listed
            if node.real and own == node.address and takes_part:
                self.caveat = RESTARTS
        return online

    @staticmethod
    def _own_name(node: Present, listed: set[Identity]) -> Identity:
        """The name by which a node is on the list; if it is not, the one that lasts longest."""
        for name in (node.name, node.fingerprint, node.address):
            if name and name in listed:
                return name
        return node.name or node.address

    def _await(self, look: Callable[[], Iterable[Present]]) -> dict[Identity, Identity]:
        """Wait until enough of the population is online."""
        wanted = math.ceil(self._min_online * self._population)
        seen = -1
        while True:
            online = self._identified(look())
            self._refuse_too_many(online)
            belonging = len(online) if self.open else len(set(online).intersection(self.known))
            if belonging >= wanted:
                return online
            if belonging != seen:
                seen = belonging
                log.info(
                    "Waiting for %d of %d enrolled nodes (min_online=%g): %d online",
                    wanted,
                    self._population,
                    self._min_online,
                    seen,
                )
            time.sleep(POLL_SECONDS)

    def _refuse_too_many(self, online: dict[Identity, Identity]) -> None:
        if self.open and len(online) > self._population:
            raise ValueError(
                f"{len(online)} nodes are online but the cohort's population is "
                f"{self._population}: set population={len(online)}, or name the population with "
                "enrolled=[…]"
            )


def _in_order(own: Identity) -> tuple[int, str]:
    return (own, "") if isinstance(own, int) else (0, own)
