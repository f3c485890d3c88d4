"""Who the population is: a fixed list of nodes, not those that happen to be online."""

import hashlib
import logging
import math
import operator
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from flwr.serverapp import Grid

from flwr_ppsgd.checks import printable, require
from flwr_ppsgd.training import Enrolled, Identity

log = logging.getLogger("flwr.ppsgd")

POLL_SECONDS = 1.0
SAY_SECONDS = 60.0
MOST_TOLD = 20  # nodes at a time
LONGEST_NAME = 100  # characters
RESTARTS = (
    "nodes are known by their ids, and without authentication a node that restarts comes back "
    "under a new one: for a while one user may hold two places. Start the SuperLink with "
    "--enable-supernode-auth, register each SuperNode with a --name, and enrol by name or public "
    "key"
)
OPEN = (
    "enrolment is open, which is meant for simulations: whoever connects first has a place, and "
    "one user can take several. Name the population with enrolled=[…], best by public keys"
)
KEY = "key:"  # before the SHA-256 of a public key
FINGERPRINT = re.compile("key:[0-9a-f]{64}")


class OnlineNode(NamedTuple):
    """A node that is online.

    address: where to send messages. name, fingerprint: by which it may be enrolled. real: whether
    it is a machine of its own, which can restart.
    """

    address: Identity
    name: str = ""
    fingerprint: str = ""
    real: bool = False

    @classmethod
    def of(cls, node: Any) -> "OnlineNode":
        """Flower's simulation gives nodes random bytes for a key; a SuperNode has a real one."""
        real = node.public_key.startswith(b"-----BEGIN")
        known_by = key_fingerprint(node.public_key) if real else ""
        return cls(node.node_id, node.name, known_by, real)


# who is online; ids if nothing else is known of them
Online: TypeAlias = Sequence[OnlineNode] | Sequence[int]


def present_in(grid: Grid) -> Online:
    """Who is online."""
    if type(grid).get_nodes is not Grid.get_nodes:
        return [OnlineNode.of(node) for node in grid.get_nodes()]
    ids = grid.get_node_ids()
    return ids if isinstance(ids, range) else list(ids)  # ranges of any length are equal at once


def key_fingerprint(public_key: bytes) -> str:
    """A public key as a short name: ``key:`` and its SHA-256."""
    return KEY + hashlib.sha256(public_key.strip()).hexdigest()


def looks_like_a_fingerprint(text: str) -> bool:
    """Whether it begins as one; then it is never a name, whatever follows."""
    return text.strip().lower().startswith(KEY)


def identity(enrolled: Identity) -> Identity:
    """An entry of the enrolled list: a node id, a name, a public key, or a key's ``fingerprint``.

    Keys are as ``ssh-keygen`` or OpenSSL write them.
    """
    if not isinstance(enrolled, str):
        return operator.index(enrolled)
    text = enrolled.strip()
    if looks_like_a_fingerprint(text):
        rule = "an enrolled entry that begins with key: must go on with a SHA-256 in hexadecimal"
        remedy = "give the public key itself, or a name that does not begin with key:"
        require(FINGERPRINT.fullmatch(text.lower()) is not None, rule, enrolled, remedy)
        return text.lower()
    if text.startswith(("ecdsa-", "ssh-", "-----BEGIN")):
        in_pem = text.startswith("-----BEGIN")
        load = serialization.load_pem_public_key if in_pem else serialization.load_ssh_public_key
        try:
            key = load(text.encode())
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ValueError(
                f"an enrolled public key cannot be read ({error}), got {text[:40]!r}: give it as "
                "ssh-keygen or OpenSSL has written it"
            ) from None
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        return key_fingerprint(key.public_bytes(serialization.Encoding.PEM, form))
    return enrolled


class Enrolment:
    """The fixed list of nodes that form the population.

    Cohorts are drawn from it, never from those who are online.

    Args:
        population: the number of places.
        enrolled: who has them, and how long to wait for them.
    """

    def __init__(self, population: int, enrolled: Enrolled) -> None:
        self.known: Sequence[Identity] = []
        self.open = enrolled.nodes is None
        self.caveats: dict[str, None] = {}  # why a place may not be one user, oldest first
        self._population = population
        self._min_online = enrolled.min_online
        self._wait_timeout = enrolled.wait_timeout
        self._begun = False
        self._warned = False
        # what the operator should know about nodes: Flower's log holds no names
        self.tell: Callable[[str], None] = log.debug
        self._doubled: set[Identity] = set()
        self._strangers: set[OnlineNode] = set()  # not enrolled, and reported
        self._latest: Online = ()
        self._addresses: Mapping[Identity, Identity] = {}
        if enrolled.nodes is not None:
            self.known = list(dict.fromkeys(map(identity, enrolled.nodes)))
            if len(self.known) != population:
                raise ValueError(
                    f"enrolled names {len(self.known)} different nodes but the cohort's population "
                    f"is {population}: the denominator and the guarantee rest on that number, make "
                    "them equal"
                )

    def refresh(self, look: Callable[[], Online]) -> Mapping[Identity, Identity]:
        """Who is online now, and at which address.

        The first call waits for ``min_online`` of the population and fixes who belongs to it.
        """
        if self._begun:
            changed = self._look(look)
        else:
            self._await(look)
            self._begun = True
            changed = True
        if changed and self.open:
            self._give_places()
        return self._addresses

    def _look(self, look: Callable[[], Online]) -> bool:
        """Whether anybody has come or left."""
        present = look()
        if present == self._latest:
            return False
        self._latest = present
        if present and isinstance(present[0], OnlineNode):
            self._addresses = self._addresses_of(cast(Sequence[OnlineNode], present))
        else:
            ids = cast(Sequence[int], present)
            self._addresses = dict(zip(ids, ids, strict=True))
        return True

    def _await(self, look: Callable[[], Online]) -> None:
        """Wait until enough of the population is online, and say every minute for what."""
        wanted = math.ceil(self._min_online * self._population)
        deadline = time.monotonic() + self._wait_timeout
        said = -math.inf
        seen = -1
        while True:
            self._look(look)
            online = len(self._addresses)
            if self.open and online > self._population:
                raise ValueError(
                    f"{online} nodes are online but the cohort's population is "
                    f"{self._population}: set population={online}, or name the population with "
                    "enrolled=[…]"
                )
            if not self.open:
                online = sum(own in self._addresses for own in self.known)
            if online >= wanted:
                return
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError(
                    f"{online} of {self._population} enrolled nodes are online after "
                    f"{self._wait_timeout:g} s, and the training waits for {wanted} "
                    f"(min_online={self._min_online:g}): start more nodes (in a simulation with "
                    f"--federation-config 'num-supernodes={self._population}'), set population to "
                    "what there is, or raise wait_timeout"
                )
            if online != seen or now - said >= SAY_SECONDS:
                seen = online
                said = now
                log.info(
                    "Waiting for %d of %d enrolled nodes (min_online=%g): %d online, %.0f s left",
                    *(wanted, self._population, self._min_online, online, deadline - now),
                )
            time.sleep(POLL_SECONDS)

    def _give_places(self) -> None:
        """Give free places to new nodes, in a fixed order."""
        free = self._population - len(self.known)
        known = set(self.known)
        new = (own for own in self._addresses if own not in known)
        fresh = sorted(new, key=lambda own: (own, "") if isinstance(own, int) else (0, own))
        self.known = [*self.known, *fresh[:free]]
        if len(fresh) > free and not self._warned:
            self._warned = True
            log.warning(
                "More nodes than population=%d have come: only the first ones take part",
                self._population,
            )

    def _addresses_of(self, present: Sequence[OnlineNode]) -> dict[Identity, Identity]:
        """The address of each node that may take part, under the name by which it is enrolled."""
        listed = set(self.known)
        online: dict[Identity, Identity] = {}
        doubled: set[Identity] = set()
        strangers: set[OnlineNode] = set()
        for node in present:
            own = _own_name(node, listed) if node.real else node.address
            if not self.open and own not in listed:
                if node.real:
                    strangers.add(node)
                continue
            # a real node can restart, or belong to a user who has others
            if node.real and self.open and OPEN not in self.caveats:
                self.caveats[OPEN] = None
                log.warning("User-level privacy is not claimed: %s", OPEN)
            if node.real and own == node.address:
                self.caveats[RESTARTS] = None
            if own in online:
                doubled.add(own)
            online[own] = node.address
        for own in doubled:
            del online[own]
        self._tell_of_doubled(doubled)
        self._tell_of_strangers(strangers)
        return online

    def _tell_of_doubled(self, doubled: set[Identity]) -> None:
        """Of two nodes under one name nobody knows which one is the user's."""
        if doubled and doubled != self._doubled:
            log.warning(
                "Two nodes are online under one enrolled name: neither takes part, and their place "
                "counts as zero. Unregister one of them, or enrol by public key"
            )
            names = [printable(own, LONGEST_NAME) for own in sorted(map(str, doubled))]
            self.tell(
                "enrolled names under which two nodes are online, so that nobody has the place: "
                f"{', '.join(names[:MOST_TOLD])}"
            )
        self._doubled = doubled

    def _tell_of_strangers(self, strangers: set[OnlineNode]) -> None:
        """Say once of each node that it has no place: it may be a user's, under another key."""
        fresh = sorted(strangers - self._strangers)
        self._strangers |= strangers
        if not fresh:
            return
        log.info(
            "Nodes that are not enrolled are online (%d): they take no part. A user who comes back "
            "under another key has no place until that key is enrolled, or registered under the "
            "enrolled name in place of the old one",
            len(fresh),
        )
        for node in fresh[:MOST_TOLD]:
            name = printable(node.name, LONGEST_NAME)
            self.tell(
                f"node {node.address} (name {name!r}, {node.fingerprint}) is online and not "
                "enrolled: it takes no part"
            )


def _own_name(node: OnlineNode, listed: set[Identity]) -> Identity:
    """The entry of the list that a node is; if there is none, the name that lasts longest.

    A key says more than a name, and a name that looks like a key does not count.
    """
    name = "" if looks_like_a_fingerprint(node.name) else node.name
    for own in (node.fingerprint, name, node.address):
        if own and own in listed:
            return own
    return name or node.address
