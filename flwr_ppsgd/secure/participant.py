"""A client's part of a secure sum: four exchanges, and what it refuses in each.

Each state has one method, which gives the next state and the message to send. Nothing in a state
can send a second masked vector: the keys and the seed are not in the state that follows. States are
flat records of bytes and whole numbers, so that the shell around can keep them between messages.

It trusts the server to pass on keys (see ``docs/secure-aggregation.md``), and nothing else: whom it
masks with, how many survive, and which of two secrets of a neighbour it gives up.
"""

import functools
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import SecureSum
from flwr_ppsgd.secure.graph import Design, design, survivors_needed
from flwr_ppsgd.secure.keys import KEY_SIZE, KeyPair, derive, fingerprint, seal, unseal
from flwr_ppsgd.secure.masks import Words, add_mask, subtract_mask
from flwr_ppsgd.secure.messages import (
    Partners,
    Portion,
    PublicKeys,
    Revealed,
    Roster,
    Shares,
    bitmap,
    hash_of,
    members_of,
    packed,
    unpacked,
)
from flwr_ppsgd.secure.shamir import SHARE_SIZE, split

Flat: TypeAlias = dict[str, bytes]
SHARE = b"share"
SEED = b"seed"
KEY = b"key"
MASK = b"mask"


class ProtocolError(ValueError):
    """The server asks for something that would break the promise: nothing is sent."""


@dataclass(frozen=True)
class Session:
    """Which sum this is: every key is for one session only.

    Args:
        training: the number of the training.
        run: the number of Flower's run.
        start: which start of the server this is.
        round: counted over the whole training.
        part: which release of the round it is.
    """

    training: int
    run: int
    start: int
    round: int
    part: str = "gradient"

    @functools.cached_property
    def label(self) -> bytes:
        """What keys are derived with."""
        numbers = f"{self.training},{self.run},{self.start},{self.round}"
        return f"{numbers},{self.part}".encode()


def seed_hash(seed: bytes, session: Session, owner: int) -> bytes:
    """By which the server knows a seed that it puts together again."""
    return fingerprint(seed, session.label, SEED, owner)


def share_hash(share: bytes, session: Session, secret: bytes, owner: int, holder: int) -> bytes:
    """By which the server knows a wrong share: shares are too random to be guessed from it."""
    return fingerprint(share, session.label, SHARE, secret, owner, holder)


def pair_key(secret: bytes, session: Session, places: tuple[int, int], members: bytes) -> bytes:
    """The key of the mask that two neighbours share; ``members`` is the hash of U₂."""
    return derive(secret, session.label, MASK, min(places), max(places), members)


def own_key(seed: bytes, session: Session, place: int, members: bytes) -> bytes:
    """The key of the mask that a participant has alone."""
    return derive(seed, session.label, SEED, place, members)


@dataclass(frozen=True)
class Keyed:
    """After exchange 1: two fresh key pairs.

    Args:
        session: which sum they are for.
        channel: for shares to this participant.
        mask: for masks.
    """

    session: Session
    channel: KeyPair = field(repr=False)
    mask: KeyPair = field(repr=False)

    @classmethod
    def new(cls, session: Session) -> Self:
        """Fresh keys, which serve one masked vector."""
        return cls(session, KeyPair.new(), KeyPair.new())

    @property
    def message(self) -> PublicKeys:
        """The public halves, for the server to pass on."""
        return PublicKeys(self.channel.public, self.mask.public)

    def share(self, roster: Roster, rules: SecureSum) -> tuple["Shared", Shares]:
        """Exchange 2: give every neighbour a share of a fresh seed and of the mask key."""
        found = checked_design(roster, rules)
        self._refuse_known_keys(roster)
        seed = secrets.token_bytes(KEY_SIZE)
        channels = {
            other: shared_secret(self.channel, keys.channel)
            for other, keys in roster.neighbours.items()
        }
        holders = roster.neighbours.keys()
        threshold = found.threshold(len(holders))
        of_seed = split(seed, threshold, holders)
        of_key = split(self.mask.private, threshold, holders)
        portions = {
            holder: _portion(
                self.session,
                (roster.place, holder),
                channels[holder],
                (of_seed[holder], of_key[holder]),
            )
            for holder in holders
        }
        shares = Shares(seed_hash(seed, self.session, roster.place), portions)
        return Shared(self.session, self.mask, seed, roster, channels), shares

    def _refuse_known_keys(self, roster: Roster) -> None:
        """Two participants with one key would be one person, or a mirror of this one."""
        keys = [self.message, *roster.neighbours.values()]
        halves = [half for pair in keys for half in (pair.channel, pair.mask)]
        refuse_unless(len(set(halves)) == len(halves), "a public key that comes twice")

    def to_flat(self) -> Flat:
        return {"channel": self.channel.private, "mask": self.mask.private}

    @classmethod
    def from_flat(cls, session: Session, flat: Mapping[str, bytes]) -> Self:
        return cls(session, KeyPair(flat["channel"]), KeyPair(flat["mask"]))


def _portion(
    session: Session,
    pair: tuple[int, int],
    secret: bytes,
    shares: tuple[bytes, bytes],
) -> Portion:
    """The two shares of one participant for another, sealed, with their hashes."""
    owner, holder = pair
    hashes = [
        share_hash(share, session, name, owner, holder)
        for share, name in zip(shares, (SEED, KEY), strict=True)
    ]
    return Portion(seal(channel_key(secret, session, owner, holder), b"".join(shares)), *hashes)


@dataclass(frozen=True)
class Shared:
    """After exchange 2: also the seed, and who the neighbours are.

    Args:
        session: which sum it is.
        mask: the key pair for masks.
        seed: of the mask that this participant has alone.
        roster: who the neighbours are.
        channels: what this participant and each neighbour know of each other's shares.
    """

    session: Session
    mask: KeyPair = field(repr=False)
    seed: bytes = field(repr=False)
    roster: Roster
    channels: Mapping[int, bytes] = field(repr=False)

    def masked(
        self, partners: Partners, rules: SecureSum, vector: NDArray[np.int64]
    ) -> tuple["Masked", Words]:
        """Exchange 3: y = x + PRG(b_u) ± Σ_v PRG(s_uv) modulo 2⁶⁴.

        Args:
            partners: U₂, and the shares that its members gave this participant.
            rules: h and t.
            vector: x, bounded and with its share of the noise, in whole multiples of the grid.
        """
        here = self.check(partners, rules)
        total = vector.astype(np.int64).view(np.uint64)
        members = hash_of(partners.members, self.roster.participants)
        place = self.roster.place
        add_mask(total, own_key(self.seed, self.session, place, members))
        for other in here:
            secret = shared_secret(self.mask, self.roster.neighbours[other].mask)
            key = pair_key(secret, self.session, (place, other), members)
            if place < other:
                add_mask(total, key)
            else:
                subtract_mask(total, key)
        held = {other: self._opened(other, partners.sealed[other]) for other in here}
        kept = {other: shares for other, shares in held.items() if shares}
        after = Masked(self.session, place, self.roster.participants, partners.members, kept)
        return after, total

    def check(self, partners: Partners, rules: SecureSum) -> list[int]:
        """The neighbours in U₂, in order; ProtocolError if there are too few of anything."""
        members = partners.members
        neighbours = self.roster.neighbours.keys()
        here = sorted(neighbours & members)
        threshold = checked_design(self.roster, rules).threshold(len(neighbours))
        refuse_unless(self.roster.place in members, "masks for a sum without this client")
        enough = len(members) >= rules.least
        refuse_unless(enough, f"masks among {len(members)} clients, fewer than {rules.least}")
        found = f"masks with {len(here)} neighbours, fewer than {threshold}"
        refuse_unless(len(here) >= threshold, found)
        refuse_unless(sorted(partners.sealed) == here, "shares that are not those of U2")
        return here

    def _opened(self, other: int, sealed: bytes) -> bytes:
        """The two shares of a neighbour; nothing if they cannot be read, which only costs one."""
        key = channel_key(self.channels[other], self.session, other, self.roster.place)
        try:
            return unseal(key, sealed)
        except ValueError:
            return b""

    def to_flat(self) -> Flat:
        return {
            "mask": self.mask.private,
            "seed": self.seed,
            "roster": self.roster.to_bytes(),
            "channels": packed(self.channels),
        }

    @classmethod
    def from_flat(cls, session: Session, flat: Mapping[str, bytes]) -> Self:
        roster = Roster.from_bytes(flat["roster"])
        channels = unpacked(flat["channels"], KEY_SIZE, roster.participants)
        return cls(session, KeyPair(flat["mask"]), flat["seed"], roster, channels)


@dataclass(frozen=True)
class Masked:
    """After exchange 3: the neighbours' shares, and no secret of this participant's own."""

    session: Session
    place: int
    participants: int
    members: frozenset[int]
    held: Mapping[int, bytes] = field(repr=False)

    def reveal(self, survivors: frozenset[int], rules: SecureSum) -> Revealed:
        """Exchange 4: the seed's share for a survivor, the mask key's for others, never both.

        Args:
            survivors: U₃, as the server names it.
            rules: h and t.
        """
        refuse_unless(survivors <= self.members, "survivors who had not given shares")
        refuse_unless(self.place in survivors, "survivors without this client")
        needed = survivors_needed(rules, self.participants)
        enough = len(survivors) >= needed
        refuse_unless(enough, f"{len(survivors)} survivors, fewer than {needed}")
        shares = {
            other: pair[:SHARE_SIZE] if other in survivors else pair[SHARE_SIZE:]
            for other, pair in self.held.items()
        }
        return Revealed(shares)

    def to_flat(self) -> Flat:
        return {
            "place": b"%d" % self.place,
            "participants": b"%d" % self.participants,
            "members": bitmap(self.members, self.participants),
            "held": packed(self.held),
        }

    @classmethod
    def from_flat(cls, session: Session, flat: Mapping[str, bytes]) -> Self:
        participants = int(flat["participants"])
        members = members_of(flat["members"], participants)
        held = unpacked(flat["held"], 2 * SHARE_SIZE, participants)
        return cls(session, int(flat["place"]), participants, members, held)


State: TypeAlias = Keyed | Shared | Masked


def checked_design(roster: Roster, rules: SecureSum) -> Design:
    """How many neighbours there must be; ProtocolError if there are others."""
    participants = roster.participants
    enough = participants >= rules.least
    refuse_unless(enough, f"a sum of {participants} clients, fewer than {rules.least}")
    found = design(rules, participants)
    neighbours = len(roster.neighbours)
    if found.complete:
        all_there = neighbours == found.neighbours
        refuse_unless(all_there, f"{neighbours} neighbours where everybody is one")
    else:
        few = neighbours <= found.neighbours
        refuse_unless(few, f"{neighbours} neighbours where {found.neighbours} are drawn")
    threshold = found.threshold(neighbours)
    refuse_unless(neighbours >= threshold, f"{neighbours} neighbours for {threshold} shares")
    return found


def channel_key(secret: bytes, session: Session, sender: int, holder: int) -> bytes:
    """The key under which one neighbour gives another its shares, one in each direction."""
    return derive(secret, session.label, SHARE, sender, holder)


def shared_secret(own: KeyPair, public: bytes) -> bytes:
    """What this participant and the owner of a public key know; ProtocolError if it is no key."""
    try:
        return own.secret_with(public)
    except ValueError:
        raise ProtocolError("a public key of a neighbour is none: nothing is sent") from None


def refuse_unless(holds: bool, found: str) -> None:
    """ProtocolError unless it holds."""
    if not holds:
        raise ProtocolError(f"the server asks for {found}: nothing is sent")
