"""Keys of pairs, sealed messages, secrets in shares, masks."""

import itertools
import secrets

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from hypothesis import given
from hypothesis import strategies as st

from flwr_ppsgd.noise import AT_ONCE
from flwr_ppsgd.secure.crypto import (
    KEY_SIZE,
    PRIME,
    SHARE_SIZE,
    KeyPair,
    add_mask,
    decrypt,
    derive,
    encrypt,
    join,
    labelled_hash,
    split,
)


def test_two_owners_share_a_secret_and_a_third_does_not() -> None:
    one, other, third = (KeyPair.new() for _ in range(3))
    assert one.secret_with(other.public) == other.secret_with(one.public)
    assert one.secret_with(other.public) != third.secret_with(other.public)


def test_a_key_that_gives_everybody_the_same_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="public key is invalid"):
        KeyPair.new().secret_with(bytes(32))


def test_every_label_gives_another_key() -> None:
    labels = [(b"ab",), (b"a", b"b"), (b"ab", 1), (b"ab", 11), (b"ab", 1, 1), (b"ab1",), ()]
    assert len({derive(bytes(32), *each) for each in labels}) == len(labels)
    assert len({labelled_hash(b"x", *each) for each in labels}) == len(labels)


def test_a_sealed_message_cannot_be_changed_or_opened_by_others() -> None:
    sealed = encrypt(bytes(32), b"shares")
    assert decrypt(bytes(32), sealed) == b"shares"
    assert b"shares" not in sealed
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 128
        with pytest.raises(ValueError, match="changed"):
            decrypt(bytes(32), bytes(changed))
    with pytest.raises(ValueError, match="for somebody else"):
        decrypt(b"\x01" * 32, sealed)


@pytest.mark.parametrize("size", [0, 1, 7, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE + 5])
def test_a_mask_is_the_stream_of_chacha20_and_comes_off_again(size: int) -> None:
    key = bytes(range(32))
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * size))
    start = np.arange(size, dtype=np.uint64)
    total = start.copy()
    add_mask(total, key, sign=1)
    assert np.array_equal(total, start + np.frombuffer(stream, "<u8"))
    add_mask(total, key, sign=-1)
    assert np.array_equal(total, start)


# --- shares of a secret


def test_the_modulus_is_the_smallest_prime_above_2_to_the_256() -> None:
    """Miller and Rabin's test, 64 random bases: a composite passes with probability 4⁻⁶⁴."""
    assert not any(_probably_prime(number) for number in range(2**256 + 1, PRIME))
    assert _probably_prime(PRIME)


def _probably_prime(number: int) -> bool:
    odd = number - 1
    twos = 0
    while odd % 2 == 0:
        odd //= 2
        twos += 1
    for _ in range(64):
        value = pow(secrets.randbelow(number - 3) + 2, odd, number)
        if value in (1, number - 1):
            continue
        for _ in range(twos - 1):
            value = value * value % number
            if value == number - 1:
                break
        else:
            return False
    return True


@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.integers(0, 4))
def test_any_threshold_shares_give_the_secret(secret: bytes, threshold: int, more: int) -> None:
    holders = [3 * place for place in range(threshold + more)]
    shares = split(secret, threshold, holders)
    assert all(len(share) == SHARE_SIZE for share in shares.values())
    for some in itertools.combinations(holders, threshold):
        assert join({holder: shares[holder] for holder in some}, threshold) == secret


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_the_smallest_and_the_largest_secret(secret: bytes) -> None:
    assert join(split(secret, 2, [0, 1, 2]), 2) == secret


def test_one_share_less_fits_every_secret() -> None:
    """Any value at 0 and t − 1 shares define a polynomial: they exclude no secret."""
    shares = split(secrets.token_bytes(KEY_SIZE), 3, [0, 1, 2])
    two = {holder: int.from_bytes(shares[holder]) for holder in (0, 1)}
    for other in (b"\x00" * 32, b"\x01" * 32, secrets.token_bytes(32)):
        # the third share that would make ``other`` the secret, from Lagrange's formula at x = 3
        value = int.from_bytes(other) - 3 * two[0] + 3 * two[1]
        forged = (value % PRIME).to_bytes(SHARE_SIZE)
        assert join({0: shares[0], 1: shares[1], 2: forged}, 3) == other


def test_shares_are_uniform() -> None:
    """The top byte of a share of one fixed secret: χ² with 255 degrees of freedom."""
    found = [0] * 256
    for _ in range(100):
        for share in split(bytes(32), 2, range(50)).values():
            found[share[1]] += 1
    expected = sum(found) / 256
    statistic = sum((count - expected) ** 2 / expected for count in found)
    assert abs(statistic - 255) < 6 * (2 * 255) ** 0.5


def test_too_few_shares_are_refused() -> None:
    shares = split(bytes(32), 3, [0, 1, 2, 3])
    with pytest.raises(ValueError, match="3 shares are needed, got 2"):
        join({0: shares[0], 1: shares[1]}, 3)
    with pytest.raises(ValueError, match="3 shares cannot come from 2 holders"):
        split(bytes(32), 3, [0, 1])
    with pytest.raises(ValueError, match="32 bytes, got 31"):
        split(bytes(31), 1, [0])


def test_wrong_shares_never_give_the_secret_unnoticed() -> None:
    """Either an error, or another secret, which a hash then shows."""
    secret = secrets.token_bytes(32)
    shares = split(secret, 2, [0, 1])
    for place in range(SHARE_SIZE):
        wrong = bytearray(shares[1])
        wrong[place] ^= 1
        try:
            found = join({0: shares[0], 1: bytes(wrong)}, 2)
        except ValueError:
            continue
        assert found != secret
