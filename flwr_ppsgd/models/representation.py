"""Public representations Φ(x), in front of a linear model that is solved.

No user's data go into them, so they cost no privacy: everyone with the same settings has the same
Φ. A representation is computed on the device, row by row, from the user's own rows.
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
from flwr_ppsgd.models.solve import one_blas_thread

Shape: TypeAlias = tuple[int, ...]
Floats: TypeAlias = NDArray[np.float64]
Singles: TypeAlias = NDArray[np.float32]

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
IMAGES_AT_ONCE = 16  # the responses of this many images stay in a processor's cache
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
        height, width, _ = self._working_shape(columns)
        return (_cells(height) * _cells(width) * self._filters(columns),)

    def __call__(self, x: Floats) -> Floats:
        """Rows × features, of images as rows of pixels."""
        height, _, channels = self._working_shape(x.shape[1])
        across, down = _gabor_factors(self.seed, channels, self._filters(x.shape[1]))
        bands = _bands(down, height)
        features = np.zeros((len(x), sum(self.widths(x.shape[1]))))
        with one_blas_thread():
            for start in range(0, len(x), IMAGES_AT_ONCE):
                images = self._images(x[start : start + IMAGES_AT_ONCE])
                responses = _responses(images, across, bands)
                features[start : start + IMAGES_AT_ONCE] = _pooled(responses)
        norms = np.linalg.norm(features, axis=1, keepdims=True)
        return features / np.where(norms > 0, norms, 1.0)

    def network(self, outputs: int) -> Any:
        """A torch module: Φ under a linear layer ``head`` of its own, which starts at zero.

        Args:
            outputs: the number of classes, or 1.
        """
        from flwr_ppsgd.models.torch_model import OnImages

        remedy = "such as shape=(28, 28), or (32, 32, 3) with channels"
        require(bool(self.shape), "a network needs the images' shape", self.shape, remedy)
        return OnImages(self, outputs)

    def _images(self, x: Floats) -> Singles:
        """Height × width × channels × n, on a scale of 1, averaged down to the working size."""
        full = image_shape(self.shape, x.shape[1])
        largest = abs(x).max(axis=1, keepdims=True)
        unit = x / np.where(largest > 0, largest, 1.0)
        factor = _shrink_factor(full)
        height, width, channels = self._working_shape(x.shape[1])
        images = unit.reshape(len(x), *full)[:, : height * factor, : width * factor]
        blocks = images.reshape(len(x), height, factor, width, factor, channels)
        return np.asarray(blocks.mean(axis=(2, 4)).transpose(1, 2, 3, 0), dtype=np.float32)

    def _working_shape(self, columns: int) -> tuple[int, int, int]:
        """Height, width and channels at the working size."""
        height, width, channels = image_shape(self.shape, columns)
        factor = _shrink_factor((height, width, channels))
        return height // factor, width // factor, channels

    def _filters(self, columns: int) -> int:
        """The number of filters."""
        height, width, _ = self._working_shape(columns)
        return max(1, round(self.features / (_cells(height) * _cells(width))))


@functools.lru_cache(maxsize=8)
def _gabor_factors(seed: int, channels: int, count: int) -> tuple[Singles, Singles]:
    """Each filter as a sum of three products, of a function of the column and one of the row.

    cos(u + v) = cos u·cos v − sin u·sin v with u along the row and v down the column, a Gaussian
    window is such a product by itself, and the mean that is subtracted is a constant. Returns the
    functions of the column, filters × 3 × 13·channels, and those of the row, filters × 3 × 13.
    """
    drawn = np.random.default_rng([seed, FILTER, 9]).random((count, 4))
    direction = math.pi * drawn[:, :1]
    wavelength = 3 + 7 * drawn[:, 1:2]
    deviation = 0.7 * FILTER * (0.25 + 0.25 * drawn[:, 2:3])
    phase = 2 * math.pi * drawn[:, 3:]
    position = np.arange(FILTER) - FILTER // 2
    window = np.exp(-(position**2) / (2 * deviation**2))
    u = 2 * math.pi * position * np.cos(direction) / wavelength + phase
    v = 2 * math.pi * position * np.sin(direction) / wavelength
    constant = np.ones_like(u)
    across = np.stack([window * np.cos(u), -window * np.sin(u), constant], axis=1)
    down = np.stack([window * np.cos(v), window * np.sin(v), 0 * constant], axis=1)
    mean = np.einsum("fka,fkd->f", across, down) / FILTER**2
    down[:, 2] = -mean[:, None]
    filters = np.einsum("fka,fkd->fad", across, down)
    down /= np.linalg.norm(filters, axis=(1, 2))[:, None, None]
    coloured = across[:, :, :, None] * _colours(seed, channels, count)[:, None, None, :]
    across = coloured.reshape(count, 3, FILTER * channels)
    return across.astype(np.float32), down.astype(np.float32)


def _colours(seed: int, channels: int, count: int) -> Floats:
    """Filters × channels: how much each filter sees of each channel, of unit norm."""
    if channels == 1:
        return np.ones((count, 1))
    drawn = np.random.default_rng([seed, FILTER, 9, channels]).normal(size=(count, channels))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True))


def _bands(down: Singles, height: int) -> Singles:
    """The functions of the row as matrices, filters × height × 3·height.

    Line r of a matrix holds the weights of all rows of an image in the response of row r; the first
    and the last row stand for those beyond the edge.
    """
    count = len(down)
    bands = np.zeros((count, height, 3, height), dtype=np.float32)
    rows = np.arange(height)
    for tap in range(FILTER):
        seen = np.clip(rows + tap - FILTER // 2, 0, height - 1)
        bands[:, rows, :, seen] += down[:, :, tap]
    return bands.reshape(count, height, 3 * height)


def _responses(images: Singles, across: Singles, bands: Singles) -> Singles:
    """Filters × height × width × n; the pixels at an image's edge are repeated beyond it."""
    height, width, channels, n = images.shape
    count = len(bands)
    taps = np.arange(FILTER)[:, None] - FILTER // 2
    seen = np.clip(np.arange(width) + taps, 0, width - 1)  # taps × width
    neighbours = images[:, seen].transpose(1, 3, 0, 2, 4)  # taps × channels × height × …
    columns = neighbours.reshape(FILTER * channels, height * width * n)
    along_rows = across.reshape(count * 3, -1) @ columns
    responses = bands @ along_rows.reshape(count, 3 * height, width * n)
    return np.asarray(responses.reshape(count, height, width, n))


def _pooled(responses: Singles) -> Singles:
    """n × (cells·filters): what is left of |response| above the image's root mean square."""
    _, height, width, n = responses.shape
    np.abs(responses, out=responses)
    by_image = responses.reshape(-1, n)
    mean_squares = np.einsum("ij,ij->j", by_image, by_image) / len(by_image)
    responses -= np.sqrt(mean_squares)
    np.maximum(responses, 0.0, out=responses)
    tall = _cell_side(height)
    wide = _cell_side(width)
    used = responses[:, : _cells(height) * tall, : _cells(width) * wide]
    blocks = used.reshape(-1, _cells(height), tall, _cells(width), wide, n)
    cells = blocks.mean(axis=(2, 4))  # filters × down × across × n
    return np.asarray(cells.transpose(3, 1, 2, 0).reshape(n, -1))


def _shrink_factor(shape: tuple[int, int, int]) -> int:
    """By how much an image is averaged down."""
    return max(1, min(shape[:2]) // WORKING_SIDE)


def _cell_side(length: int) -> int:
    """The side of a cell along an edge: 5 pixels, or a fifth of the edge if that is more."""
    return min(length, max(POOL, length // POOL))


def _cells(length: int) -> int:
    """The number of cells along an edge; the pixels that are left over at its end are not used."""
    return length // _cell_side(length)


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
        from flwr_ppsgd.models.torch_model import frozen_outputs

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
    """(height, width, channels) of a row of pixels; a square of one channel by default."""
    if not shape:
        side = math.isqrt(columns)
        shape = (side, side)
    if len(shape) == 2:
        shape = (*shape, 1)
    if len(shape) != 3 or math.prod(shape) != columns:
        raise ValueError(
            f"{RANDOM_CONVOLUTION} is for images, and {columns} columns are not an image of shape "
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
