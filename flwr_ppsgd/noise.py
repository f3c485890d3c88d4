"""The coins that nobody may predict, and the sum whose rounding gives nothing away.

Adding a floating-point Gaussian to a floating-point sum leaks: the spacing of the result depends on the sum. Here
every contribution is truncated onto the grid g = C·2⁻³², whole multiples of g are summed exactly, and the noise is
rounded to whole multiples too. For x on the grid, x + g·rint(n/g) = g·rint((x+n)/g): a rounding of the ideal output,
which needs no accounting of its own.

What finite precision leaves: a normal is never larger than 13.37 standard deviations, which adds at most
(1 + e^ε)·2⁻¹²⁷ to δ for each coordinate and round (:func:`residual_delta`); below that, each normal carries the
relative error of a few float64 operations, about 2⁻⁵⁰, as if z were wrong in its fifteenth digit.
"""

import hashlib
import math
import secrets

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Release, Vector, clip_scale

GRID_CLIP_MARGIN = 1e-9  # relative; keeps the truncated vector below C in exact integers for any dimension
BLOCK = 1 << 15  # coordinates handled at once: the working set stays in the cache


class Coins:
    """A stream of random bits from ChaCha20 under one key. Make a new one for each round."""

    def __init__(self, key: bytes) -> None:
        self._stream = Cipher(ChaCha20(key, nonce=bytes(16)), mode=None).encryptor()

    @classmethod
    def secret(cls) -> "Coins":
        """Keyed by the operating system; the key is never stored."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def insecure(cls, seed: int, *labels: object) -> "Coins":
        """The same coins for the same seed: for simulation and tests only, it voids the guarantee."""
        return cls(hashlib.sha256(repr(("insecure", seed, *labels)).encode()).digest())

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8").astype(np.uint64, copy=False)

    def uniforms(self, count: int) -> Vector:
        """Uniform on the multiples of 2⁻⁵³ in [0, 1)."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def normals(self, count: int) -> Vector:
        """Standard normals by Box–Muller, a block at a time."""
        out = np.empty(count + count % 2)
        for start in range(0, len(out), BLOCK):
            _box_muller(self, out[start : start + BLOCK])
        return out[:count]


def _box_muller(coins: Coins, out: Vector) -> None:
    """Fill ``out`` (of even length) with √(−2 ln u)·(cos 2πv, sin 2πv).

    Half of the time u = t, else u = 1 − t, where t in (0, ½] has 53 significant bits however small it is: the far tail
    is as fine as the centre. A second word of 64 bits is drawn only for a t so small that the first has too few.
    """
    half = len(out) // 2
    high, angle = coins.words(2 * half).view(np.int64).reshape(2, half)
    sign = high >> 63  # 0, or −1 where u = 1 − t
    bits = high ^ sign
    t = bits.astype(np.float64) * 2.0**-64
    short = np.flatnonzero(bits < 1 << 54)
    t[short] += (coins.words(len(short)) + 0.5) * 2.0**-128
    radius = np.sqrt(-2.0 * _log_of_either(t, -sign.astype(np.float64)))
    turn = (angle.view(np.uint64) >> np.uint64(11)).view(np.int64) * (2.0**-53 * 2.0 * np.pi)
    np.multiply(radius, np.cos(turn), out=out[:half])
    np.multiply(radius, np.sin(turn), out=out[half:])


def _log_of_either(t: Vector, flip: Vector) -> Vector:
    """ln t where ``flip`` is 0, ln(1 − t) where it is 1, both to a few units in the last place.

    For u = 1 − t as rounded, ln(1 − t) = ln u·t/(1 − u) to that precision, since 1 − u is exact.
    """
    u = np.minimum(np.abs(flip - t), 1 - 2.0**-53)
    logs: Vector = np.log(u) * (t / np.abs(flip - u))
    return logs


class GridSum:
    """Σ_i clip(g_i, C) in whole multiples of ``release.grid``: exact, and the same in any order of the replies.

    apart: (count, share) where the last ``count`` coordinates are clipped by themselves, to C·√share, and the rest to
        C·√(1−share); together they still stay within C.
    """

    def __init__(self, size: int, release: Release, apart: tuple[int, float] = (0, 0.0)) -> None:
        self._release = release
        self._multiples = np.zeros(size)  # whole numbers, each below 2^53
        self._main = size - apart[0]
        self._limits = release.clip_norm * math.sqrt(1 - apart[1]), release.clip_norm * math.sqrt(apart[1])

    def add(self, vector: Vector) -> None:
        """Clip, truncate toward zero onto the grid, and add."""
        self._add_part(vector[: self._main], 0, self._limits[0])
        if len(vector) > self._main:
            self._add_part(vector[self._main :], self._main, self._limits[1])

    def _add_part(self, part: Vector, offset: int, limit: float) -> None:
        scale = clip_scale(part, limit, GRID_CLIP_MARGIN) / self._release.grid
        for start in range(0, len(part), BLOCK):
            block = part[start : start + BLOCK] * scale
            self._multiples[offset + start : offset + start + len(block)] += np.trunc(block, out=block)

    def noisy(self, coins: Coins) -> Vector:
        """g·k with k = Σ + rint(z·C·n/g) a vector of whole numbers: what the world gets to see, before D."""
        z = self._release.noise_multiplier
        if z == 0:
            return self._release.grid * self._multiples
        noise = coins.normals(len(self._multiples))
        noise *= self._release.noise_std / self._release.grid
        return self._release.grid * (self._multiples + np.rint(noise, out=noise))


def residual_delta(size: int, rounds: int, epsilon: float) -> float:
    """At most how much the truncated tail of the sampler adds to δ, for ``size`` coordinates and ``rounds`` rounds."""
    return size * rounds * 2.0**-127 * (1 + math.exp(min(epsilon, 600.0)))
