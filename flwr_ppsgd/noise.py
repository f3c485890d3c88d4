"""Random bits that nobody can predict, and a sum whose rounding reveals nothing.

Adding a floating-point Gaussian to a floating-point sum leaks: the spacing of the result depends on
the sum. Here every contribution is truncated onto the grid g = C·2⁻³² (or z·C·2⁻²⁶ if that is
coarser), whole multiples of g are summed exactly, and the noise is rounded to whole multiples too.
For x on the grid, x + g·rint(n/g) = g·rint((x+n)/g): a rounding of the ideal output, which needs no
accounting of its own.

What finite precision leaves: normals are cut off at 14 standard deviations, which adds at most
(1 + e^ε)·2⁻¹⁴⁵ to δ for each coordinate and round (:func:`cut_probability`). Below that each step
of the grid holds 2²⁶ floats or more, an eighth of that in the far tail, one more or less by chance:
its probability is right to about eight digits. By estimate that adds 10⁻¹⁶·a to the Rényi
divergence of order a for each coordinate and round: 10⁻⁶·a for a million coordinates and ten
thousand rounds.
"""

import contextlib
import hashlib
import math
import secrets
import sys
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import (
    LARGEST_NORMAL,
    PrivateMetrics,
    Release,
    Vector,
    clip_scale,
)

GRID_CLIP_MARGIN = 1e-9  # relative; keeps the truncated vector below C in exact integers
ROUNDING = 2.0**-53  # of each term of a norm, which the margin covers besides
# of vectors that can be summed; the sum is in float64
PRECISIONS = (np.dtype(np.float64), np.dtype(np.float32))
AT_ONCE = 1 << 14  # coordinates: their memory stays in the cache, and is not new for each block
ZEROS = memoryview(bytes(8 * AT_ONCE))  # what the cipher turns into random bits
CUT_TAIL = 2.0**-145  # the probability that a normal lies beyond the sampler's cut


class RandomStream:
    """A stream of random bits from ChaCha20 under one key. Make a new one for each round."""

    def __init__(self, key: bytes) -> None:
        cipher = Cipher(ChaCha20(key, nonce=bytes(16)), mode=None)
        self._stream = cipher.encryptor()

    @classmethod
    def secret(cls) -> "RandomStream":
        """Keyed by the operating system; the key is never stored."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def insecure(cls, seed: int, *labels: object) -> "RandomStream":
        """The same bits for the same seed: for simulation and tests, it voids the guarantee."""
        text = repr(("insecure", seed, *labels))
        return cls(hashlib.sha256(text.encode()).digest())

    def fill(self, words: NDArray[np.uint64]) -> None:
        """Overwrite all of them with uniform 64-bit words."""
        for start in range(0, len(words), AT_ONCE):
            block = words[start : start + AT_ONCE]
            self._stream.update_into(ZEROS[: block.nbytes], block.data.cast("B"))
        if sys.byteorder == "big":
            words.byteswap(inplace=True)

    def words(self, count: int) -> NDArray[np.uint64]:
        """Uniform 64-bit words."""
        words = np.empty(count, np.uint64)
        self.fill(words)
        return words

    def uniforms(self, count: int) -> Vector:
        """Uniform on the multiples of 2⁻⁵³ in [0, 1)."""
        uniforms = np.empty(count)
        for start in range(0, count, AT_ONCE):
            block = uniforms[start : start + AT_ONCE]
            words = block.view(np.uint64)  # the random bits lie where the uniforms will
            self.fill(words)
            words >>= 11
            np.multiply(words.view(np.int64), 2.0**-53, out=block)
        return uniforms

    def normals(self, count: int) -> Vector:
        """Standard normals."""
        return _normals(self, count)


def random_stream(seed: int | None, purpose: str, round_: int) -> RandomStream:
    """The random bits of one purpose in one round: secret, or repeatable if there is a seed."""
    if seed is None:
        return RandomStream.secret()
    return RandomStream.insecure(seed, purpose, round_)


def _edges() -> Vector:
    """Layers under f(x) = exp(−x²/2), all of one area: x_0 > x_1 > … > x_256 = 0.

    Layer i reaches to x_i and lies between the heights f(x_i) and f(x_{i+1}). The lowest, i = 0, is
    a rectangle to x_1 and the tail beyond; x_0 is where a rectangle of that area would end.
    """
    height = math.exp(-(TAIL**2) / 2)
    tail_area = math.sqrt(math.pi / 2) * math.erfc(TAIL / math.sqrt(2))
    area = TAIL * height + tail_area
    edges = [area / height, TAIL]
    while len(edges) < LAYERS:
        inner = edges[-1]
        height = math.exp(-(inner**2) / 2) + area / inner
        edges.append(math.sqrt(-2 * math.log(height)))
    return np.array([*edges, 0.0])


LAYERS = 256
TAIL = 3.6541528853610088  # x_1: with 256 layers, the only value for which the last edge is 0
EDGES = _edges()
HEIGHTS = np.exp(-(EDGES**2) / 2)
THICKNESS = np.diff(HEIGHTS)  # of each layer
SPACING = EDGES[:-1] * 2.0**-55  # of the places in a layer, which are −2⁵⁵ … 2⁵⁵ − 1
# at places below this all of a layer is below f
INSIDE = np.floor(EDGES[1:] / EDGES[:-1] * 2.0**55).astype(np.int64)


def _normals(stream: RandomStream, count: int) -> Vector:
    """Marsaglia and Tsang's ziggurat (2000): 8 bits choose the layer, 56 others the place in it.

    Separate bits for layer and place: Doornik (2005). Ninety-nine of a hundred fall where a layer
    is all below the curve and are done. The time that it takes shows how many are not, of all
    coordinates together.
    """
    normals = np.empty(count)
    places = [np.empty(0, np.intp)]
    layers = [np.empty(0, np.int64)]
    for start in range(0, count, AT_ONCE):
        block = normals[start : start + AT_ONCE]
        stream.fill(block.view(np.uint64))
        beyond, own_layers = _place_block(block)
        places.append(start + beyond)
        layers.append(own_layers)
    beyond = np.concatenate(places)
    if len(beyond):
        normals[beyond] = _decide(stream, np.concatenate(layers), normals[beyond])
    return normals


def _place_block(block: Vector) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Turn the random bits that lie in a block's memory into normals.

    Returns which of them fell beyond the inner edge of their layer, and the layers of those.
    """
    words = block.view(np.int64)
    layer = words & (LAYERS - 1)
    place = words >> 8
    np.copyto(block, place)
    block *= SPACING.take(layer)
    np.abs(place, out=place)
    (beyond,) = (place >= INSIDE.take(layer)).nonzero()
    return beyond, layer[beyond]


def _decide(stream: RandomStream, layer: NDArray[np.int64], drawn: Vector) -> Vector:
    """Decide on what fell beyond the inner edge of its layer.

    It stays if a height in its layer is below the curve, else it is drawn again; in the lowest
    layer it becomes the tail.
    """
    height = HEIGHTS.take(layer) + stream.uniforms(len(layer)) * THICKNESS.take(layer)
    curve = np.exp(drawn * drawn * -0.5)
    lowest = layer == 0
    (in_tail,) = lowest.nonzero()
    (again,) = ((height >= curve) & ~lowest).nonzero()
    if len(in_tail):
        drawn[in_tail] = np.copysign(_tail(stream, len(in_tail)), drawn[in_tail])
    if len(again):
        drawn[again] = _normals(stream, len(again))
    return drawn


def _tail(stream: RandomStream, count: int) -> Vector:
    """Beyond TAIL: exponentials e/TAIL above it, each kept with probability exp(−(e/TAIL)²/2).

    Marsaglia 1964.
    """
    halves = stream.words(4 * count).reshape(2, 2, count)  # two exponentials × high and low × count
    along, across = exponentials(halves.swapaxes(0, 1))
    excess: Vector = along / TAIL
    accepted = 2 * across > excess**2
    accepted &= excess <= LARGEST_NORMAL - TAIL
    found = TAIL + excess[accepted]
    missing = count - len(found)
    return np.concatenate([found, _tail(stream, missing)]) if missing else found


def exponentials(halves: NDArray[np.uint64]) -> Vector:
    """−ln u with u = (high and low half)·2⁻¹²⁸: 2 × …, high halves first."""
    high, low = halves.astype(np.float64)
    uniforms = (low + 0.5) * 2.0**-128 + high * 2.0**-64
    return np.asarray(-np.log(uniforms))


class _Part(NamedTuple):
    """A part of the vectors that are summed, which has a bound of its own."""

    place: slice
    limit: float


class GridSum:
    """Σ_i clip(g_i, C) in whole multiples of ``release.grid``.

    Exact, and the same in any order of the replies.

    Args:
        size: the number of coordinates.
        release: C, z and the grid.
        metrics: private measures that follow after the ``size`` coordinates. They are clipped by
            themselves, to C·√ρ, and the rest to C·√(1−ρ): together they stay within C.
    """

    def __init__(self, size: int, release: Release, metrics: PrivateMetrics | None = None) -> None:
        self._release = release
        self._grid = release.grid
        measures = len(metrics.bounds) if metrics else 0
        self.multiples = np.zeros(size + measures)  # the sum so far: whole numbers below 2^53
        self._space = np.empty(min(AT_ONCE, size + measures))
        share = metrics.share if metrics else 0.0
        gradient = _Part(slice(0, size), release.clip_norm * math.sqrt(1 - share))
        own = _Part(slice(size, size + measures), release.clip_norm * math.sqrt(share))
        self._parts = [part for part in (gradient, own) if part.place.start < part.place.stop]

    def add(self, vector: Vector) -> None:
        """Clip, truncate toward zero onto the grid, and add.

        ValueError or FloatingPointError if the vector cannot be added; nothing has changed then.
        """
        expected = self.multiples
        if vector.shape != expected.shape or vector.dtype not in PRECISIONS:
            found = f"{vector.dtype}{vector.shape}"
            raise ValueError(f"a vector of {found} where the sum is of float64{expected.shape}")
        scales = [self._scale(vector[part.place], part) for part in self._parts]
        for part, scale in zip(self._parts, scales, strict=True):
            for start in range(part.place.start, part.place.stop, AT_ONCE):
                end = min(start + AT_ONCE, part.place.stop)
                block = self._space[: end - start]
                np.multiply(vector[start:end], scale, out=block, dtype=np.float64)
                np.trunc(block, out=block)
                multiples = self.multiples[start:end]
                np.add(multiples, block, out=multiples)

    def _scale(self, values: Vector, part: _Part) -> float:
        margin = GRID_CLIP_MARGIN + ROUNDING * len(values)
        scale = clip_scale(values, part.limit, margin)
        if scale == 0.0 and not np.all(np.isfinite(values)):
            raise FloatingPointError("a vector that holds NaN or infinity")
        to_grid = scale / self._grid
        return to_grid if to_grid < math.inf else 0.0

    def noisy(self, stream: RandomStream) -> Vector:
        """g·k with k = Σ + rint(z·C·n/g) a vector of whole numbers.

        This is what the world gets to see, before the division by D.
        """
        grid = self._release.grid
        if self._release.noise_multiplier == 0:
            return grid * self.multiples
        noise = stream.normals(len(self.multiples))
        to_grid = self._release.noise_std / grid
        for start in range(0, len(noise), AT_ONCE):
            block = noise[start : start + AT_ONCE]
            block *= to_grid
            np.rint(block, out=block)
            block += self.multiples[start : start + AT_ONCE]
            block *= grid
        return noise

    def with_share(self, stream: RandomStream) -> NDArray[np.int64]:
        """k = Σ + rint(z·C·n/(√h·g)): a client's own multiples with its share of the noise."""
        words = self.multiples.astype(np.int64)
        if self._release.noise_multiplier == 0:
            return words
        noise = stream.normals(len(words))
        noise *= self._release.share_std / self._release.grid
        words += np.rint(noise, out=noise).astype(np.int64)
        return words


def secure_input(
    vector: Vector | None,
    size: int,
    release: Release,
    metrics: PrivateMetrics | None,
    stream: RandomStream,
) -> NDArray[np.int64]:
    """x_u: one client's bounded vector plus its share of the noise, in whole multiples of the grid.

    Without noise these are the numbers that ``GridSum`` adds up. The sum of rounded shares is that
    of a Gaussian plus uniforms, rounded: post-processing of the ideal one, up to aliasing of order
    exp(−2π²s²) for shares of s ≥ 2²⁰ steps.

    Args:
        vector: gradient and encoded measures; None, NaN or infinity count as zero.
        size: the number of coordinates of w.
        release: C, z, h and the grid.
        metrics: private measures that follow after the ``size`` coordinates.
        stream: a secret one, of this client and this round.
    """
    own = GridSum(size, release, metrics)
    if vector is not None:
        with contextlib.suppress(FloatingPointError):
            own.add(vector)
    return own.with_share(stream)


def cut_probability(size: int, rounds: int, shares: int = 1) -> float:
    """At most the probability that the sampler cuts a tail anywhere: 2⁻¹⁴⁵ per normal.

    Args:
        size: the number of coordinates.
        rounds: the number of rounds.
        shares: the number of independent noises that make up what is charged.
    """
    return shares * size * rounds * CUT_TAIL
