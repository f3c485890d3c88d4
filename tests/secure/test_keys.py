"""Keys of pairs, and masks from them."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from flwr_ppsgd.secure.keys import KeyPair, derive, fingerprint, seal, unseal
from flwr_ppsgd.secure.masks import BLOCK, add_mask, subtract_mask


def test_two_owners_share_a_secret_and_a_third_does_not() -> None:
    one, other, third = (KeyPair.new() for _ in range(3))
    assert one.secret_with(other.public) == other.secret_with(one.public)
    assert one.secret_with(other.public) != third.secret_with(other.public)


def test_a_key_that_gives_everybody_the_same_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="shared key"):
        KeyPair.new().secret_with(bytes(32))


def test_private_keys_are_never_shown() -> None:
    pair = KeyPair.new()
    assert str(pair.private) not in repr(pair)


def test_every_label_gives_another_key() -> None:
    labels = [(b"ab",), (b"a", b"b"), (b"ab", 1), (b"ab", 11), (b"ab", 1, 1), (b"ab1",), ()]
    assert len({derive(bytes(32), *each) for each in labels}) == len(labels)
    assert len({fingerprint(b"x", *each) for each in labels}) == len(labels)


def test_a_sealed_message_cannot_be_changed_or_opened_by_others() -> None:
    sealed = seal(bytes(32), b"shares")
    assert unseal(bytes(32), sealed) == b"shares"
    assert b"shares" not in sealed
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 128
        with pytest.raises(ValueError, match="changed"):
            unseal(bytes(32), bytes(changed))
    with pytest.raises(ValueError, match="for somebody else"):
        unseal(b"\x01" * 32, sealed)


@pytest.mark.parametrize("size", [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_a_mask_is_the_stream_of_chacha20_and_comes_off_again(size: int) -> None:
    key = bytes(range(32))
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * size))
    start = np.arange(size, dtype=np.uint64)
    total = start.copy()
    add_mask(total, key)
    assert np.array_equal(total, start + np.frombuffer(stream, "<u8"))
    subtract_mask(total, key)
    assert np.array_equal(total, start)


def test_the_bits_of_a_mask_are_fair() -> None:
    """Each of the 64 bits of a word is set in half of the words, within 5 standard errors."""
    words = np.zeros(100_000, np.uint64)
    add_mask(words, derive(b"seed", b"test"))
    for bit in range(64):
        share = float(((words >> np.uint64(bit)) & np.uint64(1)).mean())
        assert abs(share - 0.5) < 5 * 0.5 / len(words) ** 0.5
