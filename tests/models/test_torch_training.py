"""A network with one user's data: ``PPSGD.auto`` with solved or trained parts, θ's own steps."""

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_ppsgd import (
    PPSGD,
    AdditiveHead,
    Minibatches,
    Order,
    RandomConvolution,
    SplitModel,
    personalize,
    shared_arrays,
    torch_client,
    torch_learner,
)
from flwr_ppsgd.client.theta_store import STATE_MODEL
from flwr_ppsgd.client.visit import answer_before, respond
from flwr_ppsgd.learner import OWN_THETA, OWN_W, PersonalStepper, Solver
from flwr_ppsgd.models.mixture import personal_models
from flwr_ppsgd.models.solve import OwnProblem, PublicColumns, solution
from flwr_ppsgd.models.torch_training import LOCAL_EPOCHS, LOCAL_STEP
from flwr_ppsgd.recipe import SCALAR_BOUND, scalar_pair
from flwr_ppsgd.simulation import InProcessGrid
from tests.support.toy import Floats

ROWS, WIDTH, FEATURES, CLASSES, USERS = 16, 6, 5, 3, 3
ORDER = Order(1, 0.0, 1.0, "mean", True, asks="solution", task="classification", size=1.0, visit=1)
NO_NOISE = np.zeros(1)


class Network(nn.Module):
    """A body, frozen or not, under a linear layer."""

    def __init__(self, frozen: bool = True, bias: bool = True, outputs: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDTH, FEATURES), nn.Tanh())
        self.body.requires_grad_(not frozen)
        self.head = nn.Linear(FEATURES, outputs, bias=bias)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(x))
        return scores


def trained_body() -> Network:
    return Network(frozen=False)


def rows(user: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(user)
    x = torch.randn(ROWS, WIDTH, generator=source, dtype=torch.float64)
    return x, x[:, :CLASSES].argmax(dim=1)


def loaders(context: Context) -> tuple[Any, Any]:
    user = int(context.node_config["partition-id"])
    train = DataLoader(TensorDataset(*rows(user)), batch_size=8, shuffle=True)
    return train, [rows(100 + user)]


def learner(module: nn.Module, **options: Any) -> Any:
    x, y = rows()
    test = options.pop("test", [rows(100)])
    return torch_learner(module, "head.*", [(x, y)], test, additive=True, **options)


def w_of(module: nn.Module, personal: str = "head.*") -> Any:
    return SplitModel(module, personal, additive=True).initial_w()


def columns(bias: bool) -> PublicColumns:
    none = np.zeros(FEATURES, dtype=np.bool_)
    return PublicColumns("classification", none, none, CLASSES, ones=bias)


def seen(module: Network, x: Tensor) -> Any:
    with torch.no_grad():
        return module.body(x).numpy()


def matrix(module: Network) -> Any:
    """The head as columns × outputs, written out."""
    weight = module.head.weight.detach().numpy().T
    if module.head.bias is None:
        return weight
    return np.vstack([weight, module.head.bias.detach().numpy()[None]])


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_on_a_frozen_body_is_solved_on_its_features(bias: bool) -> None:
    module = Network(bias=bias)
    x, y = rows()
    own = learner(module)
    assert isinstance(own, Solver)
    problem = OwnProblem.of(seen(module, x), y.numpy(), columns(bias))
    expected = solution(problem, matrix(module))
    found = own.solution(w_of(module), ORDER)
    weight = found[: FEATURES * CLASSES].reshape(CLASSES, FEATURES)
    np.testing.assert_allclose(weight.T, expected[:FEATURES], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found[FEATURES * CLASSES :], expected[FEATURES:].ravel(), rtol=1e-9)
    mixture = personal_models(problem, matrix(module), NO_NOISE)[""]
    other, classes = rows(100)
    right = mixture.predict(seen(module, other)).argmax(axis=1) == classes.numpy()
    measures = own.personal_model(w_of(module), NO_NOISE, ORDER).measures()
    assert measures["accuracy"] == right.mean()
    prefixes = itertools.product(("", "local_", "shared_"), ("loss", "accuracy"))
    assert set(measures) == {"".join(names) for names in prefixes}


def test_an_additive_head_is_solved_if_its_network_is_frozen() -> None:
    body = Network().body
    x, y = rows()
    model = AdditiveHead(body, FEATURES, CLASSES)
    own = model.learner(Minibatches(x, y, 7, seed=0, user=0))
    w = np.arange(FEATURES * CLASSES) / 10.0
    problem = OwnProblem.of(body(x).numpy(), y.numpy(), columns(False))
    expected = solution(problem, w.reshape(CLASSES, FEATURES).T).T.reshape(-1)
    np.testing.assert_allclose(own.solution(w, ORDER), expected, rtol=1e-9, atol=1e-12)


def test_a_shared_layer_under_a_personal_body_is_solved_too() -> None:
    module = trained_body()
    own = torch_learner(module, "body.*", [rows()])
    w = SplitModel(module, "body.*").initial_w()
    frozen = learner(Network()).solution(w, ORDER)
    np.testing.assert_allclose(own.solution(w, ORDER), frozen, rtol=1e-9)


def test_local_epochs_add_to_w_what_adam_adds_to_the_network() -> None:
    module = trained_body()
    own = learner(module)
    w = w_of(module)
    found = own.solution(w, ORDER)
    x, y = rows()
    after = trained(module, module, torch.optim.Adam, (x, y), LOCAL_EPOCHS, lr=LOCAL_STEP)
    np.testing.assert_allclose(found, after - w, rtol=1e-6, atol=1e-12)
    model = SplitModel(module, "head.*", additive=True)
    theta = model.initial_theta()
    before = model.evaluate(w, theta, (x, y))["loss"]
    sent, _, _ = respond(own, w, theta, ORDER)
    assert sent is not None
    moved = w - sent  # the server subtracts what is sent
    assert model.evaluate(moved, theta, (x, y))["loss"] < before


def test_the_users_optimizer_makes_the_local_epochs() -> None:
    own = learner(trained_body(), optimizer=functools.partial(torch.optim.SGD, lr=0.0))
    assert not own.solution(w_of(trained_body()), ORDER).any()


def test_the_size_is_asked_at_w_where_zero_is_no_model() -> None:
    asked = replace(ORDER, round=0, clip_norm=SCALAR_BOUND, asks="size")
    for module, factor in ((trained_body(), 1), (Network(), 0)):
        own, w = learner(module), w_of(module)
        expected = scalar_pair(float(np.linalg.norm(own.solution(factor * w, asked))))
        np.testing.assert_allclose(answer_before(own, w, asked), expected)


@pytest.mark.parametrize(
    ("loss", "outputs", "task"),
    [
        ("softmax", 3, "classification"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), 3, "classification"),
        (nn.BCEWithLogitsLoss(), 1, "classification"),
        ("squared", 1, "regression"),
        (nn.MSELoss(), 1, "regression"),
        (nn.L1Loss(), 1, "regression"),
        ("squared", 3, "classification"),
    ],
)
def test_the_loss_says_what_the_task_is(loss: Any, outputs: int, task: str) -> None:
    x, y = rows()
    targets = y if task == "classification" and outputs > 1 else y.double() / 2
    if (loss, outputs) == ("squared", 3):
        targets = nn.functional.one_hot(y, 3).double()
    module = Network(outputs=outputs)
    own = torch_learner(module, "head.*", [(x, targets)], additive=True, loss=loss)
    assert own.task == task
    found = own.solution(w_of(module), replace(ORDER, task=own.task))
    assert np.isfinite(found).all()
    assert found.any()
    own = torch_learner(module, "head.*", [(x, targets)], additive=True, task="regression")
    assert own.task == "regression"


def test_a_head_below_a_log_softmax_is_solved() -> None:
    module = nn.Sequential(Network(), nn.LogSoftmax(dim=1))
    own = torch_learner(module, "0.head.*", [rows()], additive=True, loss=nn.NLLLoss())
    w = w_of(Network())
    np.testing.assert_array_equal(own.solution(w, ORDER), learner(Network()).solution(w, ORDER))


@pytest.mark.parametrize("kind", [nn.Identity(), nn.Sigmoid(), nn.Flatten(0)], ids=str)
def test_yes_or_no_is_solved_as_two_classes_are(kind: nn.Module) -> None:
    """One output for yes is half the difference of two outputs, below a sigmoid too."""
    x, y = rows()
    yes = (y == 0).long()
    w = np.linspace(-0.1, 0.1, FEATURES + 1)
    network = Network(outputs=1)
    loss = nn.BCELoss() if isinstance(kind, nn.Sigmoid) else nn.BCEWithLogitsLoss()
    train, test = [(x, yes.float())], [(x, yes)]
    module = nn.Sequential(network, kind)
    own = torch_learner(module, "0.head.*", train, test, additive=True, loss=loss)
    found = own.personal_model(w, NO_NOISE, ORDER).measures()
    problem = OwnProblem.of(seen(network, x), yes.numpy(), replace(columns(True), outputs=2))
    both = np.stack([-w, w], axis=1)
    np.testing.assert_allclose(own.solution(w, ORDER), solution(problem, both)[:, 1], rtol=1e-9)
    mixture = personal_models(problem, both, NO_NOISE)[""]
    right = mixture.predict(seen(network, x)).argmax(axis=1) == yes.numpy()
    assert found["accuracy"] == right.mean()
    assert {"local_accuracy", "shared_accuracy", "loss"} <= set(found)


def test_own_rows_alone_are_measured_on_the_network_as_it_was_made() -> None:
    """A trained body has seen what others have; w has no part in ``local_…``."""
    w = w_of(trained_body())
    head = w[-(FEATURES + 1) * CLASSES :]
    frozen = learner(Network()).personal_model(head, NO_NOISE, ORDER).measures()
    own = learner(trained_body())
    found = own.personal_model(np.cos(np.arange(w.size)), NO_NOISE, ORDER).measures()
    assert found["local_accuracy"] == frozen["local_accuracy"]
    assert found["local_loss"] == pytest.approx(frozen["local_loss"], rel=1e-9)


def test_numbers_are_predicted_in_their_own_units() -> None:
    x, _ = rows()
    y = 50 + 10 * x[:, 0]
    module = Network(outputs=1)
    own = torch_learner(module, "head.*", [(x, y)], [(x, y)], additive=True, loss="squared")
    assert own.spread() == pytest.approx(float(y.std()))
    order = Order(1, 0.0, 1.0, "mean", True, asks="solution", task="regression", unit=10.0)
    model = own.personal_model(np.zeros(FEATURES + 1), NO_NOISE, order)
    assert model.measures()["loss"] < 0.1 * 0.5 * float(y.var())


def test_a_personal_part_that_is_no_linear_layer_is_trained() -> None:
    model = SplitModel(trained_body(), "body.*", additive=True)
    x, y = rows()
    own = model.learner(Minibatches(x, y, 8, seed=0, user=0), (x, y))
    w = model.initial_w()
    measures = own.personal_model(w, NO_NOISE, ORDER).measures()
    assert measures["loss"] < measures["shared_loss"]
    assert not any(name.startswith("local_") for name in measures)
    with pytest.raises(ValueError, match=r"one linear layer at the end.*use PersonalModel.module"):
        model.features(w, x)


def records_of(reply: Message) -> dict[str, int | None]:
    """What a reply holds: the number of values of arrays, by the name of their record."""
    return {
        name: sum(array.size for array in record.to_numpy_ndarrays())
        if isinstance(record, ArrayRecord)
        else None
        for name, record in reply.content.items()
    }


@pytest.mark.parametrize(
    ("network", "personal", "rounds"),
    [(Network, "head.*", 2), (trained_body, "head.*", 4), (trained_body, "body.*", 4)],
)
def test_auto_trains_a_network_and_leaves_every_device_its_model(
    network: Any, personal: str, rounds: int
) -> None:
    """What leaves is w's size, or one number: nothing of θ, nor of the personal model."""
    client = torch_client(network, personal, loaders, additive=True)
    sent: list[dict[str, int | None]] = []

    def noting(message: Message, context: Context) -> Message:
        reply = client(message, context)
        sent.append(records_of(reply))
        return reply

    grid = InProcessGrid(noting, USERS)  # type: ignore[arg-type]  # it is called as an app is
    strategy = PPSGD.auto(
        population=USERS, epsilon=8.0, delta=1e-2, evaluate_every=rounds, body=rounds == 4
    )
    result = strategy.start(grid, shared_arrays(network(), personal, additive=True))
    assert len(result.train_metrics_clientapp) == rounds
    assert {"accuracy", "shared_accuracy"} <= set(result.evaluate_metrics_clientapp[rounds])
    w = np.concatenate([array.reshape(-1) for array in result.arrays.to_numpy_ndarrays()])
    for node in grid.get_node_ids():
        kept = grid.context(node).state[STATE_MODEL]
        assert isinstance(kept, ArrayRecord)
        np.testing.assert_allclose(kept[OWN_W].numpy(), w, rtol=1e-12)
        assert (OWN_THETA in kept) == (personal == "body.*")
    assert sent.count({"gradient": w.size}) == rounds * USERS
    assert sent.count({"gradient": 2}) == USERS
    others = [each for each in sent if "gradient" not in each]
    assert all(each in ({}, {"metrics": None}) for each in others)
    own = torch_learner(network(), personal, [rows()], additive=True)
    newcomer = personalize(strategy.published(result.arrays), own)
    if personal == "body.*":
        assert newcomer.theta.any()
        return
    model = SplitModel(network(), personal, additive=True)
    scores = newcomer.predict(model.features(newcomer.shared, rows()[0]))
    assert scores.shape == (ROWS, CLASSES)


def unseeded() -> nn.Module:
    body = nn.Linear(WIDTH, FEATURES).requires_grad_(False)
    return nn.Sequential(body, nn.Linear(FEATURES, CLASSES)).double()


def test_clients_have_the_same_frozen_body() -> None:
    """Its values come from a public seed, whatever a client has drawn before."""
    trained = []
    for seed in range(2):
        torch.manual_seed(seed)
        grid = InProcessGrid(torch_client(unseeded, "1.*", loaders, additive=True), USERS)
        strategy = PPSGD.auto(population=USERS, epsilon=float("inf"), delta=1e-2)
        w = ArrayRecord({"1.weight": Array(np.zeros((3, 5))), "1.bias": Array(np.zeros(3))})
        trained.append(strategy.start(grid, w).arrays.to_numpy_ndarrays()[0])
        assert torch.initial_seed() == seed
    np.testing.assert_array_equal(trained[0], trained[1])


def test_random_convolutions_are_a_network_with_a_solved_head() -> None:
    x = torch.rand(10, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    phi = RandomConvolution(50, shape=(12, 12, 3))
    features = phi(x.movedim(1, -1).flatten(1).double().numpy())
    module, again = phi.network(CLASSES), phi.network(CLASSES)
    found, other = (SplitModel(each, "head.*", additive=True) for each in (module, again))
    w = found.initial_w()
    assert not w.any()
    np.testing.assert_allclose(found.features(w, x), features, atol=1e-6)
    batches = [(x, torch.arange(10) % CLASSES)]
    own = torch_learner(module, "head.*", batches, batches, additive=True)
    assert own.personal_model(w, NO_NOISE, ORDER).measures()["local_accuracy"] >= 0
    np.testing.assert_array_equal(other.features(w, x), found.features(w, x))
    # float32 products, whose last bits depend on an image's place among others on some processors
    np.testing.assert_allclose(other.features(w, x.flip(0)), features[::-1], atol=1e-6)
    with pytest.raises(ValueError, match="needs the images' shape"):
        RandomConvolution().network(3)


# θ's own steps

X = torch.arange(12.0, dtype=torch.float64).reshape(6, 2) / 10
Y = torch.arange(6) % 3


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def split() -> SplitModel:
    return SplitModel(small(), "2.*")


def order(step: float = 0.1) -> Order:
    return Order(1, step, 1.0, "mean", True, visit=1)


def own_learner(**options: Any) -> Any:
    """All rows in every minibatch."""
    return split().learner(Minibatches(X, Y, 6, seed=0, user=0), **options)


def after(step: float = 0.1, **options: Any) -> Floats:
    own = own_learner(**options)
    found: Floats = own.personal_step(split().initial_w(), own.initial_theta(), order(step))
    return found


def gradient(theta: Floats) -> Floats:
    return split().gradients(split().initial_w(), theta, (X, Y), "mean")[1]


def test_without_options_theta_takes_the_algorithms_own_step() -> None:
    assert not isinstance(own_learner(), PersonalStepper)
    assert isinstance(own_learner(personal_steps=2), PersonalStepper)


@pytest.mark.parametrize(
    ("steps", "decay", "optimizer"), [(1, 0.0, torch.optim.SGD), (3, 0.5, None)]
)
def test_steps_by_hand(steps: int, decay: float, optimizer: Any) -> None:
    """θ ← θ − s_θ·(g_θ + λθ); a class of optimizers takes the server's s_θ."""
    theta = split().initial_theta()
    for _ in range(steps):
        theta = theta - 0.1 * (gradient(theta) + decay * theta)
    found = after(personal_steps=steps, weight_decay=decay, optimizer=optimizer)
    np.testing.assert_allclose(found, theta, rtol=1e-10)


def trained(
    network: Any, part: Any, factory: Any, batch: Any = (X, Y), steps: int = 4, **options: Any
) -> Floats:
    """A part of a network after torch has trained it."""
    optimizer = factory(part.parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found: Floats = nn.utils.parameters_to_vector(part.parameters()).detach().numpy()
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.Adam, {"lr": 0.05}), (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})],
)
def test_any_optimizer_moves_theta_as_torch_moves_a_head(kind: Any, options: Any) -> None:
    found = after(optimizer=functools.partial(kind, **options), personal_steps=4)
    network: Any = small()
    expected = trained(network, network[2], kind, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_an_optimizer_that_needs_a_closure() -> None:
    found = after(optimizer=functools.partial(torch.optim.LBFGS, max_iter=5))
    losses = [
        split().evaluate(split().initial_w(), theta, (X, Y))["loss"]
        for theta in (found, split().initial_theta())
    ]
    assert losses[0] < losses[1]


def test_global_learning_leaves_theta_alone() -> None:
    """s_θ = 0, the limit α = ∞."""
    found = after(step=0.0, optimizer=functools.partial(torch.optim.Adam, lr=1.0))
    np.testing.assert_array_equal(found, split().initial_theta())


def test_a_factory_that_makes_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"returned a list: return a torch.optim.Optimizer"):
        after(optimizer=lambda parameters: parameters)


def test_theta_that_is_added_moves_as_torch_moves_the_layer() -> None:
    """w + θ after five steps is the head that torch trains on the same minibatches."""
    own = torch_learner(small(), "2.*", [(X, Y)], additive=True, personal_steps=5)
    w = w_of(small(), "2.*")
    theta = own.personal_step(w, own.initial_theta(), order())  # type: ignore[attr-defined]
    network: Any = small()
    expected = trained(network, network[2], torch.optim.SGD, steps=5, lr=0.1)
    np.testing.assert_allclose(w[-theta.size :] + theta, expected, rtol=1e-10)
