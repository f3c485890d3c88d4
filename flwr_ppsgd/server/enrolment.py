"""Who the population is: a fixed list of nodes, whoever happens to be online."""

import hashlib
import logging
import math
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
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
    def of(cls, node: Any) -> "Present":
        """Flower's simulation gives nodes random bytes for a key; a SuperNode has a real one."""
        real = node.public_key.startswith(b"-----BEGIN")
        known_by = fingerprint(node.public_key) if real else ""
        return cls(node.node_id, node.name, known_by, real)


class Ids(Sequence[Present]):
    """Nodes of which only the ids are known. Each is wrapped when it is looked at.

    Args:
        ids: a list that has a ``span`` stands for that range, which costs the same for any number
            of nodes.
    """

    def __init__(self, ids: Iterable[int]) -> None:
        span = getattr(ids, "span", None)
        self.ids: Sequence[int] = span if isinstance(span, range) else tuple(ids)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Present: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Present]: ...
    def __getitem__(self, index: int | slice) -> Present | Sequence[Present]:
        if isinstance(index, slice):
            return Ids(self.ids[index])
        return Present(self.ids[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ids) and self.ids == other.ids

    __hash__ = None  # type: ignore[assignment]


class Range(Mapping[Identity, Identity]):
    """{id: id} for a range of ids, without a dict of them."""

    def __init__(self, ids: range) -> None:
        self.ids = ids

    def __getitem__(self, node: Identity) -> Identity:
        if node not in self:
            raise KeyError(node)
        return node

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and node in self.ids  # for anything else a range would search

    def __iter__(self) -> Iterator[Identity]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


def present_in(grid: Grid) -> Sequence[Present]:
    """Who is online."""
    if type(grid).get_nodes is Grid.get_nodes:  # nothing but ids is known
        return Ids(grid.get_node_ids())
    return [Present.of(node) for node in grid.get_nodes()]


def fingerprint(public_key: bytes) -> str:
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
        return fingerprint(_pem(_read_key(text)))
    return enrolled


def _read_key(text: str) -> PublicKeyTypes:
    in_pem = text.startswith("-----BEGIN")
    load = serialization.load_pem_public_key if in_pem else serialization.load_ssh_public_key
    try:
        return load(text.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(
            f"an enrolled public key cannot be read ({error}), got {text[:40]!r}: give it as "
            "ssh-keygen or OpenSSL has written it"
        ) from None


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
        enrolled: who has them, and how long to wait for them.
        tell: is told which nodes need the operator. Flower's log holds no names.
    """

    def __init__(
        self, population: int, enrolled: Enrolled, tell: Callable[[str], None] = log.debug
    ) -> None:
        self.known: Sequence[Identity] = []
        self.open = enrolled.nodes is None
        self._population = population
        self._min_online = enrolled.min_online
        self._wait_timeout = enrolled.wait_timeout
        self._begun = False
        self._warned = False
        self._caveats: dict[str, None] = {}  # in the order in which they came up
        self._tell = tell
        self._doubled: set[Identity] = set()
        self._strangers: set[Present] = set()  # not enrolled, and told of
        self._latest: Sequence[Present] = []
        self._online: Mapping[Identity, Identity] = {}
        self._settled: Mapping[Identity, Identity] | None = None  # who has been given places
        if enrolled.nodes is not None:
            self.known = list(dict.fromkeys(map(identity, enrolled.nodes)))
            self._check_count()

    @property
    def caveat(self) -> str:
        """Why a place in the population may not be one user; empty if it is."""
        return "; ".join(self._caveats)

    def _check_count(self) -> None:
        if len(self.known) != self._population:
            raise ValueError(
                f"enrolled names {len(self.known)} different nodes but the cohort's population is "
                f"{self._population}: the denominator and the guarantee rest on that number, make "
                "them equal"
            )

    def refresh(self, look: Callable[[], Iterable[Present]]) -> Mapping[Identity, Identity]:
        """Who is online now, and at which address.

        The first call waits for ``min_online`` of the population and fixes who belongs to it.
        """
        online = self._identified(look()) if self._begun else self._await(look)
        if self.open:
            self._enrol(online)
        self._begun = True
        return online

    def _enrol(self, online: Mapping[Identity, Identity]) -> None:
        """Give free places to whoever is new."""
        if online is self._settled:
            return
        self._settled = online
        free = self._population - len(self.known)
        fresh = self._newcomers(online)
        given = fresh[:free]
        self.known = [*self.known, *given] if self.known else given
        if len(fresh) > free and not self._warned:
            self._warned = True
            log.warning(
                "More nodes than population=%d have come: only the first ones take part",
                self._population,
            )

    def _newcomers(self, online: Mapping[Identity, Identity]) -> Sequence[Identity]:
        """Who has no place yet, in a fixed order."""
        if not self.known and isinstance(online, Range):
            return online.ids
        known = set(self.known)
        fresh = [own for own in online if own not in known]
        return sorted(fresh, key=_in_order)

    def nodes(self, places: Iterable[int]) -> list[Identity]:
        """The nodes at these places of the population; a free place is nobody."""
        return [self.known[place] for place in places if place < len(self.known)]

    def _identified(self, present: Iterable[Present]) -> Mapping[Identity, Identity]:
        """The address of each node that may take part, under the name by which it is enrolled."""
        look = present if isinstance(present, Ids) else list(present)
        if look != self._latest:
            self._latest = look
            self._online = self._addresses(look)
        return self._online

    def _addresses(self, present: Sequence[Present]) -> Mapping[Identity, Identity]:
        if isinstance(present, Ids):
            ids = present.ids
            return Range(ids) if isinstance(ids, range) else dict(zip(ids, ids, strict=True))
        listed = set(self.known)
        online: dict[Identity, Identity] = {}
        doubled: set[Identity] = set()
        strangers: set[Present] = set()
        for node in present:
            own = self._own_name(node, listed) if node.real else node.address
            if not self.open and own not in listed:
                if node.real:
                    strangers.add(node)
                continue
            self._note_caveats(node, own)
            if own in online:
                doubled.add(own)
            online[own] = node.address
        self._refuse_doubled(online, doubled)
        self._tell_of(strangers)
        return online

    def _tell_of(self, strangers: set[Present]) -> None:
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
            self._tell(
                f"node {node.address} (name {name!r}, {node.fingerprint}) is online and not "
                "enrolled: it takes no part"
            )

    def _note_caveats(self, node: Present, own: Identity) -> None:
        """Only a machine of its own can restart, or belong to a user who has others."""
        if not node.real:
            return
        if self.open and OPEN not in self._caveats:
            self._caveats[OPEN] = None
            log.warning("User-level privacy is not claimed: %s", OPEN)
        if own == node.address:
            self._caveats[RESTARTS] = None

    def _refuse_doubled(self, online: dict[Identity, Identity], doubled: set[Identity]) -> None:
        """Of two nodes under one name nobody can tell which one is the user's."""
        for own in doubled:
            del online[own]
        if doubled and doubled != self._doubled:
            log.warning(
                "Two nodes are online under one enrolled name: neither takes part, and their place "
                "counts as zero. Unregister one of them, or enrol by public key"
            )
            names = [printable(own, LONGEST_NAME) for own in sorted(map(str, doubled))]
            self._tell(
                "enrolled names under which two nodes are online, so that nobody has the place: "
                f"{', '.join(names[:MOST_TOLD])}"
            )
        self._doubled = doubled

    @staticmethod
    def _own_name(node: Present, listed: set[Identity]) -> Identity:
        """The entry of the list that a node is; if there is none, the name that lasts longest.

        A key says more than a name, and a name that looks like a key is none.
        """
        name = "" if looks_like_a_fingerprint(node.name) else node.name
        for own in (node.fingerprint, name, node.address):
            if own and own in listed:
                return own
        return name or node.address

    def _await(self, look: Callable[[], Iterable[Present]]) -> Mapping[Identity, Identity]:
        """Wait until enough of the population is online, and say every minute for what."""
        wanted = math.ceil(self._min_online * self._population)
        begun = time.monotonic()
        said = -math.inf
        seen = -1
        while True:
            online = self._identified(look())
            self._refuse_too_many(online)
            belonging = self._belonging(online)
            if belonging >= wanted:
                return online
            now = time.monotonic()
            if now - begun >= self._wait_timeout:
                raise self._gave_up(wanted, belonging)
            if belonging != seen or now - said >= SAY_SECONDS:
                seen = belonging
                said = now
                log.info(
                    "Waiting for %d of %d enrolled nodes (min_online=%g): %d online, %.0f s left",
                    wanted,
                    self._population,
                    self._min_online,
                    seen,
                    begun + self._wait_timeout - now,
                )
            time.sleep(POLL_SECONDS)

    def _belonging(self, online: Mapping[Identity, Identity]) -> int:
        if self.open:
            return len(online)
        return sum(own in online for own in self.known)

    def _gave_up(self, wanted: int, online: int) -> TimeoutError:
        return TimeoutError(
            f"{online} of {self._population} enrolled nodes are online after "
            f"{self._wait_timeout:g} s, and the training waits for {wanted} "
            f"(min_online={self._min_online:g}): start more nodes (in a simulation with "
            f"--federation-config 'num-supernodes={self._population}'), set population to what "
            "there is, or raise wait_timeout"
        )

    def _refuse_too_many(self, online: Mapping[Identity, Identity]) -> None:
        if self.open and len(online) > self._population:
            raise ValueError(
                f"{len(online)} nodes are online but the cohort's population is "
                f"{self._population}: set population={len(online)}, or name the population with "
                "enrolled=[…]"
            )


def _in_order(own: Identity) -> tuple[int, str]:
    return (own, "") if isinstance(own, int) else (0, own)
