"""What travels in the four exchanges of a secure sum, each message as bytes.

A participant is a number from 0, its place in this round. Whatever cannot be read is a ValueError:
a message comes from somebody else.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from flwr_ppsgd.secure.keys import HASH_SIZE, KEY_SIZE, TAG_SIZE, fingerprint
from flwr_ppsgd.secure.shamir import SHARE_SIZE

MOST_PARTICIPANTS = 1 << 20
SEALED_SIZE = 2 * SHARE_SIZE + TAG_SIZE
_PLACE = struct.Struct(">I")
_TWO = struct.Struct(">II")


@dataclass(frozen=True)
class PublicKeys:
    """Exchange 1, up: two fresh public keys of one participant.

    Args:
        channel: for messages to this participant that the server cannot read.
        mask: for the masks that it shares with its neighbours.
    """

    channel: bytes
    mask: bytes

    def to_bytes(self) -> bytes:
        return self.channel + self.mask

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        _require_size(data, 2 * KEY_SIZE)
        return cls(data[:KEY_SIZE], data[KEY_SIZE:])


@dataclass(frozen=True)
class Roster:
    """Exchange 2, down: who takes part, as far as one participant needs to know.

    Args:
        place: the participant's own number.
        participants: n, those who sent keys.
        neighbours: the keys of those with whom it shares masks, and who hold its shares.
    """

    place: int
    participants: int
    neighbours: Mapping[int, PublicKeys]

    def to_bytes(self) -> bytes:
        keys = {place: keys.to_bytes() for place, keys in self.neighbours.items()}
        return _TWO.pack(self.place, self.participants) + packed(keys)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        place, participants = _TWO.unpack(_cut(data, _TWO.size))
        _require(participants <= MOST_PARTICIPANTS, f"{participants} participants")
        _require(place < participants, f"place {place} among {participants} participants")
        keys = unpacked(data[_TWO.size :], 2 * KEY_SIZE, participants)
        _require(place not in keys, "a participant that is its own neighbour")
        neighbours = {other: PublicKeys.from_bytes(pair) for other, pair in keys.items()}
        return cls(place, participants, neighbours)


@dataclass(frozen=True)
class Portion:
    """What one participant gives to one share-holder.

    Args:
        sealed: its two shares, which only the holder can read.
        seed_hash: of the share of the seed, for whoever gets to see it.
        key_hash: of the share of the mask key.
    """

    sealed: bytes
    seed_hash: bytes
    key_hash: bytes


@dataclass(frozen=True)
class Shares:
    """Exchange 2, up: the shares of one participant's seed and mask key.

    Args:
        seed_hash: of its seed.
        portions: one for each neighbour.
    """

    seed_hash: bytes
    portions: Mapping[int, Portion]

    def to_bytes(self) -> bytes:
        parts = {
            place: portion.sealed + portion.seed_hash + portion.key_hash
            for place, portion in self.portions.items()
        }
        return self.seed_hash + packed(parts)

    @classmethod
    def from_bytes(cls, data: bytes, participants: int) -> Self:
        seed_hash = _cut(data, HASH_SIZE)
        width = SEALED_SIZE + 2 * HASH_SIZE
        parts = unpacked(data[HASH_SIZE:], width, participants)
        key_hash = SEALED_SIZE + HASH_SIZE
        portions = {
            place: Portion(part[:SEALED_SIZE], part[SEALED_SIZE:key_hash], part[key_hash:])
            for place, part in parts.items()
        }
        return cls(seed_hash, portions)


@dataclass(frozen=True)
class Partners:
    """Exchange 3, down: whose shares arrived, and those for one participant.

    Args:
        members: U₂.
        sealed: from each neighbour in it.
    """

    members: frozenset[int]
    sealed: Mapping[int, bytes]

    def to_bytes(self, participants: int) -> bytes:
        return bitmap(self.members, participants) + packed(self.sealed)

    @classmethod
    def from_bytes(cls, data: bytes, participants: int) -> Self:
        end = _bitmap_size(participants)
        members = members_of(_cut(data, end), participants)
        return cls(members, unpacked(data[end:], SEALED_SIZE, participants))


@dataclass(frozen=True)
class Revealed:
    """Exchange 4, up: one share for each neighbour in U₂.

    Args:
        shares: of the seed of those who survived, of the mask key of the others.
    """

    shares: Mapping[int, bytes]

    def to_bytes(self) -> bytes:
        return packed(self.shares)

    @classmethod
    def from_bytes(cls, data: bytes, participants: int) -> Self:
        return cls(unpacked(data, SHARE_SIZE, participants))


def bitmap(members: Iterable[int], participants: int) -> bytes:
    """A set of participants, one bit for each of all."""
    bits = sum(1 << place for place in members)
    return bits.to_bytes(_bitmap_size(participants), "little")


def members_of(data: bytes, participants: int) -> frozenset[int]:
    """The set that ``bitmap`` gave."""
    _require_size(data, _bitmap_size(participants))
    bits = int.from_bytes(data, "little")
    _require(bits >> participants == 0, f"a member beyond {participants} participants")
    places = (place for place, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")
    return frozenset(places)


def hash_of(members: Iterable[int], participants: int) -> bytes:
    """Binds a mask to the set that it is made for."""
    return fingerprint(bitmap(members, participants), b"members", participants)


def packed(parts: Mapping[int, bytes]) -> bytes:
    """Parts of one size by place, in ascending order."""
    return b"".join(_PLACE.pack(place) + parts[place] for place in sorted(parts))


def unpacked(data: bytes, width: int, participants: int) -> dict[int, bytes]:
    """What ``packed`` was given."""
    step = _PLACE.size + width
    _require(len(data) % step == 0, f"{len(data)} bytes in parts of {step}")
    parts = {}
    last = -1
    for start in range(0, len(data), step):
        (place,) = _PLACE.unpack_from(data, start)
        _require(last < place < participants, f"place {place} after {last} of {participants}")
        parts[place] = data[start + _PLACE.size : start + step]
        last = place
    return parts


def _bitmap_size(participants: int) -> int:
    return (participants + 7) // 8


def _cut(data: bytes, size: int) -> bytes:
    _require(len(data) >= size, f"{len(data)} bytes where at least {size} were expected")
    return data[:size]


def _require_size(data: bytes, size: int) -> None:
    _require(len(data) == size, f"{len(data)} bytes where {size} were expected")


def _require(holds: bool, found: str) -> None:
    if not holds:
        raise ValueError(f"a message of a secure sum that cannot be read: {found}")
