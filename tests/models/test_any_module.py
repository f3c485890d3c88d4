"""Modules as their owners have them: layouts, inputs, outputs, losses, precision, devices."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flwr_ppsgd import Order, SplitModel, torch_learner, whole_module
from flwr_ppsgd.models.torch_model import AdditiveHead
from flwr_ppsgd.models.torch_training import SplitLearner
from flwr_ppsgd.wire import Layout
from tests.support.toy import Floats

ORDER = Order(1, 0.1, 1.0, "mean", True, visit=1)


def flat_w(learner_or_module: nn.Module, personal: Any) -> Floats:
    return SplitModel(learner_or_module, personal).initial_w()


def stepped(module: nn.Module, personal: Any, batches: Any, **options: Any) -> SplitLearner:
    """A learner that has given finite gradients once."""
    learner = torch_learner(module, personal, batches, batches, **options)
    w = flat_w(module, personal)
    g_w, g_theta = learner.gradients(w, learner.initial_theta(), ORDER)
    assert np.isfinite(g_w).all()
    assert np.isfinite(g_theta).all()
    assert np.linalg.norm(g_w) > 0
    assert np.isfinite(learner.evaluate(w, learner.initial_theta())["loss"])
    return learner


def images(rows: int = 6) -> Tensor:
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def classes(rows: int = 6) -> Tensor:
    return torch.arange(rows) % 3


class ViewNet(nn.Module):
    """Flattens with ``view``, which fails on channels-last tensors."""

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
        return Output(logits=self.head(summed / mask.sum(dim=1)), hidden=summed)


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


def token_batch() -> dict[str, Tensor]:
    ids = torch.arange(24).reshape(6, 4) % 11
    return {"labels": classes(), "attention_mask": torch.ones(6, 4), "input_ids": ids}


def test_a_network_that_calls_view_learns() -> None:
    stepped(ViewNet(), ["head.*"], [(images(), classes())])


def test_the_gradients_do_not_depend_on_the_layout() -> None:
    """The same network from torch's own layers is computed channels-last."""
    torch.manual_seed(0)
    ours = ViewNet()
    layers = [ours.conv, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), ours.head]
    torchs = nn.Sequential(*layers)
    rows = (images(), classes())
    models = [SplitModel(ours, "head.*"), SplitModel(torchs, "4.*")]
    found = [
        each.gradients(each.initial_w(), each.initial_theta(), rows, "mean") for each in models
    ]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_hook_that_calls_view_is_served_too() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    network[0].register_forward_hook(lambda *given: given[2].view(-1, 144).view(-1, 4, 6, 6))
    stepped(network, "2.*", [(images(), classes())])


def test_predictions_reach_a_loss_in_the_usual_layout() -> None:
    """Four axes: a loss of the user's that calls ``view``."""

    def loss(prediction: Tensor, y: Tensor) -> Tensor:
        return (prediction.view(6, -1) - y.view(6, -1)).pow(2).mean(dim=1)

    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    stepped(network, "1.*", [(images(), torch.zeros(6, 2, 4, 4))], loss=loss)


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_whole_numbers_stay_whole_and_several_inputs_go_by_keyword(kind: type) -> None:
    learner = stepped(Tokens(), "head.*", [kind(token_batch())])
    assert set(learner.evaluate(flat_w(Tokens(), "head.*"), learner.initial_theta())) == {
        "loss",
        "accuracy",
    }


def test_several_inputs_of_a_tuple_go_by_position() -> None:
    batch = token_batch()
    triple = (batch["input_ids"], batch["attention_mask"], batch["labels"])
    stepped(Tokens(), "head.*", [triple], inputs=[0, 1], target=2)
    nested = ((batch["input_ids"], batch["attention_mask"]), batch["labels"])
    for pair in (nested, [list(nested[0]), nested[1]]):  # torch's loaders make lists of tuples
        stepped(Tokens(), "head.*", [pair])
    inner = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    stepped(Tokens(), "head.*", [(inner, batch["labels"])])


@pytest.mark.parametrize("name", ["label", "labels", "target", "targets", "y"])
@pytest.mark.parametrize("first", [True, False])
def test_a_target_is_known_by_its_usual_names_in_any_order(name: str, first: bool) -> None:
    parts = {name: classes(), "img": images()}
    if not first:
        parts = dict(reversed(parts.items()))
    stepped(ViewNet(), "head.*", [parts])


def test_other_names_are_given() -> None:
    batch = {"pixels": images(), "digit": classes(), "writer": ["ada"] * 6}
    stepped(ViewNet(), "head.*", [batch], inputs="pixels", target="digit")
    with pytest.raises(ValueError, match=r"parts \['digit', 'pixels', 'writer'\].*target="):
        torch_learner(ViewNet(), "head.*", [batch])
    with pytest.raises(ValueError, match=r"inputs=\['picture'\].*name parts that it has"):
        torch_learner(ViewNet(), "head.*", [batch], inputs="picture", target="digit")
    with pytest.raises(ValueError, match=r"part 'writer' of a batch is no tensor.*inputs="):
        torch_learner(ViewNet(), "head.*", [batch], target="digit")


def test_inputs_that_forward_does_not_take_are_named_on_both_sides() -> None:
    batch = {**token_batch(), "token_type_ids": torch.zeros(6, 4, dtype=torch.long)}
    learner = torch_learner(Tokens(), "head.*", [batch])
    with pytest.raises(ValueError, match=r"'token_type_ids'\] and Tokens.forward takes \['input"):
        learner.gradients(flat_w(Tokens(), "head.*"), learner.initial_theta(), ORDER)


@pytest.mark.parametrize("wrap", [lambda x: {"logits": x}, lambda x: Output(x, x), lambda x: x])
def test_predictions_are_found_in_what_a_network_returns(wrap: Any) -> None:
    class Wrapped(ViewNet):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x))

    stepped(Wrapped(), "head.*", [(images(), classes())])


def test_an_output_without_predictions_is_refused() -> None:
    class Pair(ViewNet):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    learner = torch_learner(Pair(), "head.*", [(images(), classes())])
    with pytest.raises(ValueError, match="Pair returned a tuple without logits"):
        learner.gradients(flat_w(Pair(), "head.*"), learner.initial_theta(), ORDER)


def regression(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).double()


NUMBERS = (torch.arange(10.0).reshape(5, 2), torch.arange(5.0))


def gradients_with(loss: Any, reduction: Any = "mean", rows: Any = NUMBERS) -> Floats:
    model = SplitModel(regression(), "2.*", loss)
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


def test_a_loss_that_is_neither_mean_nor_sum_is_refused() -> None:
    with pytest.raises(ValueError, match=r'neither the mean .* nor the sum .* reduction="none"'):
        gradients_with(lambda p, y: (p - y).square().sum().sqrt())


def test_one_dimensional_targets_and_predictions_fit_one_output() -> None:
    """y of shape (5,) against (5, 1) must not become 5 × 5 numbers."""
    expected = gradients_with("squared")
    column = (NUMBERS[0], NUMBERS[1][:, None])
    np.testing.assert_array_equal(gradients_with("squared", rows=column), expected)
    flat = nn.Sequential(regression(), nn.Flatten(0))
    model = SplitModel(flat, "0.2.*", "squared")
    rows = (NUMBERS[0], NUMBERS[1])
    g_w, _ = model.gradients(model.initial_w(), model.initial_theta(), rows, "mean")
    np.testing.assert_allclose(g_w, expected)


def test_yes_or_no_with_one_output() -> None:
    rows = (NUMBERS[0], torch.tensor([0, 1, 0, 1, 1]))
    assert np.linalg.norm(gradients_with(nn.BCEWithLogitsLoss(), rows=rows)) > 0


@pytest.mark.parametrize(
    ("outputs", "y", "words"),
    [
        (1, torch.tensor([0, 1, 0, 1, 1]), r"needs an output for each class.*BCEWithLogitsLoss"),
        (3, torch.arange(5.0), r"needs class numbers, got targets of torch.float64.*squared"),
        (3, torch.tensor([0, 1, 2, 3, 0]), r"Target 3 is out of bounds.*3 outputs"),
    ],
)
def test_softmax_says_what_does_not_fit(outputs: int, y: Tensor, words: str) -> None:
    model = SplitModel(regression(outputs), "2.*")
    with pytest.raises(ValueError, match=words):
        model.gradients(model.initial_w(), model.initial_theta(), (NUMBERS[0], y), "mean")


def test_squared_with_class_numbers_for_several_outputs_is_refused() -> None:
    model = SplitModel(regression(3), "2.*", "squared")
    with pytest.raises(ValueError, match=r"\(5,\) and predictions of shape \(5, 3\).*softmax"):
        model.gradients(model.initial_w(), model.initial_theta(), NUMBERS, "mean")


def test_an_unknown_loss_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'softmax'"):
        SplitModel(regression(3), "2.*", "soft-max")  # type: ignore[arg-type]


def test_scores_for_every_word_of_a_text() -> None:
    """samples × places × classes, as language models return them."""
    network = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    words = torch.arange(12).reshape(3, 4) % 7
    stepped(network, "1.*", [(words, words)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_and_double_precision(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    rows = (torch.randn(6, 4), classes())
    stepped(module, "2.*", [rows])
    arrays = SplitModel(module, "2.*").initial_arrays()
    assert {array.dtype for array in arrays.values()} <= {"float32", "float64"}
    again = whole_module(module, arrays, "2.*")
    for name, value in module.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value)


def test_a_frozen_half_precision_backbone_under_a_float32_head() -> None:
    """As with adapters: the backbone is part of neither block."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Linear(4, 5).to(torch.bfloat16).requires_grad_(False)
            self.adapter = nn.Linear(5, 5)
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            features = self.backbone(x).float()
            return self.head(features + self.adapter(features))  # type: ignore[no-any-return]

    stepped(Adapted(), "head.*", [(torch.randn(6, 4), classes())])
    assert list(SplitModel(Adapted(), "head.*").initial_arrays()) == [
        "adapter.weight",
        "adapter.bias",
    ]


def test_devices() -> None:
    module = regression(3)
    for device in ("auto", "cpu", torch.device("cpu"), None):
        SplitModel(module, "2.*", device=device)
    with pytest.raises(ValueError, match="\"auto\" or a torch device, got 'gpu'"):
        SplitModel(module, "2.*", device="gpu")
    with pytest.raises(ValueError, match="meta"):
        SplitModel(module, "2.*", device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="sees no GPU"):
            SplitModel(module, "2.*", device="cuda:0")


def test_parameters_without_values_are_refused() -> None:
    with torch.device("meta"):
        module = regression(3)
    with pytest.raises(ValueError, match=r"'0.weight' is on the meta device.*load_state_dict"):
        SplitModel(module, "2.*")
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet"):
        SplitModel(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)), "1.*")


def test_an_additive_head_over_a_network_with_several_inputs() -> None:
    model = AdditiveHead(Tokens(), 3, 3)
    batch = token_batch()
    y = batch.pop("labels")
    g_w, _ = model.gradients(model.initial_w(), model.initial_theta() + 1, (batch, y), "mean")
    assert np.linalg.norm(g_w) > 0


def test_w_and_theta_make_a_whole_module() -> None:
    """Saved and loaded with strict=True; a list of arrays, as the legacy API has it, too."""
    model = SplitModel(ViewNet(), "head.*")
    w = model.initial_w() + 1.0
    theta = model.initial_theta() - 1.0
    arrays = Layout.of(model.initial_arrays()).unflatten(w)
    for given in (arrays, arrays.to_numpy_ndarrays()):
        whole = whole_module(ViewNet(), given, "head.*", theta)
        loaded = ViewNet()
        loaded.load_state_dict(whole.state_dict(), strict=True)
        np.testing.assert_allclose(SplitModel(loaded, "head.*").initial_w(), w, rtol=1e-6)
        np.testing.assert_allclose(SplitModel(loaded, "head.*").initial_theta(), theta, rtol=1e-6)
        assert not whole.training
    own = ViewNet()
    torch.testing.assert_close(whole_module(own, arrays, "head.*").head.weight, own.head.weight)  # type: ignore[union-attr]


def test_other_personal_layers_are_named_on_both_sides() -> None:
    arrays = SplitModel(ViewNet(), "conv.*").initial_arrays()
    words = r"server's w has \['head.bias', 'head.weight'\] .* lacks \['conv.bias', 'conv.weight'\]"
    with pytest.raises(ValueError, match=words):
        whole_module(ViewNet(), arrays, "head.*")
    learner = torch_learner(ViewNet(), "head.*", [(images(), classes())])
    with pytest.raises(ValueError, match=r"personal=\['head.\*'\], additive=False on this client"):
        learner.check_shared(Layout.of(arrays).shape_of)
    learner.check_shared({"conv.weight": (4, 3, 3, 3), "conv.bias": (4,)})
    learner.check_shared({"0": (4, 3, 3, 3), "1": (4,)})
    words = r"'conv.bias' has shape \(5,\) in the server's w and \(4,\) in this client's"
    with pytest.raises(ValueError, match=words):
        learner.check_shared({"conv.bias": (5,), "conv.weight": (5, 3, 3, 3)})


def test_theta_may_be_added_to_layers_that_are_shared() -> None:
    """w + θ in the head: shifting either gives the same loss, and g_θ is that part of g_w."""
    model = SplitModel(regression(3), "2.*", additive=True)
    assert list(model.initial_arrays()) == list(regression(3).state_dict())
    assert not model.initial_theta().any()
    rows = (NUMBERS[0], torch.arange(5) % 3)
    w = model.initial_w()
    theta = np.linspace(-1, 1, 12)
    shifted = w + np.pad(theta, (w.size - 12, 0))
    one = model.evaluate(shifted, 0 * theta, rows)["loss"]
    assert model.evaluate(w, theta, rows)["loss"] == pytest.approx(one, rel=1e-12)
    g_w, g_theta = model.gradients(w, theta, rows, "mean")
    np.testing.assert_array_equal(g_w[-12:], g_theta)
    np.testing.assert_allclose(model.gradients(shifted, 0 * theta, rows, "mean")[0], g_w)


def test_the_engine_of_networks_adds_theta_too() -> None:
    from flwr_ppsgd.lab.network_engine import cohort_gradients

    model = SplitModel(regression(3), "2.*", additive=True)
    rows = (NUMBERS[0], torch.arange(5) % 3)
    w = model.initial_w()
    theta = np.linspace(-1, 1, 12)
    g_w, g_theta = model.gradients(w, theta, rows, "mean")
    batch = (model.tensor(rows[0][None]), rows[1][None])
    both = cohort_gradients(model, w, theta[None], batch, "mean")
    np.testing.assert_allclose(both[0][0], g_w, atol=1e-12)
    np.testing.assert_allclose(both[1][0], g_theta, atol=1e-12)


def test_a_whole_module_with_theta_added() -> None:
    model = SplitModel(regression(3), "2.*", additive=True)
    theta = np.arange(12.0)
    arrays = model.initial_arrays()
    whole = whole_module(regression(3), arrays, "2.*", theta)
    expected = model.initial_w() + np.pad(theta, (9, 0))
    found = SplitModel(whole, "2.*", additive=True).initial_w()
    np.testing.assert_allclose(found, expected)
    alone = whole_module(regression(3), arrays.to_numpy_ndarrays(), "2.*")
    np.testing.assert_array_equal(
        SplitModel(alone, "2.*", additive=True).initial_w(), model.initial_w()
    )
