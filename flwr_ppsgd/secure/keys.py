"""Keys that two participants share and nobody else knows: X25519, HKDF, ChaCha20-Poly1305."""

import functools
import hashlib
from dataclasses import dataclass, field
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_SIZE = 32  # bytes, of every key and seed
HASH_SIZE = 32
TAG_SIZE = 16
PURPOSE = b"flwr_ppsgd secure sum 1"
NONCE = bytes(12)  # every derived key seals one message only


@dataclass(frozen=True)
class KeyPair:
    """An X25519 key pair.

    Args:
        private: the private half.
    """

    private: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        """A pair that nobody had before."""
        return cls(X25519PrivateKey.generate().private_bytes_raw())

    @functools.cached_property
    def public(self) -> bytes:
        """The public half."""
        return self._key.public_key().public_bytes_raw()

    def secret_with(self, public: bytes) -> bytes:
        """What both owners can work out and nobody else; ValueError for a key that gives zero."""
        return self._key.exchange(X25519PublicKey.from_public_bytes(public))

    @functools.cached_property
    def _key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self.private)


def derive(secret: bytes, *labels: bytes | int) -> bytes:
    """HKDF(secret; labels): another key for every purpose, session and pair."""
    info = _encoded(labels)
    return HKDF(algorithm=SHA256(), length=KEY_SIZE, salt=None, info=info).derive(secret)


def fingerprint(content: bytes, *labels: bytes | int) -> bytes:
    """SHA-256 of a content and of what it is for."""
    return hashlib.sha256(_encoded((*labels, content))).digest()


def seal(key: bytes, content: bytes) -> bytes:
    """The content, encrypted and authenticated, under a key that seals nothing else."""
    return ChaCha20Poly1305(key).encrypt(NONCE, content, PURPOSE)


def unseal(key: bytes, sealed: bytes) -> bytes:
    """What ``seal`` was given; ValueError if anything was changed."""
    try:
        return ChaCha20Poly1305(key).decrypt(NONCE, sealed, PURPOSE)
    except InvalidTag:
        raise ValueError("a sealed message that was changed, or is for somebody else") from None


def _encoded(labels: tuple[bytes | int, ...]) -> bytes:
    """Labels as bytes, so that different labels never give the same."""
    parts = [PURPOSE]
    for label in labels:
        content = label if isinstance(label, bytes) else b"%d" % label
        parts.append(len(content).to_bytes(4) + content)
    return b"".join(parts)
