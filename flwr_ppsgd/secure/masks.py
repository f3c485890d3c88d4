"""Masks: streams of ChaCha20 as 64-bit words, added modulo 2⁶⁴."""

from typing import TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]

BLOCK = 1 << 15  # words at once: the working set stays in the cache
ZEROS = bytes(8 * BLOCK)


def add_mask(total: Words, key: bytes) -> None:
    """Add the mask of a key to ``total``, in place."""
    _apply(np.add, total, key)


def subtract_mask(total: Words, key: bytes) -> None:
    """Take the mask of a key from ``total``, in place."""
    _apply(np.subtract, total, key)


def _apply(operation: np.ufunc, total: Words, key: bytes) -> None:
    stream = Cipher(ChaCha20(key, nonce=bytes(16)), mode=None).encryptor()
    buffer = np.empty(min(BLOCK, total.size), dtype="<u8")
    for start in range(0, total.size, BLOCK):
        block = total[start : start + BLOCK]
        words = buffer[: block.size]
        stream.update_into(ZEROS[: words.nbytes], words.view(np.uint8).data)
        operation(block, words, out=block)
