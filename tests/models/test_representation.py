"""Public representations: by hand, scale-free, the same for everyone, chosen for images alone."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from flwr_ppsgd.lab.problem import Problem
from flwr_ppsgd.lab.tasks import task_of
from flwr_ppsgd.models.representation import (
    RandomConvolution,
    backbone_features,
    fourier_features,
    looks_like_images,
    representation_of,
    unit_rows,
    width_of,
)
from tests.support.own_data import load_file

Floats = NDArray[np.float64]


def images(count: int, shape: tuple[int, ...], seed: int = 0) -> Floats:
    """Bright blobs on a dark ground, as rows of pixels."""
    random = np.random.default_rng(seed)
    down, across = np.mgrid[: shape[0], : shape[1]]
    found = []
    for _ in range(count):
        top, left = random.uniform(0.2, 0.8, 2) * shape[:2]
        blob = np.exp(-((down - top) ** 2 + (across - left) ** 2) / (0.05 * shape[0] * shape[1]))
        channels = shape[2] if len(shape) == 3 else 1
        found.append(np.repeat(blob[:, :, None], channels, axis=2).reshape(-1))
    return np.array(found)


def drawn_filters(seed: int, channels: int, count: int) -> torch.Tensor:
    """Filters × channels × 13 × 13, drawn one number after the other."""
    source = np.random.default_rng([seed, 13, 9])
    down, across = np.mgrid[-6:7, -6:7]
    filters = []
    for _ in range(count):
        direction = source.uniform(0, np.pi)
        wavelength = source.uniform(3, 10)
        deviation = 13 * 0.7 * source.uniform(0.25, 0.5)
        phase = source.uniform(0, 2 * np.pi)
        position = across * np.cos(direction) + down * np.sin(direction)
        wave = np.cos(2 * np.pi * position / wavelength + phase)
        wave *= np.exp(-(across**2 + down**2) / (2 * deviation**2))
        wave -= wave.mean()
        filters.append(wave / np.linalg.norm(wave))
    colours = np.ones((count, 1))
    if channels > 1:
        colours = np.random.default_rng([seed, 13, 9, channels]).normal(size=(count, channels))
        colours /= np.linalg.norm(colours, axis=1, keepdims=True)
    return torch.from_numpy(colours[:, :, None, None] * np.array(filters)[:, None]).float()


@pytest.mark.parametrize("shape", [(12, 12), (28, 28), (32, 32, 3), (20, 30, 2)])
def test_random_convolutions_are_those_of_torch(shape: tuple[int, ...]) -> None:
    """|image ∗ filter| − its root mean square, the positive part, averaged, of unit length."""
    phi = RandomConvolution(features=200, seed=3, shape=shape)
    x = images(9, shape)
    channels = shape[2] if len(shape) == 3 else 1
    pools = [max(5, side // 5) for side in shape[:2]]
    cells = (shape[0] // pools[0]) * (shape[1] // pools[1])
    kernel = drawn_filters(3, channels, round(200 / cells))
    planes = torch.from_numpy(x / x.max(axis=1, keepdims=True)).float()
    planes = planes.reshape(9, *shape[:2], channels).permute(0, 3, 1, 2)
    padded = nn.functional.pad(planes, (6, 6, 6, 6), mode="replicate")
    responses = nn.functional.conv2d(padded, kernel).abs()
    typical = responses.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
    responses = torch.relu(responses - typical)
    pooled = nn.functional.avg_pool2d(responses, pools).permute(0, 2, 3, 1).flatten(1)
    expected = nn.functional.normalize(pooled, dim=1).numpy()
    np.testing.assert_allclose(phi(x), expected, atol=1e-5)
    assert phi.width(x.shape[1]) == expected.shape[1]


def test_a_thousand_features_are_forty_filters_on_28_pixels() -> None:
    phi = RandomConvolution()
    assert phi.width(784) == 40 * 5 * 5
    assert phi(images(1, (28, 28))).shape == (1, 1000)


def test_images_of_any_size_and_brightness_have_features_of_one_length() -> None:
    for shape in [(13, 13), (64, 64), (97, 60, 3), (7, 7)]:
        phi = RandomConvolution(features=50, shape=shape)
        x = images(2, shape)
        found = phi(x)
        assert found.shape == (2, phi.width(x.shape[1]))
        np.testing.assert_allclose(phi(1e200 * x), found, atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0)
    dark = RandomConvolution()(np.zeros((1, 784)))
    np.testing.assert_array_equal(dark, np.zeros((1, 1000)))
    assert RandomConvolution()(np.zeros((0, 784))).shape == (0, 1000)


@pytest.mark.parametrize("name", ["random-convolution", "random-fourier"])
def test_another_seed_gives_other_features(name: str) -> None:
    x = images(2, (14, 14))
    one, other = (representation_of(name, seed=seed) for seed in (1, 2))
    assert one is not None
    assert other is not None
    assert not np.allclose(one(x), other(x))


def test_fourier_features_are_a_gaussian_kernel_beside_the_columns() -> None:
    """Φ(x)ᵀΦ(z) ≈ d·exp(−‖x − z‖²/2d): its error is √(d²/D) at most."""
    columns, features = 6, 20_000
    x = np.random.default_rng(0).normal(size=(5, columns))
    found = fourier_features(x, features)
    np.testing.assert_array_equal(found[:, :columns], x)
    waves = found[:, columns:]
    distances = ((x[:, None] - x[None]) ** 2).sum(axis=-1)
    expected = columns * np.exp(-distances / (2 * columns))
    assert abs(waves @ waves.T - expected).max() < 5 * columns / math.sqrt(features)


def test_rows_of_unit_length_leave_a_row_of_zeros_alone() -> None:
    assert unit_rows(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist() == [[0.6, 0.8], [0.0, 0.0]]


def small_network() -> nn.Module:
    """What "tests.models.test_representation:small_network" makes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Dropout(), nn.Linear(2 * 6 * 5, 7))


def test_a_frozen_backbone_sees_images_by_channel() -> None:
    factory = "tests.models.test_representation:small_network"
    phi = representation_of(factory, shape=(8, 7, 3))
    assert phi is not None
    x = np.random.default_rng(0).normal(size=(5, 8 * 7 * 3))
    planes = torch.from_numpy(x).float().reshape(5, 8, 7, 3).permute(0, 3, 1, 2)
    expected = small_network().eval()(planes).detach().numpy()
    # sums of 60 float32 numbers of order one, which kernels add up in different orders
    np.testing.assert_allclose(phi(x), expected, rtol=0, atol=1e-6)
    assert width_of(phi, x.shape[1]) == 7


@pytest.mark.parametrize("name", ["random-convolutions", "fourier", ""])
def test_an_unknown_name_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(ValueError, match="random-convolution, random-fourier or module:factory"):
        representation_of(name)


def test_a_network_that_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(ValueError, match="No module named 'nowhere'"):
        backbone_features(np.zeros((1, 3)), "nowhere:network")
    with pytest.raises(ValueError, match="returned a PosixPath"):
        backbone_features(np.zeros((1, 3)), "pathlib:Path")


def test_images_are_recognised_and_tables_are_not() -> None:
    random = np.random.default_rng(0)
    assert looks_like_images(images(20, (12, 12)))
    assert looks_like_images((255 * images(20, (28, 28))).astype(np.uint8))
    assert looks_like_images(random.normal(size=(5, 300)), shape=(10, 10, 3))
    assert not looks_like_images(images(20, (11, 11)))
    assert not looks_like_images(images(20, (12, 13)))
    assert not looks_like_images(random.integers(0, 2, size=(50, 144)))
    assert not looks_like_images(-images(20, (12, 12)))
    assert not looks_like_images(random.normal(size=(50, 196)))


def image_file(folder: Path, *, flat: bool) -> Path:
    """Three users with eight images each."""
    x = (255 * images(24, (12, 12))).astype(np.uint8)
    user, y = np.repeat([0, 1, 2], 8), np.tile([0, 1], 12)
    path = folder / ("flat.npz" if flat else "images.npz")
    shaped = x if flat else x.reshape(-1, 12, 12)
    np.savez(path, x=shaped, y=y, user=user, test=np.arange(24) % 8 >= 6)
    return path


@pytest.mark.parametrize("flat", [True, False])
def test_a_task_sees_the_representation_in_every_engine(tmp_path: Path, flat: bool) -> None:
    path = image_file(tmp_path, flat=flat)
    settings: dict[str, Any] = {"representation": "auto", "representation_features": 40}
    problem = Problem(data=str(path), bias=True, batch_size=6, **settings)
    data = problem.per_user()
    phi = RandomConvolution(40, 0, data.shape)
    assert data.shape == (12, 12)
    assert data.features == 41
    assert "random-convolution" in data.describe()
    raw = load_file(path)
    rows = raw.rows(1, test=False)
    expected = np.hstack([phi(raw.matrix(rows)), np.ones((6, 1))])
    np.testing.assert_allclose(data.matrix(rows), expected, atol=1e-6)
    whole, _, offsets = data.part(test=False)
    np.testing.assert_array_equal(whole[offsets[1] : offsets[2]], data.matrix(rows))
    assert problem.chosen_representation() == "random-convolution"
    assert len(task_of(problem, 3).learner(1).initial_theta()) == 41 * 2
    assert Problem(data=str(path), representation="none").per_user().features == 144


def test_a_representation_is_computed_once_for_each_user(tmp_path: Path) -> None:
    calls: list[int] = []

    def counted(x: Floats) -> Floats:
        calls.append(len(x))
        return x

    data = replace(load_file(image_file(tmp_path, flat=True)), representation=counted)
    first = data.matrix(np.array([0, 9]))
    again = data.matrix(np.array([9, 0, 3]))
    np.testing.assert_array_equal(first, again[[1, 0]])
    assert [rows for rows in calls if rows > 1] == [8, 8]  # one row tells the width


def test_a_representation_is_refused_where_it_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="linear models"):
        Problem(data="x.npz", model="cnn", representation="random-fourier")
    table = tmp_path / "table.npz"
    np.savez(table, x=np.zeros((4, 10)), y=np.arange(4.0), user=[0, 0, 1, 1])
    problem = Problem(data=str(table), representation="random-convolution")
    with pytest.raises(ValueError, match="is for images"):
        problem.per_user()
