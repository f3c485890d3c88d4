"""Shamir's secret sharing over a prime field: any ``threshold`` shares give the secret, fewer
nothing.

A secret of 32 bytes is the value at 0 of a random polynomial of degree threshold − 1; the share of
holder i is its value at i + 1.
"""

import functools
import secrets
from collections.abc import Collection, Mapping

PRIME = 2**256 + 297  # the smallest prime above 2^256
SECRET_SIZE = 32  # bytes
SHARE_SIZE = 33


def split(secret: bytes, threshold: int, holders: Collection[int]) -> dict[int, bytes]:
    """A share for each holder.

    Args:
        secret: 32 bytes.
        threshold: the number of shares that give the secret back.
        holders: distinct whole numbers from 0.
    """
    if len(secret) != SECRET_SIZE:
        raise ValueError(f"a secret of {len(secret)} bytes where {SECRET_SIZE} were expected")
    if not 1 <= threshold <= len(holders):
        raise ValueError(f"{len(holders)} holders can never bring {threshold} shares together")
    higher = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients = [*higher, int.from_bytes(secret)]  # the highest power first
    return {holder: _value(coefficients, holder + 1).to_bytes(SHARE_SIZE) for holder in holders}


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, from any ``threshold`` of its shares, by holder.

    ValueError if there are too few, or if they are shares of no secret. Wrong shares mostly give a
    wrong secret: check it against something that is known.
    """
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares where {threshold} are needed")
    holders = tuple(sorted(shares)[:threshold])
    weights = _weights(holders)
    terms = [
        int.from_bytes(shares[holder]) * weights[place] for place, holder in enumerate(holders)
    ]
    secret = sum(terms) % PRIME
    if secret >> (8 * SECRET_SIZE):
        raise ValueError("shares that belong to no secret")
    return secret.to_bytes(SECRET_SIZE)


def _value(coefficients: list[int], at: int) -> int:
    """A polynomial's value, by Horner's rule."""
    value = 0
    for coefficient in coefficients:
        value = (value * at + coefficient) % PRIME
    return value


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
