"""Public representations Φ(x), in front of a linear model that is solved.

No user's data go into them, so they cost no privacy: whoever knows the settings has the same Φ. A
representation is computed on the device, row by row, from the user's own rows.
"""

import functools
import importlib
import math
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.checks import require
from flwr_ppsgd.learner import generator

Shape: TypeAlias = tuple[int, ...]
Floats: TypeAlias = NDArray[np.float64]

NONE = "none"
RANDOM_CONVOLUTION = "random-convolution"
RANDOM_FOURIER = "random-fourier"
CONVOLUTION_FEATURES = 1000
FOURIER_FEATURES = 300
FILTER = 13  # pixels, in height and width
SHORTEST_SIDE = 7  # pixels, of an image
POOL = 5  # pixels at least, and at most about this many cells along an edge
WORKING_SIDE = 28  # pixels: larger images are averaged down to about this size
LEAST_PIXELS = 144
ROWS_AT_ONCE = 8  # the patches of this many images stay in a processor's cache
ROWS_LOOKED_AT = 500
SMOOTH = 0.7  # neighbours in an image differ by less than this share of what any two pixels do


class Representation(Protocol):
    """Φ: rows of numbers → rows of features. A frozen value, which is public."""

    def widths(self, columns: int) -> tuple[int, ...]:
        """The number of features in each group, for rows of this number of columns."""
        ...

    def __call__(self, x: Floats) -> Floats:
        """Φ of each row of x."""
        ...


@dataclass(frozen=True)
class Unchanged:
    """Φ(x) = x: the columns themselves."""

    def widths(self, columns: int) -> tuple[int, ...]:
        """All columns."""
        return (columns,)

    def __call__(self, x: Floats) -> Floats:
        """x."""
        return np.asarray(x, dtype=np.float64)


@dataclass(frozen=True)
class UnitLength:
    """Φ(x) = x/‖x‖: pixels without the brightness of their image. A row of zeros stays."""

    def widths(self, columns: int) -> tuple[int, ...]:
        """All columns."""
        return (columns,)

    def __call__(self, x: Floats) -> Floats:
        """Rows of norm 1."""
        rows = np.asarray(x, dtype=np.float64)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.asarray(rows / np.where(norms > 0, norms, 1.0))


@dataclass(frozen=True)
class RandomConvolution:
    """Random Gabor filters of an image: |response| − t, its positive part, averaged in cells.

    A filter is a wave under a Gaussian window of 13 × 13 pixels, mean zero and unit norm; its
    direction, wavelength, window and phase are drawn. t is the root mean square of all responses of
    the image. An image's features are divided by their norm. So neither brightness, nor contrast,
    nor units matter. With several channels each filter sees a random direction of colour.

    Args:
        features: about how many; a whole number of filters is taken.
        seed: of the filters, 0 or more. Public.
        shape: of an image: (height, width) or (height, width, channels); () is a square one.
    """

    features: int = CONVOLUTION_FEATURES
    seed: int = 0
    shape: Shape = ()

    def __post_init__(self) -> None:
        _check_count(self.features)

    def widths(self, columns: int) -> tuple[int, ...]:
        """Filters × cells."""
        height, width, _ = self._small(columns)
        return (_cells(height) * _cells(width) * self._filters(columns).shape[1],)

    def __call__(self, x: Floats) -> Floats:
        """Rows × features, of images as rows of pixels."""
        columns = x.shape[1]
        filters = self._filters(columns)
        parts = []
        for start in range(0, len(x), ROWS_AT_ONCE):
            images = self._images(x[start : start + ROWS_AT_ONCE])
            parts.append(_pooled(images, filters))
        if not parts:
            return np.zeros((0, sum(self.widths(columns))))
        features = np.concatenate(parts).astype(np.float64)
        norms = np.linalg.norm(features, axis=1, keepdims=True)
        return features / np.where(norms > 0, norms, 1.0)

    def network(self, outputs: int) -> Any:
        """A torch module: Φ under a linear layer ``head`` of its own, which starts at zero.

        Args:
            outputs: the number of classes, or 1.
        """
        from flwr_ppsgd.models.backbone import OnImages

        remedy = "such as shape=(28, 28), or (32, 32, 3) with channels"
        require(bool(self.shape), "a network needs the images' shape", self.shape, remedy)
        return OnImages(self, outputs)

    def _images(self, x: Floats) -> NDArray[np.float32]:
        """n × height × width × channels, on a scale of 1, averaged down to the working size."""
        full = image_shape(self.shape, x.shape[1])
        largest = abs(x).max(axis=1, keepdims=True)
        unit = x / np.where(largest > 0, largest, 1.0)
        factor = _factor(full)
        height, width, channels = self._small(x.shape[1])
        images = unit.reshape(len(x), *full)[:, : height * factor, : width * factor]
        cells = images.reshape(len(x), height, factor, width, factor, channels)
        return np.asarray(cells.mean(axis=(2, 4)), dtype=np.float32)

    def _small(self, columns: int) -> tuple[int, int, int]:
        """Height, width and channels at the working size."""
        height, width, channels = image_shape(self.shape, columns)
        factor = _factor((height, width, channels))
        return height // factor, width // factor, channels

    def _filters(self, columns: int) -> NDArray[np.float32]:
        """(13·channels·13) × filters."""
        height, width, channels = self._small(columns)
        count = max(1, round(self.features / (_cells(height) * _cells(width))))
        return _gabor_filters(self.seed, channels, count)


@functools.lru_cache(maxsize=8)
def _gabor_filters(seed: int, channels: int, count: int) -> NDArray[np.float32]:
    """cos(2π·position/wavelength + phase) under a window: (across·channels·down) × filters."""
    drawn = np.random.default_rng([seed, FILTER, 9]).random((count, 4)).T
    direction = math.pi * drawn[0]
    wavelength = 3 + 7 * drawn[1]
    deviation = 0.7 * FILTER * (0.25 + 0.25 * drawn[2])
    phase = 2 * math.pi * drawn[3]
    down, across = np.mgrid[:FILTER, :FILTER][:, :, :, None] - FILTER // 2
    position = across * np.cos(direction) + down * np.sin(direction)
    window = np.exp(-(across**2 + down**2) / (2 * deviation**2))
    waves = window * np.cos(2 * math.pi * position / wavelength + phase)
    waves -= waves.mean(axis=(0, 1))
    waves /= np.sqrt((waves**2).sum(axis=(0, 1)))
    # down × across × filters, brought to across × channels × down × filters
    filters = waves.transpose(1, 0, 2)[:, None] * _colours(seed, channels, count)[:, None]
    return np.asarray(filters.reshape(-1, count), dtype=np.float32)


def _colours(seed: int, channels: int, count: int) -> Floats:
    """Channels × filters: how much each filter sees of each channel, of unit norm."""
    if channels == 1:
        return np.ones((1, count))
    drawn = np.random.default_rng([seed, FILTER, 9, channels]).normal(size=(count, channels)).T
    return np.asarray(drawn / np.linalg.norm(drawn, axis=0))


def _factor(shape: tuple[int, int, int]) -> int:
    """By how much an image is averaged down."""
    return max(1, min(shape[:2]) // WORKING_SIDE)


def _cell_side(length: int) -> int:
    """The side of a cell along an edge: 5 pixels, or a fifth of the edge if that is more."""
    return min(length, max(POOL, length // POOL))


def _cells(length: int) -> int:
    """The number of cells along an edge; the pixels that are left over at its end are not used."""
    return length // _cell_side(length)


def _pooled(images: NDArray[np.float32], filters: NDArray[np.float32]) -> NDArray[np.float32]:
    """n × (cells·filters); the pixels at an image's edge are repeated beyond it."""
    count, height, width, _ = images.shape
    responses = np.abs(_patches(images) @ filters).reshape(count, -1)
    mean_squares = np.einsum("ij,ij->i", responses, responses) / responses.shape[1]
    responses -= np.sqrt(mean_squares)[:, None]
    np.maximum(responses, 0.0, out=responses)
    down, across = _cells(height), _cells(width)
    tall, wide = _cell_side(height), _cell_side(width)
    maps = responses.reshape(count, height, width, -1)[:, : down * tall, : across * wide]
    cells = maps.reshape(count, down, tall, across, wide, -1)
    return np.asarray(cells.mean(axis=(2, 4)).reshape(count, -1))


def _patches(images: NDArray[np.float32]) -> NDArray[np.float32]:
    """A row of 13·channels·13 numbers, across and then down, around each pixel.

    Windows are taken down first: what a patch holds then lies side by side in memory.
    """
    count, height, width, channels = images.shape
    margin = FILTER // 2
    edges = ((0, 0), (margin, margin), (margin, margin), (0, 0))
    padded = np.pad(images, edges, mode="edge")
    tall = np.lib.stride_tricks.sliding_window_view(padded, FILTER, axis=1)
    lines = tall.reshape(count, height, -1)
    step = channels * FILTER
    wide = np.lib.stride_tricks.sliding_window_view(lines, FILTER * step, axis=2)
    return wide[:, :, ::step].reshape(count * height * width, FILTER * step)


@dataclass(frozen=True)
class RandomFourier:
    """Random Fourier features of a table, beside its columns: √(2d/D)·cos(Ωᵀx + b).

    Ω ~ N(0, 1/d) and b is uniform, for d columns and D features: a Gaussian kernel for columns on a
    scale of about 1. Together the features are as long as a row of such columns.

    Args:
        features: D.
        seed: of Ω and b. Public.
    """

    features: int = FOURIER_FEATURES
    seed: int = 0

    def __post_init__(self) -> None:
        _check_count(self.features)

    def widths(self, columns: int) -> tuple[int, ...]:
        """The columns, and the features beside them."""
        return (columns, self.features)

    def __call__(self, x: Floats) -> Floats:
        """Rows × (d + D)."""
        columns = x.shape[1]
        directions, phases = _drawn_waves(self.seed, columns, self.features)
        size = math.sqrt(2 * columns / self.features)
        return np.hstack([x, size * np.cos(x @ directions + phases)])


@functools.lru_cache(maxsize=8)
def _drawn_waves(seed: int, columns: int, features: int) -> tuple[Floats, Floats]:
    source = generator("random-fourier", seed)
    directions = source.normal(size=(columns, features)) / math.sqrt(columns)
    return directions, source.uniform(0, 2 * math.pi, features)


@dataclass(frozen=True)
class Backbone:
    """A frozen torch network, such as a pretrained one: its outputs are the features.

    Args:
        factory: "module:function" that returns an ``nn.Module``, the same for everyone.
        shape: of a row as the network takes it, images as (height, width, channels), which become
            channels × height × width; () passes rows on as they are.
    """

    factory: str
    shape: Shape = ()

    def widths(self, columns: int) -> tuple[int, ...]:
        """The number of the network's outputs."""
        return (int(self(np.zeros((1, columns))).shape[1]),)

    def __call__(self, x: Floats) -> Floats:
        """Rows × outputs."""
        from flwr_ppsgd.models.backbone import frozen_outputs

        if len(self.shape) in (2, 3):
            height, width, channels = image_shape(self.shape, x.shape[1])
            x = x.reshape(len(x), height, width, channels).transpose(0, 3, 1, 2)
        return frozen_outputs(_module_of(self.factory), x)


@functools.lru_cache(maxsize=4)
def _module_of(factory: str) -> Any:
    module, _, name = factory.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"representation={factory!r} cannot be loaded ({error}): name a function that returns "
            "a torch module, such as mypackage.networks:backbone"
        ) from None
    return made()


@dataclass(frozen=True)
class Stacked:
    """Several representations side by side; w is then the concatenation of their heads."""

    parts: tuple[Representation, ...]

    def widths(self, columns: int) -> tuple[int, ...]:
        """Those of all parts."""
        return tuple(width for part in self.parts for width in part.widths(columns))

    def __call__(self, x: Floats) -> Floats:
        """Rows × all features."""
        return np.hstack([part(x) for part in self.parts])


def representation_of(
    names: str, features: int | None = None, seed: int = 0, shape: Shape = ()
) -> Representation | None:
    """The representation of these names; None if rows stay as they are.

    Args:
        names: "none", "random-convolution", "random-fourier", "module:factory"; or several of them,
            separated by commas.
        features: how many, of each that is random; None is its own default.
        seed: of those that are random.
        shape: of a row, if it is known.
    """
    parts = [_one(name.strip(), features, seed, shape) for name in names.split(",")]
    if parts == [Unchanged()]:
        return None
    return parts[0] if len(parts) == 1 else Stacked(tuple(parts))


def _one(name: str, features: int | None, seed: int, shape: Shape) -> Representation:
    if name == NONE:
        return Unchanged()
    if name == RANDOM_CONVOLUTION:
        return RandomConvolution(features or CONVOLUTION_FEATURES, seed, shape)
    if name == RANDOM_FOURIER:
        return RandomFourier(features or FOURIER_FEATURES, seed)
    if ":" in name:
        return Backbone(name, shape)
    raise ValueError(
        f"representation must be {NONE}, {RANDOM_CONVOLUTION}, {RANDOM_FOURIER} or module:factory, "
        f"got {name!r}: choose one, or several separated by commas"
    )


def image_shape(shape: Shape, columns: int) -> tuple[int, int, int]:
    """(height, width, channels) of a row of pixels; a square of one channel if nobody said."""
    if not shape:
        side = math.isqrt(columns)
        shape = (side, side)
    if len(shape) == 2:
        shape = (*shape, 1)
    if len(shape) != 3 or math.prod(shape) != columns:
        raise ValueError(
            f"{RANDOM_CONVOLUTION} is for images, and a row of {columns} columns is none of shape "
            f"{shape}: use representation = {NONE!r}, or give images of one shape"
        )
    height, width, channels = shape
    return height, width, channels


def looks_like_images(x: Any, shape: Shape = ()) -> bool:
    """Whether rows are images: their shape says so, or a square number of columns on one scale.

    Without a shape the columns must be 144 or more, their values from 0 to 255, and neighbours in
    both directions must be alike, as tables of the same size are not.

    Args:
        x: rows × columns as they are stored; the first 500 rows are looked at.
        shape: of a row, if it is known.
    """
    if shape:
        return len(shape) in (2, 3) and min(shape[:2]) >= SHORTEST_SIDE
    columns = int(x.shape[1])
    side = math.isqrt(columns)
    if columns < LEAST_PIXELS or side * side != columns or hasattr(x, "toarray"):
        return False
    some = np.asarray(x[:ROWS_LOOKED_AT], dtype=np.float64)
    if not (np.isfinite(some).all() and some.min() >= 0 and some.max() <= 255):
        return False
    images = some.reshape(-1, side, side)
    any_two = abs(images - np.roll(images, (side // 2, side // 3), axis=(1, 2))).mean()
    across = abs(np.diff(images, axis=2)).mean()
    down = abs(np.diff(images, axis=1)).mean()
    return bool(max(across, down) < SMOOTH * any_two)


def _check_count(features: int) -> None:
    require(features >= 1, "the number of features must be at least 1", features, "raise it")
