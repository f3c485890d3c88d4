"""A client's part of a secure sum: four exchanges, their messages, and what it refuses in each.

1. The client sends two fresh public keys and gets a ``Roster``: its neighbours' keys.
2. It sends ``Shares`` of a fresh seed and of its mask key and gets ``Partners``: whose shares came.
3. It sends its masked vector and gets the survivors: whose vectors came.
4. It reveals one share for each neighbour.

Each state has one step, which gives the next state and the message to send. Nothing in a state can
send a second masked vector: the keys and the seed are not in the state that follows. A client
trusts the server to pass on keys, and nothing else. A participant is a number from 0, its place in
this round.
"""

import secrets
import struct
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.secure.crypto import (
    HASH_SIZE,
    KEY_SIZE,
    SHARE_SIZE,
    TAG_SIZE,
    KeyPair,
    Words,
    add_mask,
    decrypt,
    derive,
    encrypt,
    labelled_hash,
    split,
)
from flwr_ppsgd.secure.graph import MOST_PARTICIPANTS, Design, design, survivors_needed
from flwr_ppsgd.secure.terms import Session

Flat: TypeAlias = dict[str, bytes]
SEALED_SIZE = 2 * SHARE_SIZE + TAG_SIZE
SHARE = b"share"
SEED = b"seed"
KEY = b"key"
MASK = b"mask"
_PLACE = struct.Struct(">I")
_TWO = struct.Struct(">II")


# --- messages


class PublicKeys(NamedTuple):
    """Two public keys of one participant: for sealed messages to it, and for masks with it."""

    channel: bytes
    mask: bytes

    def to_bytes(self) -> bytes:
        return self.channel + self.mask

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        _check_form(len(data) == 2 * KEY_SIZE, f"{len(data)} bytes of keys")
        return cls(data[:KEY_SIZE], data[KEY_SIZE:])


@dataclass(frozen=True)
class Roster:
    """Who takes part, as far as one participant needs to know.

    Args:
        place: the participant's own number.
        participants: n, those who sent keys.
        neighbours: the keys of those who share masks with it and hold its shares.
    """

    place: int
    participants: int
    neighbours: Mapping[int, PublicKeys]

    def to_bytes(self) -> bytes:
        keys = {place: keys.to_bytes() for place, keys in self.neighbours.items()}
        return _TWO.pack(self.place, self.participants) + pack_parts(keys)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        _check_form(len(data) >= _TWO.size, f"{len(data)} bytes")
        place, participants = _TWO.unpack_from(data)
        _check_form(participants <= MOST_PARTICIPANTS, f"{participants} participants")
        _check_form(place < participants, f"place {place} of {participants}")
        keys = unpack_parts(data[_TWO.size :], 2 * KEY_SIZE, participants)
        _check_form(place not in keys, "a participant is its own neighbour")
        neighbours = {other: PublicKeys.from_bytes(pair) for other, pair in keys.items()}
        return cls(place, participants, neighbours)


class SealedShares(NamedTuple):
    """What one participant gives to one holder: two sealed shares, and a hash of each."""

    sealed: bytes
    seed_share_hash: bytes
    key_share_hash: bytes


@dataclass(frozen=True)
class Shares:
    """The shares of one participant's seed and mask key.

    Args:
        seed_hash: of its seed.
        portions: one for each neighbour.
    """

    seed_hash: bytes
    portions: Mapping[int, SealedShares]

    def to_bytes(self) -> bytes:
        parts = {place: b"".join(portion) for place, portion in self.portions.items()}
        return self.seed_hash + pack_parts(parts)

    @classmethod
    def from_bytes(cls, data: bytes, participants: int) -> Self:
        _check_form(len(data) >= HASH_SIZE, f"{len(data)} bytes")
        width = SEALED_SIZE + 2 * HASH_SIZE
        portions = {}
        for place, part in unpack_parts(data[HASH_SIZE:], width, participants).items():
            sealed = part[:SEALED_SIZE]
            of_seed = part[SEALED_SIZE:-HASH_SIZE]
            of_key = part[-HASH_SIZE:]
            portions[place] = SealedShares(sealed, of_seed, of_key)
        return cls(data[:HASH_SIZE], portions)


@dataclass(frozen=True)
class Partners:
    """Whose shares arrived, and those for one participant.

    Args:
        members: U₂.
        sealed: from each neighbour in it.
    """

    members: frozenset[int]
    sealed: Mapping[int, bytes]

    def to_bytes(self, participants: int) -> bytes:
        return bitmap(self.members, participants) + pack_parts(self.sealed)

    @classmethod
    def from_bytes(cls, data: bytes, participants: int) -> Self:
        end = _bitmap_size(participants)
        members = members_of(data[:end], participants)
        return cls(members, unpack_parts(data[end:], SEALED_SIZE, participants))


def bitmap(members: Iterable[int], participants: int) -> bytes:
    """A set of participants, one bit for each of all."""
    bits = sum(1 << place for place in members)
    return bits.to_bytes(_bitmap_size(participants), "little")


def members_of(data: bytes, participants: int) -> frozenset[int]:
    """The set that ``bitmap`` was given."""
    _check_form(len(data) == _bitmap_size(participants), f"{len(data)} bytes of members")
    bits = int.from_bytes(data, "little")
    _check_form(bits >> participants == 0, f"a member beyond {participants} participants")
    return frozenset(place for place in range(participants) if bits >> place & 1)


def pack_parts(parts: Mapping[int, bytes]) -> bytes:
    """Parts of one size by place, in ascending order."""
    return b"".join(_PLACE.pack(place) + parts[place] for place in sorted(parts))


def unpack_parts(data: bytes, width: int, participants: int) -> dict[int, bytes]:
    """The parts that ``pack_parts`` was given."""
    step = _PLACE.size + width
    _check_form(len(data) % step == 0, f"{len(data)} bytes in parts of {step}")
    parts = {}
    last = -1
    for start in range(0, len(data), step):
        (place,) = _PLACE.unpack_from(data, start)
        _check_form(last < place < participants, f"place {place} of {participants} after {last}")
        parts[place] = data[start + _PLACE.size : start + step]
        last = place
    return parts


def _bitmap_size(participants: int) -> int:
    return (participants + 7) // 8


def _check_form(holds: bool, found: str) -> None:
    """ValueError unless a message can be read."""
    if not holds:
        raise ValueError(f"malformed message of a secure sum: {found}")


# --- derived keys and hashes


def seed_hash(seed: bytes, session: Session, owner: int) -> bytes:
    """By which the server recognises a seed that it has joined from shares."""
    return labelled_hash(seed, session.label, SEED, owner)


def share_hash(share: bytes, session: Session, secret: bytes, owner: int, holder: int) -> bytes:
    """By which the server recognises a wrong share; a share is too random to be guessed from it."""
    return labelled_hash(share, session.label, SHARE, secret, owner, holder)


def members_hash(members: Collection[int], participants: int) -> bytes:
    """Binds a mask to U₂."""
    return labelled_hash(bitmap(members, participants), b"members", participants)


def pair_key(secret: bytes, session: Session, places: tuple[int, int], members: bytes) -> bytes:
    """The key of the mask that two neighbours share; ``members`` is the hash of U₂."""
    return derive(secret, session.label, MASK, min(places), max(places), members)


def pair_sign(place: int, other: int) -> int:
    """Of the mask in ``place``'s vector: what one of two neighbours adds, the other takes off."""
    return 1 if place < other else -1


def own_key(seed: bytes, session: Session, place: int, members: bytes) -> bytes:
    """The key of the mask that a participant has alone."""
    return derive(seed, session.label, SEED, place, members)


def _channel_key(secret: bytes, session: Session, sender: int, holder: int) -> bytes:
    """The key under which one neighbour gives another its shares."""
    return derive(secret, session.label, SHARE, sender, holder)


# --- the client's states


@dataclass(frozen=True)
class KeysSent:
    """After exchange 1: two fresh key pairs, which serve one masked vector.

    Args:
        session: the sum they are for.
        channel: for shares to this participant.
        mask: for masks.
    """

    session: Session
    channel: KeyPair = field(repr=False)
    mask: KeyPair = field(repr=False)

    @classmethod
    def new(cls, session: Session) -> Self:
        """Fresh keys."""
        return cls(session, KeyPair.new(), KeyPair.new())

    @property
    def public(self) -> PublicKeys:
        """The message: the public halves, for the server to pass on."""
        return PublicKeys(self.channel.public, self.mask.public)

    def share(self, roster: Roster) -> tuple["SharesSent", Shares]:
        """Exchange 2: give every neighbour a share of a fresh seed and of the mask key."""
        found = check_roster(roster, self.session)
        # two participants with one key would be one person, or a mirror of this one
        halves = list(self.public)
        for keys in roster.neighbours.values():
            halves += keys
        _check_request(len(set(halves)) == len(halves), "a public key comes twice")
        channels = {}
        for other, keys in roster.neighbours.items():
            channels[other] = self.channel.secret_with(keys.channel)
        seed = secrets.token_bytes(KEY_SIZE)
        threshold = found.threshold(len(channels))
        of_seed = split(seed, threshold, channels.keys())
        of_key = split(self.mask.private, threshold, channels.keys())
        owner = roster.place
        portions = {}
        for holder, secret in channels.items():
            channel_key = _channel_key(secret, self.session, owner, holder)
            sealed = encrypt(channel_key, of_seed[holder] + of_key[holder])
            seed_share = share_hash(of_seed[holder], self.session, SEED, owner, holder)
            key_share = share_hash(of_key[holder], self.session, KEY, owner, holder)
            portions[holder] = SealedShares(sealed, seed_share, key_share)
        shares = Shares(seed_hash(seed, self.session, owner), portions)
        return SharesSent(self.session, self.mask, seed, roster, channels), shares

    def to_flat(self) -> Flat:
        return {"channel": self.channel.private, "mask": self.mask.private}

    @classmethod
    def from_flat(cls, session: Session, flat: Mapping[str, bytes]) -> Self:
        return cls(session, KeyPair(flat["channel"]), KeyPair(flat["mask"]))


@dataclass(frozen=True)
class SharesSent:
    """After exchange 2: also the seed, and who the neighbours are.

    Args:
        session: the sum.
        mask: the key pair for masks.
        seed: of the mask that this participant has alone.
        roster: the neighbours.
        channels: the secret that this participant has with each neighbour.
    """

    session: Session
    mask: KeyPair = field(repr=False)
    seed: bytes = field(repr=False)
    roster: Roster
    channels: Mapping[int, bytes] = field(repr=False)

    def check(self, partners: Partners) -> list[int]:
        """The neighbours in U₂, in order; ValueError if there are too few of anything."""
        members = partners.members
        neighbours = self.roster.neighbours.keys()
        present = sorted(neighbours & members)
        least = self.session.terms.rules.least
        threshold = check_roster(self.roster, self.session).threshold(len(neighbours))
        _check_request(self.roster.place in members, "masks for a sum without this client")
        found = f"masks among {len(members)} clients, fewer than {least}"
        _check_request(len(members) >= least, found)
        found = f"masks with {len(present)} neighbours, fewer than {threshold}"
        _check_request(len(present) >= threshold, found)
        _check_request(sorted(partners.sealed) == present, "the shares are not those of U2")
        return present

    def mask_vector(
        self, partners: Partners, vector: NDArray[np.int64]
    ) -> tuple["VectorSent", Words]:
        """Exchange 3: y = x + PRG(b_u) ± Σ_v PRG(s_uv) modulo 2⁶⁴.

        Args:
            partners: U₂, and the shares that its members gave this participant.
            vector: x, bounded and with its share of the noise, in whole multiples of the grid.
        """
        present = self.check(partners)
        place = self.roster.place
        total = vector.astype(np.int64).view(np.uint64)
        members = members_hash(partners.members, self.roster.participants)
        add_mask(total, own_key(self.seed, self.session, place, members), sign=1)
        for other in present:
            secret = self.mask.secret_with(self.roster.neighbours[other].mask)
            key = pair_key(secret, self.session, (place, other), members)
            add_mask(total, key, sign=pair_sign(place, other))
        held = {}
        for other in present:
            channel = _channel_key(self.channels[other], self.session, other, place)
            with suppress(ValueError):  # shares that cannot be read cost their owner one holder
                held[other] = decrypt(channel, partners.sealed[other])
        participants = self.roster.participants
        return VectorSent(self.session, place, participants, partners.members, held), total

    def to_flat(self) -> Flat:
        return {
            "mask": self.mask.private,
            "seed": self.seed,
            "roster": self.roster.to_bytes(),
            "channels": pack_parts(self.channels),
        }

    @classmethod
    def from_flat(cls, session: Session, flat: Mapping[str, bytes]) -> Self:
        roster = Roster.from_bytes(flat["roster"])
        channels = unpack_parts(flat["channels"], KEY_SIZE, roster.participants)
        return cls(session, KeyPair(flat["mask"]), flat["seed"], roster, channels)


@dataclass(frozen=True)
class VectorSent:
    """After exchange 3: the neighbours' shares, and no secret of this participant's own.

    Args:
        session: the sum.
        place: the participant's own number.
        participants: n.
        members: U₂.
        held: the two shares of each neighbour in it.
    """

    session: Session
    place: int
    participants: int
    members: frozenset[int]
    held: Mapping[int, bytes] = field(repr=False)

    def reveal(self, survivors: frozenset[int]) -> dict[int, bytes]:
        """Exchange 4: the seed's share for a survivor, the mask key's for others, never both.

        Args:
            survivors: U₃, as the server names it.
        """
        _check_request(survivors <= self.members, "survivors who had not given shares")
        _check_request(self.place in survivors, "survivors without this client")
        needed = survivors_needed(self.session.terms.rules, self.participants)
        found = f"{len(survivors)} survivors, fewer than {needed}"
        _check_request(len(survivors) >= needed, found)
        revealed = {}
        for other, pair in self.held.items():
            if other in survivors:
                revealed[other] = pair[:SHARE_SIZE]
            else:
                revealed[other] = pair[SHARE_SIZE:]
        return revealed

    def to_flat(self) -> Flat:
        return {
            "place": b"%d" % self.place,
            "participants": b"%d" % self.participants,
            "members": bitmap(self.members, self.participants),
            "held": pack_parts(self.held),
        }

    @classmethod
    def from_flat(cls, session: Session, flat: Mapping[str, bytes]) -> Self:
        participants = int(flat["participants"])
        members = members_of(flat["members"], participants)
        held = unpack_parts(flat["held"], 2 * SHARE_SIZE, participants)
        return cls(session, int(flat["place"]), participants, members, held)


State: TypeAlias = KeysSent | SharesSent | VectorSent


def check_roster(roster: Roster, session: Session) -> Design:
    """The graph that the terms ask for; ValueError if the roster is of another one."""
    participants = roster.participants
    terms = session.terms
    least = terms.rules.least
    enrolled = f"a sum of {participants} clients where {terms.population} are enrolled"
    _check_request(participants <= terms.population, enrolled)
    _check_request(participants >= least, f"a sum of {participants} clients, fewer than {least}")
    found = design(terms.rules, participants)
    neighbours = len(roster.neighbours)
    if found.complete:
        expected = f"all {found.neighbours} others"
    else:
        expected = f"{found.fewest} to {found.neighbours}"
    fits = found.fewest <= neighbours <= found.neighbours
    _check_request(fits, f"{neighbours} neighbours where the terms ask for {expected}")
    return found


def _check_request(holds: bool, found: str) -> None:
    """ValueError for a message that would break the promise."""
    if not holds:
        raise ValueError(
            f"the server's message does not protect this client ({found}): nothing is sent"
        )
