"""Public representations Φ(x), in front of a linear model that is solved.

They do not depend on any user's data, so they cost no privacy: the same settings give everyone the
same Φ. It is computed on the device, row by row, from the user's own rows.
"""

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.checks import require
from flwr_ppsgd.learner import generator
from flwr_ppsgd.models.solve import one_blas_thread

Shape: TypeAlias = tuple[int, ...]
Floats: TypeAlias = NDArray[np.float64]
Singles: TypeAlias = NDArray[np.float32]
Representation: TypeAlias = Callable[[Floats], Floats]  # Φ: rows of numbers → rows of features

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
SMOOTH = 0.7  # largest difference of neighbours in an image, as a share of that of any two pixels


def representation_of(
    name: str, features: int | None = None, seed: int = 0, shape: Shape = ()
) -> Representation | None:
    """The representation of this name; None for "none".

    Args:
        name: "none", "random-convolution", "random-fourier" or "module:factory".
        features: the number of random features; None uses the default of the representation.
        seed: of random features. Public.
        shape: of a row, if it is known.
    """
    if name == NONE:
        return None
    if name == RANDOM_CONVOLUTION:
        return RandomConvolution(features or CONVOLUTION_FEATURES, seed, shape)
    if name == RANDOM_FOURIER:
        count = features or FOURIER_FEATURES
        return functools.partial(fourier_features, features=count, seed=seed)
    if ":" in name:
        return functools.partial(backbone_features, factory=name, shape=shape)
    raise ValueError(
        f"representation must be {NONE}, {RANDOM_CONVOLUTION}, {RANDOM_FOURIER} or module:factory, "
        f"got {name!r}: choose one"
    )


def width_of(representation: Representation, columns: int) -> int:
    """The number of features of rows with this number of columns."""
    features = representation(np.zeros((1, columns)))
    return int(features.shape[1])


def unit_rows(rows: Floats) -> Floats:
    """Φ(x) = x/‖x‖: pixels without the brightness of their image; zeros stay zeros."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    norms[~(norms > 0)] = 1.0
    return np.asarray(rows / norms)


@dataclass(frozen=True)
class RandomConvolution:
    """Random Gabor filters of an image: |response| − t, its positive part, averaged in cells.

    A filter is a wave under a Gaussian window of 13 × 13 pixels, mean zero and unit norm; its
    direction, wavelength, window and phase are drawn. t is the root mean square of all responses of
    the image. An image's features are divided by their norm. So neither brightness, nor contrast,
    nor units matter. With several channels each filter sees a random direction of colour.

    Args:
        features: their approximate number; the number of filters is rounded.
        seed: of the filters, 0 or more. Public.
        shape: of an image: (height, width) or (height, width, channels); () is a square one.
    """

    features: int = CONVOLUTION_FEATURES
    seed: int = 0
    shape: Shape = ()

    def __post_init__(self) -> None:
        rule = "the number of features must be at least 1"
        require(self.features >= 1, rule, self.features, "raise it")

    def width(self, columns: int) -> int:
        """Filters × cells."""
        cells, filters = self._cells_and_filters(columns)
        return cells * filters

    def __call__(self, x: Floats) -> Floats:
        """Rows × features, of images as rows of pixels."""
        columns = x.shape[1]
        _, height, _, channels = self._working_shape(columns)
        cells, filters = self._cells_and_filters(columns)
        across, down = _gabor_factors(self.seed, channels, filters)
        bands = _bands(down, height)
        features = np.zeros((len(x), cells * filters))
        with one_blas_thread():
            for start in range(0, len(x), IMAGES_AT_ONCE):
                some = slice(start, start + IMAGES_AT_ONCE)
                images = self._images(x[some])
                responses = _responses(images, across, bands)
                features[some] = _pool_cells(responses)
        return unit_rows(features)

    def network(self, outputs: int) -> Any:
        """A torch module: Φ under a linear layer ``head`` of its own, which starts at zero.

        Args:
            outputs: the number of classes, or 1.
        """
        from flwr_ppsgd.models.torch_representation import OnImages

        remedy = "such as shape=(28, 28), or (32, 32, 3) with channels"
        require(bool(self.shape), "a network needs the images' shape", self.shape, remedy)
        return OnImages(self, outputs)

    def _images(self, x: Floats) -> Singles:
        """Height × width × channels × n, on a scale of 1, averaged down to the working size."""
        n, columns = x.shape
        factor, height, width, channels = self._working_shape(columns)
        largest = abs(x).max(axis=1, keepdims=True)
        largest[~(largest > 0)] = 1.0
        scaled = x / largest
        images = scaled.reshape(n, *image_shape(self.shape, columns))
        used = images[:, : height * factor, : width * factor]
        blocks = used.reshape(n, height, factor, width, factor, channels)
        small = blocks.mean(axis=(2, 4))  # n × height × width × channels
        return np.asarray(small.transpose(1, 2, 3, 0), dtype=np.float32)

    def _working_shape(self, columns: int) -> tuple[int, int, int, int]:
        """By what factor an image is averaged down, and its height, width and channels then."""
        height, width, channels = image_shape(self.shape, columns)
        factor = max(1, min(height, width) // WORKING_SIDE)
        return factor, height // factor, width // factor, channels

    def _cells_and_filters(self, columns: int) -> tuple[int, int]:
        """The number of cells in an image, and of filters, so that there are enough features."""
        _, height, width, _ = self._working_shape(columns)
        down = height // _cell_side(height)
        across = width // _cell_side(width)
        cells = down * across
        filters = max(1, round(self.features / cells))
        return cells, filters


@functools.lru_cache(maxsize=8)
def _gabor_factors(seed: int, channels: int, count: int) -> tuple[Singles, Singles]:
    """Each filter as a sum of three products, of a function of the column and one of the row.

    cos(u + v) = cos u·cos v − sin u·sin v with u along the row and v down the column, a Gaussian
    window is such a product by itself, and the mean that is subtracted is a constant.

    Returns:
        the functions of the column, filters × 3 × 13·channels, and those of the row, filters × 3 ×
        13.
    """
    source = np.random.default_rng([seed, FILTER, 9])
    drawn = source.random((count, 4))
    # filters × 1 each
    direction = math.pi * drawn[:, 0:1]
    wavelength = 3 + 7 * drawn[:, 1:2]
    deviation = 0.7 * FILTER * (0.25 + 0.25 * drawn[:, 2:3])
    phase = 2 * math.pi * drawn[:, 3:4]
    # filters × 13 each
    position = np.arange(FILTER) - FILTER // 2
    window = np.exp(-(position**2) / (2 * deviation**2))
    turns = 2 * math.pi * position
    u = turns * np.cos(direction) / wavelength + phase
    v = turns * np.sin(direction) / wavelength
    constant = np.ones_like(u)
    # filters × 3 × 13 each
    across = np.stack([window * np.cos(u), -window * np.sin(u), constant], axis=1)
    down = np.stack([window * np.cos(v), window * np.sin(v), 0 * constant], axis=1)
    # mean zero, and unit norm
    total = np.einsum("fka,fkd->f", across, down)
    down[:, 2] = -total[:, None] / FILTER**2
    filters = np.einsum("fka,fkd->fad", across, down)  # filters × 13 × 13
    norms = np.linalg.norm(filters, axis=(1, 2))
    down /= norms[:, None, None]
    # filters × 3 × 13 × channels
    colours = _colours(seed, channels, count)
    coloured = across[:, :, :, None] * colours[:, None, None, :]
    across = coloured.reshape(count, 3, FILTER * channels)
    return across.astype(np.float32), down.astype(np.float32)


def _colours(seed: int, channels: int, count: int) -> Floats:
    """How much each filter sees of each channel: a random direction, filters × channels."""
    if channels == 1:
        return np.ones((count, 1))
    source = np.random.default_rng([seed, FILTER, 9, channels])
    return unit_rows(source.normal(size=(count, channels)))


def _bands(down: Singles, height: int) -> Singles:
    """The functions of the row as matrices, filters × height × 3·height.

    Line r of a matrix holds the weights of all rows of an image in the response of row r; the first
    and the last row stand for those beyond the edge.
    """
    count = len(down)
    bands = np.zeros((count, height, 3, height), dtype=np.float32)  # … × row of the image
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
    neighbours = images[:, seen]  # height × taps × width × channels × n
    by_tap = neighbours.transpose(1, 3, 0, 2, 4)  # taps × channels × height × width × n
    columns = by_tap.reshape(FILTER * channels, height * width * n)
    along_rows = across.reshape(count * 3, -1) @ columns
    responses = bands @ along_rows.reshape(count, 3 * height, width * n)
    return np.asarray(responses.reshape(count, height, width, n))


def _pool_cells(responses: Singles) -> Singles:
    """n × (cells·filters): the part of |response| above the image's root mean square."""
    _, height, width, n = responses.shape
    np.abs(responses, out=responses)
    flat = responses.reshape(-1, n)
    squares = np.einsum("ij,ij->j", flat, flat)
    responses -= np.sqrt(squares / len(flat))
    np.maximum(responses, 0.0, out=responses)
    tall = _cell_side(height)
    wide = _cell_side(width)
    down = height // tall
    across = width // wide
    used = responses[:, : down * tall, : across * wide]
    blocks = used.reshape(-1, down, tall, across, wide, n)
    cells = blocks.mean(axis=(2, 4))  # filters × down × across × n
    by_image = cells.transpose(3, 1, 2, 0)  # n × down × across × filters
    return np.asarray(by_image.reshape(n, -1))


def _cell_side(length: int) -> int:
    """The side of a cell along an edge: 5 pixels, or a fifth of the edge if that is more.

    Pixels that are left over at the end of the edge are not used.
    """
    return min(length, max(POOL, length // POOL))


def fourier_features(x: Floats, features: int = FOURIER_FEATURES, seed: int = 0) -> Floats:
    """The columns beside random waves √(2d/D)·cos(Ωᵀx + b), rows × (d + D).

    Ω ~ N(0, 1/d) and b is uniform, for d columns and D features: a Gaussian kernel for columns on a
    scale of about 1. Together the features are as long as a row of such columns.

    Args:
        x: rows × d.
        features: D.
        seed: of Ω and b. Public.
    """
    columns = x.shape[1]
    directions, phases = _random_waves(seed, columns, features)
    size = math.sqrt(2 * columns / features)
    waves = size * np.cos(x @ directions + phases)
    return np.hstack([x, waves])


@functools.lru_cache(maxsize=8)
def _random_waves(seed: int, columns: int, features: int) -> tuple[Floats, Floats]:
    """Ω, columns × features, and b."""
    source = generator("random-fourier", seed)
    directions = source.normal(size=(columns, features)) / math.sqrt(columns)
    phases = source.uniform(0, 2 * math.pi, features)
    return directions, phases


def backbone_features(x: Floats, factory: str, shape: Shape = ()) -> Floats:
    """The outputs of a frozen torch network, such as a pretrained one: rows × outputs.

    Args:
        x: rows × columns.
        factory: "module:function" that returns an ``nn.Module``, the same for everyone.
        shape: of a row as the network takes it, images as (height, width, channels), which become
            channels × height × width; () passes rows on unchanged.
    """
    from flwr_ppsgd.models.torch_representation import frozen_outputs

    if len(shape) in (2, 3):
        images = x.reshape(len(x), *image_shape(shape, x.shape[1]))
        x = images.transpose(0, 3, 1, 2)  # n × channels × height × width
    return frozen_outputs(_module_of(factory), x)


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
    is_brightness = (some >= 0) & (some <= 255)
    if not is_brightness.all():
        return False
    images = some.reshape(-1, side, side)
    far_away = np.roll(images, (side // 2, side // 3), axis=(1, 2))
    any_two = np.abs(images - far_away).mean()
    across = np.abs(np.diff(images, axis=2)).mean()
    down = np.abs(np.diff(images, axis=1)).mean()
    return bool(max(across, down) < SMOOTH * any_two)
