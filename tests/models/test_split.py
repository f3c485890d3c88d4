"""Networks as learners: gradients against finite differences, the split, what is refused."""

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

from flwr_ppsgd import Order
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.learner import Minibatches
from flwr_ppsgd.models.torch_model import AdditiveHead, SplitModel
from flwr_ppsgd.wire import Layout
from tests.support.toy import Floats


def small_network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 4 * 4, 5), nn.Tanh()
    ).double()


def images(count: int = 7) -> tuple[Floats, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    source = np.random.default_rng(0)
    return source.normal(size=(count, 1, 6, 6)), source.integers(0, 4, count)


def flat_w(model: SplitModel) -> Floats:
    arrays = model.initial_arrays()
    return Layout.of(arrays).flatten(arrays).copy()


MODELS: dict[str, Callable[[], SplitModel]] = {
    "additive head": lambda: AdditiveHead(small_network(), 5, 4, head=torch.randn(5, 4) / 3),
    "split": lambda: SplitModel(
        nn.Sequential(small_network(), nn.Linear(5, 4)).double(), personal=["1.*"]
    ),
    "bias": lambda: SplitModel(
        nn.Sequential(small_network(), nn.Linear(5, 4)).double(), personal=["*.bias"]
    ),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_are_those_of_finite_differences(kind: str, reduction: str) -> None:
    """Central differences of the loss in 12 random directions of (w, θ)."""
    torch.manual_seed(1)
    model, rows = MODELS[kind](), images()
    w, theta = flat_w(model), model.initial_theta() + 0.1
    g_w, g_theta = model.gradients(w, theta, rows, reduction)  # type: ignore[arg-type]
    scale = 1 if reduction == "mean" else len(rows[0])
    source, h = np.random.default_rng(2), 1e-5
    for _ in range(12):
        d_w, d_theta = source.normal(size=w.size), source.normal(size=theta.size)
        up = model.evaluate(w + h * d_w, theta + h * d_theta, rows)["loss"]
        down = model.evaluate(w - h * d_w, theta - h * d_theta, rows)["loss"]
        assert scale * (up - down) / (2 * h) == pytest.approx(
            g_w @ d_w + g_theta @ d_theta, rel=1e-6, abs=1e-9
        )


def test_the_additive_head_predicts_with_w_plus_theta() -> None:
    model, rows = MODELS["additive head"](), images()
    w, delta = flat_w(model), np.random.default_rng(3).normal(size=20)
    assert next(iter(model.initial_arrays())) == "head"
    shifted = w + np.pad(delta, (0, w.size - 20))
    moved, personal = model.evaluate(shifted, np.zeros(20), rows), model.evaluate(w, delta, rows)
    assert moved["loss"] == pytest.approx(personal["loss"], rel=1e-12)
    g_w, g_theta = model.gradients(w, delta, rows, "mean")
    np.testing.assert_allclose(g_w[:20], g_theta)


def test_squared_loss_is_half_the_square() -> None:
    model = SplitModel(nn.Linear(2, 1, bias=True).double(), personal=["bias"], loss="squared")
    w, theta = np.array([1.0, 2.0]), np.array([0.5])
    x, y = np.array([[1.0, 1.0]]), np.array([[1.5]])
    assert model.evaluate(w, theta, (x, y)) == {"loss": pytest.approx(2.0)}
    g_w, g_theta = model.gradients(w, theta, (x, y), "mean")
    assert (g_w.tolist(), g_theta.tolist()) == ([2.0, 2.0], [2.0])


def test_w_and_theta_go_into_a_module_and_come_back() -> None:
    model = MODELS["split"]()
    w, theta = flat_w(model) + 1.0, model.initial_theta() - 1.0
    layout = Layout.of(model.initial_arrays())
    for given in (w, layout.unflatten(w)):
        module = model.module_with(given, theta)
        again = SplitModel(module, personal=["1.*"])
        np.testing.assert_array_equal(flat_w(again), w)
        np.testing.assert_array_equal(again.initial_theta(), theta)
    assert not np.array_equal(flat_w(model), w), "the model itself is left alone"


def test_a_learner_visits_minibatches() -> None:
    model, (x, y) = MODELS["additive head"](), images(9)
    learner = model.learner(Minibatches(x, y, 4, seed=0, user=0), test=(x, y))
    order = Order(1, 0.1, 1.0, "mean", True, visit=2)
    rows = Minibatches(x, y, 4, seed=0, user=0)(2)
    w, theta = flat_w(model), learner.initial_theta()
    np.testing.assert_array_equal(
        learner.gradients(w, theta, order)[0], model.gradients(w, theta, rows, "mean")[0]
    )
    assert set(learner.evaluate(w, theta)) == {"loss", "accuracy"}
    assert learner.num_examples == 9


def test_frozen_layers_belong_to_neither_block() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    model = SplitModel(module, personal=["2.*"])
    assert list(model.initial_arrays()) == ["1.weight", "1.bias"]
    assert model.initial_theta().size == 6
    np.testing.assert_array_equal(
        module[0].weight, model.module_with(flat_w(model)).state_dict()["0.weight"]
    )


def test_dropout_is_on_in_training_and_off_in_evaluation() -> None:
    model = SplitModel(
        nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 2)), personal=["2.*"]
    )
    rows = np.ones((3, 4)), np.array([0, 1, 1])
    w, theta = flat_w(model), model.initial_theta()
    first, second = (model.gradients(w, theta, rows, "mean")[0] for _ in range(2))
    assert not np.array_equal(first, second)
    assert model.evaluate(w, theta, rows) == model.evaluate(w, theta, rows)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)]
)
def test_running_statistics_are_refused_with_a_reason(norm: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"'1' tracks running statistics.*GroupNorm"):
        SplitModel(nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 2)), personal=["2.*"])


def test_batchnorm_by_batch_statistics_is_supported() -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    model = SplitModel(nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 2)), personal=["2.*"])
    g_w, _ = model.gradients(
        flat_w(model), model.initial_theta(), (np.eye(3), np.array([0, 1, 0])), "mean"
    )
    assert np.all(np.isfinite(g_w))


@pytest.mark.parametrize(("patterns", "block"), [([], "personal"), (["*"], "shared")])
def test_patterns_for_nothing_or_everything_are_refused(patterns: list[str], block: str) -> None:
    with pytest.raises(ValueError, match=rf"leaves no {block} parameter among \['0.bias'"):
        SplitModel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), personal=patterns)


@pytest.mark.parametrize("patterns", ["2.*", ["1.*", "2.*"]])
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names(
    patterns: str | list[str],
) -> None:
    with pytest.raises(ValueError, match=r"'2.\*' matches no parameter of Sequential; .*'1.bias'"):
        SplitModel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), personal=patterns)


def test_vectors_of_the_wrong_length_are_refused() -> None:
    model = MODELS["split"]()
    with pytest.raises(ValueError, match="w has 3 parameters"):
        model.gradients(np.zeros(3), model.initial_theta(), images(), "mean")
    with pytest.raises(ValueError, match="θ has 2 parameters"):
        model.gradients(flat_w(model), np.zeros(2), images(), "mean")


def test_a_head_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must have shape \(5, 4\), got \(4, 5\)"):
        AdditiveHead(small_network(), 5, 4, head=torch.zeros(4, 5))


def test_a_module_that_is_handed_over_is_not_copied_and_keeps_its_values() -> None:
    head = nn.Linear(5, 4).double()
    module = nn.Sequential(small_network(), head)
    weight = head.weight.detach().clone()
    kept = SplitModel(module, "1.*")
    model = SplitModel(module, "1.*", handed_over=True)
    np.testing.assert_array_equal(model.initial_theta(), kept.initial_theta())
    rows = images()
    w = flat_w(kept)
    expected = kept.gradients(w, kept.initial_theta() + 1, rows, "mean")
    found = model.gradients(w, model.initial_theta() + 1, rows, "mean")
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(model.initial_theta(), kept.initial_theta())
    assert torch.equal(head.weight, weight)


@pytest.mark.parametrize("single", [True, False])
def test_gradients_of_w_are_float32_if_the_network_is(single: bool) -> None:
    """The numbers are the same whether w comes as float32 or as float64."""
    module = nn.Sequential(small_network(), nn.Linear(5, 4))
    module = module.float() if single else module.double()
    model = SplitModel(module, "1.*")
    assert model.takes_float32 == single
    w = model.initial_w()
    theta = model.initial_theta()
    g_w, g_theta = model.gradients(w, theta, images(), "mean")
    assert g_w.dtype == (np.float32 if single else np.float64)
    assert g_theta.dtype == np.float64
    if single:
        narrow = cast(Vector, w.astype(np.float32))
        from_single, _ = model.gradients(narrow, theta, images(), "mean")
        np.testing.assert_array_equal(from_single, g_w)
