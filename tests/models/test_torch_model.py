"""Networks as their owners have them: gradients, the split, inputs, outputs, losses, precision."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from flwr_ppsgd import AdditiveHead, Minibatches, Order, SplitModel, torch_learner, whole_module
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.arrays import Layout
from tests.support.toy import Floats

ORDER = Order(1, 0.1, 1.0, "mean", True, visit=1)


def stepped(module: nn.Module, personal: Any, batches: Any, **options: Any) -> Any:
    """The measures of a learner whose gradients are finite and not zero."""
    learner = torch_learner(module, personal, batches, batches, **options)
    w = SplitModel(module, personal).initial_w()
    gradients = learner.gradients(w, learner.initial_theta(), ORDER)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert np.linalg.norm(gradients[0]) > 0
    measures = learner.evaluate(w, learner.initial_theta())
    assert np.isfinite(measures["loss"])
    return measures


IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(6) % 3
IDS = torch.arange(24).reshape(6, 4) % 11
MASK = torch.ones(6, 4)
TOKENS = {"labels": CLASSES, "attention_mask": MASK, "input_ids": IDS}


class ViewNet(nn.Module):
    """A convolution under a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4 * 3 * 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv(x)), 2)
        return self.head(x.view(-1, 36))  # type: ignore[no-any-return]


class Tokens(nn.Module):
    """A text model: whole numbers in, an object with logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        mask = attention_mask[:, :, None]
        summed = (self.embedding(input_ids) * mask).sum(dim=1)
        return SimpleNamespace(logits=self.head(summed / mask.sum(dim=1)), hidden=summed)


def small_network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 4 * 4, 5), nn.Tanh()]
    return nn.Sequential(*layers).double()


def on_small_network(personal: str) -> SplitModel:
    return SplitModel(nn.Sequential(small_network(), nn.Linear(5, 4)).double(), personal)


def digits(count: int = 7) -> tuple[Floats, NDArray[np.int64]]:
    source = np.random.default_rng(0)
    return source.normal(size=(count, 1, 6, 6)), source.integers(0, 4, count)


MODELS: dict[str, Callable[[], SplitModel]] = {
    "additive head": lambda: AdditiveHead(small_network(), 5, 4, head=torch.randn(5, 4) / 3),
    "split": lambda: on_small_network("1.*"),
    "bias": lambda: on_small_network("*.bias"),
}


# Gradients


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_are_those_of_finite_differences(kind: str, reduction: Any) -> None:
    """Central differences of the loss in 12 random directions of (w, θ)."""
    torch.manual_seed(1)
    model = MODELS[kind]()
    rows = digits()
    w, theta = model.initial_w(), model.initial_theta() + 0.1
    g_w, g_theta = model.gradients(w, theta, rows, reduction)
    scale = 1 if reduction == "mean" else len(rows[0])
    source = np.random.default_rng(2)
    for _ in range(12):
        d_w, d_theta = source.normal(size=w.size), source.normal(size=theta.size)
        up, down = (
            model.evaluate(w + h * d_w, theta + h * d_theta, rows)["loss"] for h in (1e-5, -1e-5)
        )
        expected = g_w @ d_w + g_theta @ d_theta
        assert scale * (up - down) / 2e-5 == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_squared_loss_is_half_the_square() -> None:
    model = SplitModel(nn.Linear(2, 1).double(), personal=["bias"], loss="squared")
    w, theta = np.array([1.0, 2.0]), np.array([0.5])
    rows = np.array([[1.0, 1.0]]), np.array([[1.5]])
    assert model.evaluate(w, theta, rows) == {"loss": pytest.approx(2.0)}
    g_w, g_theta = model.gradients(w, theta, rows, "mean")
    assert (g_w.tolist(), g_theta.tolist()) == ([2.0, 2.0], [2.0])


@pytest.mark.parametrize("kind", ["additive head", "additive layer"])
def test_theta_is_added_to_a_shared_head(kind: str) -> None:
    """w + θ in the head: shifting either gives the same loss, and g_θ is that part of g_w."""
    model: SplitModel = MODELS["additive head"]()
    head = slice(0, 20)  # its head comes first
    if kind == "additive layer":
        network = nn.Sequential(small_network(), nn.Linear(5, 4)).double()
        model = SplitModel(network, "1.*", additive=True)
        assert list(model.initial_arrays()) == list(network.state_dict())
        head = slice(-24, None)
    w, nothing = model.initial_w(), model.initial_theta()
    assert not nothing.any()
    theta = np.random.default_rng(3).normal(size=nothing.size)
    shifted = w.copy()
    shifted[head] += theta
    losses = [model.evaluate(*at, digits())["loss"] for at in ((w, theta), (shifted, nothing))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    g_w, g_theta = model.gradients(w, theta, digits(), "mean")
    np.testing.assert_allclose(g_w[head], g_theta)
    np.testing.assert_allclose(model.gradients(shifted, nothing, digits(), "mean")[0], g_w)


@pytest.mark.parametrize("single", [True, False])
def test_gradients_of_w_are_float32_if_the_network_is(single: bool) -> None:
    """The numbers are the same whether w comes as float32 or as float64."""
    module = nn.Sequential(small_network(), nn.Linear(5, 4))
    model = SplitModel(module.float() if single else module.double(), "1.*")
    assert model.takes_float32 == single
    w, theta = model.initial_w(), model.initial_theta()
    g_w, g_theta = model.gradients(w, theta, digits(), "mean")
    assert g_w.dtype == (np.float32 if single else np.float64)
    assert g_theta.dtype == np.float64
    if single:
        narrow = cast(Vector, w.astype(np.float32))
        np.testing.assert_array_equal(model.gradients(narrow, theta, digits(), "mean")[0], g_w)


# The split


def test_a_learner_visits_minibatches() -> None:
    model = MODELS["additive head"]()
    batches = Minibatches(*digits(9), 4, seed=0, user=0)
    learner = model.learner(batches, test=digits(9))
    w, theta = model.initial_w(), learner.initial_theta()
    expected = model.gradients(w, theta, batches(2), "mean")[0]
    found = learner.gradients(w, theta, replace(ORDER, visit=2))[0]
    np.testing.assert_array_equal(found, expected)
    assert set(learner.evaluate(w, theta)) == {"loss", "accuracy"}
    assert learner.num_examples == 9


def test_frozen_layers_belong_to_neither_block() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    model = SplitModel(module, personal=["2.*"])
    assert list(model.initial_arrays()) == ["1.weight", "1.bias"]
    assert model.initial_theta().size == 6
    held = model.module_with(model.initial_w()).state_dict()
    np.testing.assert_array_equal(module[0].weight, held["0.weight"])


def test_dropout_is_on_in_training_and_off_in_evaluation() -> None:
    module = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 2))
    model = SplitModel(module, personal=["2.*"])
    at = (model.initial_w(), model.initial_theta(), (np.ones((3, 4)), np.array([0, 1, 1])))
    first, second = (model.gradients(*at, "mean")[0] for _ in range(2))
    assert not np.array_equal(first, second)
    assert model.evaluate(*at) == model.evaluate(*at)


def test_running_statistics_are_refused_and_batch_statistics_are_not() -> None:
    for norm in (nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)):
        with pytest.raises(ValueError, match=r"'1' tracks running statistics.*GroupNorm"):
            SplitModel(nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 2)), personal=["2.*"])
    by_batch = nn.BatchNorm1d(3, track_running_stats=False)
    module = nn.Sequential(nn.Linear(3, 3), by_batch, nn.Linear(3, 2))
    stepped(module, "2.*", [(torch.eye(3), torch.tensor([0, 1, 0]))])


@pytest.mark.parametrize(
    ("personal", "words"),
    [
        ([], r"leaves no personal parameter among \['0.bias'"),
        (["*"], r"leaves no shared parameter among \['0.bias'"),
        ("2.*", r"'2.\*' matches no parameter of Sequential; .*'1.bias'"),
        (["1.*", "2.*"], r"'2.\*' matches no parameter of Sequential; .*'1.bias'"),
    ],
)
def test_patterns_for_nothing_or_everything_are_refused(personal: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SplitModel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), personal)


def test_what_does_not_fit_is_refused() -> None:
    model = MODELS["split"]()
    with pytest.raises(ValueError, match="w has 3 parameters"):
        model.gradients(np.zeros(3), model.initial_theta(), digits(), "mean")
    with pytest.raises(ValueError, match="θ has 2 parameters"):
        model.gradients(model.initial_w(), np.zeros(2), digits(), "mean")
    with pytest.raises(ValueError, match=r"must have shape \(5, 4\), got \(4, 5\)"):
        AdditiveHead(small_network(), 5, 4, head=torch.zeros(4, 5))


@pytest.mark.parametrize("additive", [True, False])
def test_w_and_theta_make_a_whole_module(additive: bool) -> None:
    """Saved and loaded with strict=True; a list of arrays, as the legacy API has it, too."""
    model = SplitModel(ViewNet(), "head.*", additive=additive)
    w, theta = model.initial_w() + 1.0, model.initial_theta() - 1.0
    arrays = Layout.of(model.initial_arrays()).unflatten(w)
    expected = w.copy()
    if additive:
        expected[-theta.size :] += theta
    for given in (arrays, arrays.to_numpy_ndarrays()):
        whole = whole_module(ViewNet(), given, "head.*", theta)
        loaded = ViewNet()
        loaded.load_state_dict(whole.state_dict(), strict=True)
        again = SplitModel(loaded, "head.*", additive=additive)
        np.testing.assert_allclose(again.initial_w(), expected, atol=1e-6)
        kept = 0 * theta if additive else theta
        np.testing.assert_allclose(again.initial_theta(), kept, rtol=1e-6)
        assert not whole.training
    own = ViewNet()
    alone = SplitModel(whole_module(own, arrays, "head.*"), "head.*", additive=additive)
    np.testing.assert_allclose(alone.initial_w(), w, rtol=1e-6)
    kept = SplitModel(own, "head.*", additive=additive).initial_theta()
    np.testing.assert_array_equal(alone.initial_theta(), kept)


def test_other_personal_layers_are_named_on_both_sides() -> None:
    arrays = SplitModel(ViewNet(), "conv.*").initial_arrays()
    words = r"server's w has \['head.bias', 'head.weight'\] .* lacks \['conv.bias', 'conv.weight'\]"
    with pytest.raises(ValueError, match=words):
        whole_module(ViewNet(), arrays, "head.*")
    learner = torch_learner(ViewNet(), "head.*", [(IMAGES, CLASSES)])
    with pytest.raises(ValueError, match=r"personal=\['head.\*'\], additive=False on this client"):
        learner.check_shared(Layout.of(arrays).shape_of)
    learner.check_shared({"conv.weight": (4, 3, 3, 3), "conv.bias": (4,)})
    learner.check_shared({"0": (4, 3, 3, 3), "1": (4,)})
    words = r"'conv.bias' has shape \(5,\) in the server's w and \(4,\) in this client's"
    with pytest.raises(ValueError, match=words):
        learner.check_shared({"conv.bias": (5,), "conv.weight": (5, 3, 3, 3)})


# Inputs and outputs


def test_predictions_may_have_many_axes() -> None:
    """Of pixels and channels; samples × places × classes, as language models return them."""

    def loss(prediction: Tensor, y: Tensor) -> Tensor:
        return (prediction.view(6, -1) - y.view(6, -1)).pow(2).mean(dim=1)

    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    stepped(network, "1.*", [(IMAGES, torch.zeros(6, 2, 4, 4))], loss=loss)
    words = torch.arange(12).reshape(3, 4) % 7
    stepped(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)), "1.*", [(words, words)])


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (TOKENS, {}),
        (UserDict(TOKENS), {}),
        ((IDS, MASK, CLASSES), {"inputs": [0, 1], "target": 2}),
        (((IDS, MASK), CLASSES), {}),
        ([[IDS, MASK], CLASSES], {}),  # torch's loaders make lists of tuples
        (({"input_ids": IDS, "attention_mask": MASK}, CLASSES), {}),
    ],
)
def test_several_inputs_go_by_keyword_or_position(batch: Any, options: dict[str, Any]) -> None:
    """And whole numbers stay whole."""
    assert set(stepped(Tokens(), "head.*", [batch], **options)) == {"loss", "accuracy"}


def test_an_additive_head_over_a_network_with_several_inputs() -> None:
    model = AdditiveHead(Tokens(), 3, 3)
    batch = ({"input_ids": IDS, "attention_mask": MASK}, CLASSES)
    g_w, _ = model.gradients(model.initial_w(), model.initial_theta() + 1, batch, "mean")
    assert np.linalg.norm(g_w) > 0


def test_inputs_that_forward_does_not_take_are_named_on_both_sides() -> None:
    batch = {**TOKENS, "token_type_ids": torch.zeros(6, 4, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"'token_type_ids'\] and Tokens.forward takes \['input"):
        stepped(Tokens(), "head.*", [batch])


def returned(wrap: Callable[[Tensor], Any]) -> Any:
    """A step of a network that returns its scores wrapped."""

    class Wrapped(ViewNet):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x))

    return stepped(Wrapped(), "head.*", [(IMAGES, CLASSES)])


def test_predictions_are_found_in_what_a_network_returns() -> None:
    returned(lambda x: {"logits": x})
    returned(lambda x: SimpleNamespace(logits=x, hidden=x))
    returned(lambda x: x)
    with pytest.raises(ValueError, match="Wrapped returned a tuple without logits"):
        returned(lambda x: (x, x))


# Losses


def regression(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).double()


NUMBERS = (torch.arange(10.0).reshape(5, 2), torch.arange(5.0))


def gradients_with(loss: Any, reduction: Any = "mean", rows: Any = NUMBERS, k: int = 1) -> Floats:
    model = SplitModel(regression(k), "2.*", loss)
    return model.gradients(model.initial_w(), model.initial_theta(), rows, reduction)[0]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_that_reduce_by_themselves_are_recognised(reduction: str) -> None:
    """Mean-reducing, sum-reducing and per-sample squares give the same gradient; ½ apart from
    "squared"."""
    losses: list[Any] = [nn.MSELoss(), nn.MSELoss(reduction="sum"), nn.MSELoss(reduction="none")]
    losses += [lambda p, y: (p - y).square().mean(), lambda p, y: (p - y).square().sum()]
    expected = 2 * gradients_with("squared", reduction)
    for loss in losses:
        np.testing.assert_allclose(gradients_with(loss, reduction), expected, rtol=1e-12)


def test_the_weights_of_classes_count_for_each_sample() -> None:
    """The mean of wᵢ·ℓᵢ over the samples, whoever else is in the minibatch."""
    rows = (NUMBERS[0], torch.arange(5) % 3)
    weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)

    def by_hand(prediction: Tensor, y: Tensor) -> Tensor:
        return weights[y] * functional.cross_entropy(prediction, y, reduction="none")

    found = gradients_with(nn.CrossEntropyLoss(weight=weights), rows=rows, k=3)
    np.testing.assert_allclose(found, gradients_with(by_hand, rows=rows, k=3), rtol=1e-12)


def test_one_dimensional_targets_and_predictions_fit_one_output() -> None:
    """y of shape (5,) against (5, 1) must not become 5 × 5 numbers."""
    expected = gradients_with("squared")
    column = (NUMBERS[0], NUMBERS[1][:, None])
    np.testing.assert_array_equal(gradients_with("squared", rows=column), expected)
    model = SplitModel(nn.Sequential(regression(), nn.Flatten(0)), "0.2.*", "squared")
    g_w, _ = model.gradients(model.initial_w(), model.initial_theta(), NUMBERS, "mean")
    np.testing.assert_allclose(g_w, expected)


@pytest.mark.parametrize("chances", [False, True])
def test_yes_or_no_with_one_output_has_an_accuracy(chances: bool) -> None:
    link = nn.Sigmoid() if chances else nn.Identity()
    loss = nn.BCELoss() if chances else nn.BCEWithLogitsLoss()
    model = SplitModel(nn.Sequential(*regression().children(), link), "2.*", loss)
    y = torch.tensor([0, 1, 0, 1, 1])
    at = (model.initial_w(), model.initial_theta(), (NUMBERS[0], y))
    assert np.linalg.norm(model.gradients(*at, "mean")[0]) > 0
    with torch.no_grad():
        yes = regression()(NUMBERS[0].double())[:, 0] > 0
    assert model.evaluate(*at)["accuracy"] == float((yes == (y == 1)).double().mean())


@pytest.mark.parametrize(
    ("loss", "outputs", "y", "words"),
    [
        ("softmax", 1, torch.tensor([0, 1, 0, 1, 1]), r"an output for each class.*BCEWithLogits"),
        ("softmax", 3, torch.arange(5.0), r"needs class numbers, got targets of torch.float64"),
        ("softmax", 3, torch.tensor([0, 1, 2, 3, 0]), r"Target 3 is out of bounds.*3 outputs"),
        ("squared", 3, torch.arange(5.0), r"\(5,\) and predictions of shape \(5, 3\).*softmax"),
        ("soft-max", 3, torch.arange(5), "did you mean 'softmax'"),
    ],
)
def test_losses_say_what_does_not_fit(loss: str, outputs: int, y: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gradients_with(loss, rows=(NUMBERS[0], y), k=outputs)


# Precision and devices


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_and_double_precision(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    stepped(module, "2.*", [(torch.randn(6, 4), CLASSES)])
    arrays = SplitModel(module, "2.*").initial_arrays()
    assert {array.dtype for array in arrays.values()} <= {"float32", "float64"}
    again = whole_module(module, arrays, "2.*")
    for name, value in module.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value)


class Adapted(nn.Module):
    """As with adapters: a frozen backbone in half precision under a float32 head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 5).to(torch.bfloat16).requires_grad_(False)
        self.adapter = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = self.backbone(x).float()
        return self.head(features + self.adapter(features))  # type: ignore[no-any-return]


def test_a_frozen_half_precision_backbone_is_part_of_neither_block() -> None:
    stepped(Adapted(), "head.*", [(torch.randn(6, 4), CLASSES)])
    shared = list(SplitModel(Adapted(), "head.*").initial_arrays())
    assert shared == ["adapter.weight", "adapter.bias"]


def test_devices_and_parameters_without_values() -> None:
    module = regression(3)
    for device in ("auto", "cpu", torch.device("cpu"), None):
        SplitModel(module, "2.*", device=device)
    with torch.device("meta"):
        without_values = regression(3)
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2), nn.Linear(2, 2))
    for empty in (without_values, lazy):
        with pytest.raises(ValueError, match=r"'0.weight' has no values yet: load .* lazy layers"):
            SplitModel(empty, "2.*")
