"""Keys that two clients share, secrets in shares, masks: X25519, HKDF, ChaCha20-Poly1305, Shamir.

Every derived key serves one purpose in one session, so a nonce of zeros is never used twice with
the same key.
"""

import functools
import hashlib
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Self, TypeAlias

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from flwr_ppsgd.noise import AT_ONCE, RandomStream

Words: TypeAlias = NDArray[np.uint64]

KEY_SIZE = 32  # bytes, of every key and seed
HASH_SIZE = 32
TAG_SIZE = 16
SHARE_SIZE = 33
PRIME = 2**256 + 297  # the smallest prime above 2^256
PURPOSE = b"flwr_ppsgd secure sum 2"
NONCE = bytes(12)


# --- keys


@dataclass(frozen=True)
class KeyPair:
    """An X25519 key pair.

    Args:
        private: the private half.
    """

    private: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        """A fresh pair, from the operating system's random numbers."""
        return cls(X25519PrivateKey.generate().private_bytes_raw())

    @functools.cached_property
    def public(self) -> bytes:
        """The public half."""
        return self._key.public_key().public_bytes_raw()

    def secret_with(self, public: bytes) -> bytes:
        """The secret that both owners can compute; ValueError for a key that gives zero."""
        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise ValueError("a public key is invalid: nothing is sent") from None

    @functools.cached_property
    def _key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self.private)


def derive(secret: bytes, *labels: bytes | int) -> bytes:
    """HKDF(secret; labels): another key for every purpose, session and pair."""
    info = _encode(labels)
    return HKDF(algorithm=SHA256(), length=KEY_SIZE, salt=None, info=info).derive(secret)


def labelled_hash(content: bytes, *labels: bytes | int) -> bytes:
    """SHA-256 of a content and its labels."""
    return hashlib.sha256(_encode((*labels, content))).digest()


def _encode(labels: tuple[bytes | int, ...]) -> bytes:
    """Labels as bytes; each with its length, so that no two lists of labels give the same."""
    parts = [PURPOSE]
    for label in labels:
        content = label if isinstance(label, bytes) else b"%d" % label
        parts.append(len(content).to_bytes(4) + content)
    return b"".join(parts)


def encrypt(key: bytes, content: bytes) -> bytes:
    """Encrypt and authenticate a content, under a key that seals nothing else."""
    return ChaCha20Poly1305(key).encrypt(NONCE, content, PURPOSE)


def decrypt(key: bytes, sealed: bytes) -> bytes:
    """The content that ``encrypt`` was given; ValueError if anything was changed."""
    try:
        return ChaCha20Poly1305(key).decrypt(NONCE, sealed, PURPOSE)
    except InvalidTag:
        raise ValueError("a sealed message was changed, or is for somebody else") from None


# --- Shamir's secret sharing


def split(secret: bytes, threshold: int, holders: Collection[int]) -> dict[int, bytes]:
    """A share for each holder; any ``threshold`` shares give the secret, fewer give nothing.

    The secret is the value at 0 of a random polynomial of degree threshold − 1 over a prime field;
    the share of holder i is its value at i + 1.

    Args:
        secret: 32 bytes.
        threshold: the number of shares that give the secret back.
        holders: distinct whole numbers from 0.
    """
    if len(secret) != KEY_SIZE:
        raise ValueError(f"a secret has {KEY_SIZE} bytes, got {len(secret)}")
    if not 1 <= threshold <= len(holders):
        raise ValueError(f"{threshold} shares cannot come from {len(holders)} holders")
    higher = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients = [*higher, int.from_bytes(secret)]  # the highest power first
    shares = {}
    for holder in holders:
        value = 0
        for coefficient in coefficients:  # Horner's rule
            value = (value * (holder + 1) + coefficient) % PRIME
        shares[holder] = value.to_bytes(SHARE_SIZE)
    return shares


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, from any ``threshold`` of its shares, by holder.

    ValueError if there are too few, or if they are shares of no secret. Wrong shares mostly give a
    wrong secret: check it against something that is known.
    """
    if len(shares) < threshold:
        raise ValueError(f"{threshold} shares are needed, got {len(shares)}")
    holders = tuple(sorted(shares)[:threshold])
    secret = 0
    for holder, weight in zip(holders, _weights(holders), strict=True):
        secret += int.from_bytes(shares[holder]) * weight
    secret %= PRIME
    if secret >> (8 * KEY_SIZE):
        raise ValueError("the shares belong to no secret")
    return secret.to_bytes(KEY_SIZE)


@functools.lru_cache(maxsize=256)
def _weights(holders: tuple[int, ...]) -> list[int]:
    """Lagrange's weights at 0: Π_{j≠i} x_j / (x_j − x_i) for x = holder + 1."""
    points = [holder + 1 for holder in holders]
    weights = []
    for own in points:
        above = 1
        below = 1
        for other in points:
            if other != own:
                above = above * other % PRIME
                below = below * (other - own) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights


# --- masks


def add_mask(total: Words, key: bytes, *, sign: int) -> None:
    """Add ±PRG(key), the stream of ChaCha20 as 64-bit words, to ``total`` modulo 2⁶⁴, in place.

    Args:
        total: the words.
        key: of the mask.
        sign: 1 to add the mask, −1 to take it off.
    """
    operation = np.add if sign > 0 else np.subtract
    stream = RandomStream(key)
    space = np.empty(min(AT_ONCE, total.size), np.uint64)
    for start in range(0, total.size, AT_ONCE):
        block = total[start : start + AT_ONCE]
        mask = space[: block.size]
        stream.fill(mask)
        operation(block, mask, out=block)
