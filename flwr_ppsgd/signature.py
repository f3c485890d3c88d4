"""A signature on an Order: the holder of the training's key wrote it, and nobody changed w.

Flower authenticates who pushes a message, not what the message says it is: an enrolled node could
send an Order in the server's name. A client that pins the key in its node config refuses it.
"""

import base64
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from flwr_ppsgd.checks import fast_replace
from flwr_ppsgd.wire import Order

KEY = "training.key"  # its name in checkpoint_dir
PUBLIC = "ed25519:"
PURPOSE = b"flwr_ppsgd order\n"  # a signature for anything else is not one for an Order


@dataclass(frozen=True)
class TrainingKey:
    """The key of one training, with which its Orders are signed.

    Args:
        private: the private half.
    """

    private: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        """A key that nobody had before."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @functools.cached_property
    def public(self) -> str:
        """The public half, as clients pin it: ``ed25519:BASE64``."""
        raw = self._key.public_key().public_bytes_raw()
        return PUBLIC + base64.b64encode(raw).decode()

    def sign(self, statement: bytes) -> str:
        """The signature of these bytes, in base64."""
        return base64.b64encode(self._key.sign(statement)).decode()

    @functools.cached_property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.private)


def digest(arrays: Mapping[str, bytes]) -> bytes:
    """SHA-256 over the names and bytes of serialised arrays, in their order."""
    sha = hashlib.sha256()
    for name, data in arrays.items():
        title = name.encode("utf-8", "surrogatepass")
        sha.update(len(title).to_bytes(8) + title)
        sha.update(len(data).to_bytes(8))
        sha.update(data)
    return sha.digest()


def signed_order(
    order: Order, w_digest: bytes, key: TrainingKey, *, kind: str, run: int
) -> dict[str, Any]:
    """The Order as it is sent, with the training's public key and its signature.

    Args:
        order: an Order that is finished but for these two.
        w_digest: ``digest`` of the arrays that travel with it.
        key: the training's key.
        kind: the type of the message that brings it: "train", "evaluate" or "query".
        run: the id of Flower's run.
    """
    flat = fast_replace(order, server_key=key.public, signature="").to_flat()
    return {**flat, "signature": key.sign(_signed_bytes(flat, w_digest, kind, run))}


def verify(
    order: Order, arrays: Mapping[str, bytes], server_key: str, *, kind: str, run: int
) -> bool:
    """Whether this Order was signed for these arrays, this type of message and this run.

    Args:
        order: an Order as it came.
        arrays: the serialised arrays that came with it, by name.
        server_key: the public half that the client's owner pinned.
        kind: the type of the message that brought it.
        run: the id of Flower's run.
    """
    if order.server_key != server_key:
        return False
    try:
        signature = base64.b64decode(order.signature, validate=True)
        statement = _signed_bytes(order.to_flat(), digest(arrays), kind, run)
        public_key(server_key).verify(signature, statement)
    except (ValueError, InvalidSignature):
        return False
    return True


def public_key(text: str) -> Ed25519PublicKey:
    """The public key in ``ed25519:BASE64``; ValueError if the text is no key."""
    if not text.startswith(PUBLIC):
        raise ValueError(f"no key that begins with {PUBLIC}")
    return Ed25519PublicKey.from_public_bytes(
        base64.b64decode(text.removeprefix(PUBLIC), validate=True)
    )


def _signed_bytes(order_flat: Mapping[str, Any], w_digest: bytes, kind: str, run: int) -> bytes:
    """What is signed: the same bytes for the same fields, whatever their order.

    A message of a secure sum is covered by its hash, which is a field.
    """
    fields = {name: value for name, value in order_flat.items() if name != "signature"}
    for name, value in fields.items():
        if isinstance(value, float | bytes):
            fields[name] = value.hex()
    text = json.dumps([kind, run, fields], sort_keys=True)
    return PURPOSE + w_digest + text.encode()
