"""One ClientApp under any strategy, one strategy over any ClientApp."""

import logging
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import arrays_size_mod, fixedclipping_mod
from flwr.common import NDArrays
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    FedProx,
    Strategy,
)
from torch import nn

from flwr_ppsgd import Steps, client_app
from flwr_ppsgd.simulation import InProcessGrid
from tests.support.kept import kept_by
from tests.support.toy import SIZE, flat, grid, opened, release, strategy, target, toy_learner, w0

serves_all = client_app(toy_learner, local_step=0.5, local_steps=2)


@pytest.mark.parametrize(
    "stock",
    [
        FedAvg(),
        FedAdam(eta=0.1),
        FedProx(proximal_mu=0.1),
        FedMedian(),
        DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.01, 10.0, 5),
    ],
    ids=lambda s: type(s).__name__,
)
def test_the_same_client_app_serves_stock_strategies(stock: Strategy) -> None:
    """Training moves w toward the users' targets, and evaluation is answered."""
    result = stock.start(InProcessGrid(serves_all, 5), w0(), num_rounds=3)
    centre = np.mean([target(i) for i in range(5)], axis=0)
    assert np.linalg.norm(flat(result.arrays) - centre) < np.linalg.norm(centre)
    assert result.evaluate_metrics_clientapp[3]["distance"] >= 0  # type: ignore[operator]


def test_local_steps_under_fedavg_by_hand() -> None:
    """Two steps of .5 on ½(w − y)² leave a quarter of the distance: FedAvg's w is .75 of the mean
    target."""
    result = FedAvg().start(InProcessGrid(serves_all, 5), w0(), num_rounds=1)
    np.testing.assert_allclose(
        flat(result.arrays), 0.75 * np.mean([target(i) for i in range(5)], axis=0)
    )


def test_the_proximal_term_of_fedprox() -> None:
    """Two steps of .5 on ½(w − y)² + (μ/2)(w − w_0)² with μ=1 from w_0=0: .5·y, then .5·y −
    .5·(−.5y + .5y) = .5·y."""
    result = FedProx(proximal_mu=1.0).start(InProcessGrid(serves_all, 5), w0(), num_rounds=1)
    np.testing.assert_allclose(
        flat(result.arrays), 0.5 * np.mean([target(i) for i in range(5)], axis=0)
    )


def test_stock_strategies_leave_theta_alone() -> None:
    on = InProcessGrid(serves_all, 5)
    FedAvg().start(on, w0(), num_rounds=2)
    kept = kept_by(on.context(on.get_node_ids()[0]))
    assert kept is not None
    np.testing.assert_array_equal(kept.theta, 0.0)
    assert kept.visit == 4


def test_a_client_without_local_steps_says_so_under_a_stock_strategy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    on = grid()
    stock = FedAvg()
    for messages in (
        stock.configure_train(1, w0(), ConfigRecord(), on),
        stock.configure_evaluate(1, w0(), ConfigRecord(), on),
    ):
        (reply, *_) = on.send_and_receive(messages)
        assert reply.error.reason == "ClientError: refused-policy: ValueError"
    assert "pass local_step to client_app" in caplog.text


def test_other_record_keys_get_one_clear_line(caplog: pytest.LogCaptureFixture) -> None:
    on = InProcessGrid(serves_all, 5)
    stock = FedAvg(arrayrecord_key="model")
    (reply, *_) = on.send_and_receive(stock.configure_train(1, w0(), ConfigRecord(), on))
    assert reply.error.reason == "ClientError: refused-message: ValueError"
    assert "no ArrayRecord 'arrays' in a message that holds ['config', 'model']" in caplog.text
    assert "arrayrecord_key='arrays'" in caplog.text


def test_client_mods_work_under_both() -> None:
    app = client_app(toy_learner, local_step=0.5, mods=[arrays_size_mod])
    assert np.any(flat(strategy().start(InProcessGrid(app, 5), w0(), num_rounds=1).arrays))
    clipping = client_app(toy_learner, local_step=0.5, mods=[fixedclipping_mod])
    wrapped = DifferentialPrivacyClientSideFixedClipping(
        FedAvg(fraction_evaluate=0.0), 0.01, 1.0, 5
    )
    assert np.any(flat(wrapped.start(InProcessGrid(clipping, 5), w0(), num_rounds=2).arrays))


# An ordinary PyTorch client that knows nothing of this package.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.relu(self.norm(self.hidden(x))))
        return out


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def user_data(partition: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(partition)
    x = torch.randn(32, 4, generator=source)
    return x, (x[:, 0] > 0).long()


ordinary = ClientApp()


@ordinary.train()
def ordinary_train(message: Message, context: Context) -> Message:
    model = net()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    x, y = user_data(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    metrics = MetricRecord(
        {"num-examples": len(x) * (1 + context.node_id % 7), "train_loss": float(loss)}
    )
    more = ArrayRecord([np.full(3, 1e30)])
    content = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics, "secret": more}
    )
    return Message(content, reply_to=message)


def loss_of(arrays: ArrayRecord) -> float:
    model = net()
    model.load_state_dict(arrays.to_torch_state_dict())
    model.train()  # batch statistics: the running ones keep their initial values
    x, y = user_data(99)
    return float(nn.functional.cross_entropy(model(x), y))


def parameters_strategy(**changes: Any) -> Any:
    return strategy(
        **{
            "release": release(clip_norm=5.0),
            "steps": Steps(shared=1.0, personal=0.0),
            "replies": "parameters",
            **changes,
        }
    )


def test_ordinary_clients_are_driven_by_their_parameters() -> None:
    initial = ArrayRecord(net().state_dict())
    result = parameters_strategy().start(InProcessGrid(ordinary, 5), initial, num_rounds=5)
    assert loss_of(result.arrays) < 0.6 * loss_of(initial)


def test_buffers_travel_and_keep_their_initial_values_and_metrics_are_dropped() -> None:
    initial = ArrayRecord(net().state_dict())
    result = parameters_strategy(release=release(clip_norm=5.0, z=1.0)).start(
        InProcessGrid(ordinary, 5), initial, num_rounds=2
    )
    assert list(result.arrays) == list(initial)
    for name, array in initial.items():
        held = "running" in name or "tracked" in name
        assert np.array_equal(result.arrays[name].numpy(), array.numpy()) == held
        assert result.arrays[name].numpy().dtype == array.numpy().dtype
    assert set(result.train_metrics_clientapp[1]) == {"epsilon"}


def test_the_difference_is_clipped_as_the_gradient() -> None:
    """One user replies w − (3, 4)·10 with C=5, D=5: w moves by −(3, 4)/5."""
    ppsgd, on = parameters_strategy(), grid()
    w = np.array([1.0, 2.0, 0.0, 0.0, 0.0, 0.0])
    (message, *_) = opened(ppsgd, on, w0(w))
    replied = w - np.array([30.0, 40.0, 0, 0, 0, 0])
    reply = Message(RecordDict({"arrays": ArrayRecord([replied])}), reply_to=message)
    arrays, _ = ppsgd.aggregate_train(1, [reply])
    np.testing.assert_allclose(flat(arrays) - w, [-0.6, -0.8, 0, 0, 0, 0], rtol=1e-8)


def test_messages_to_ordinary_clients_look_like_flowers_own() -> None:
    """Once they have answered: the first message must reach NumPyClients too."""
    ppsgd, on = parameters_strategy(), grid()
    messages = opened(ppsgd, on)
    assert list(messages[0].content)[:2] == ["arrays", "config"]
    assert messages[0].content.config_records["config"]["server-round"] == 1
    replies = [Message(RecordDict({"arrays": w0()}), reply_to=message) for message in messages]
    arrays, _ = ppsgd.aggregate_train(1, replies)
    (message, *_) = ppsgd.configure_train(2, arrays, ConfigRecord(), on)
    assert list(message.content) == ["arrays", "config"]


class PullsToItsTarget(NumPyClient):
    """Two arrays in, both moved halfway to the user's target out."""

    def __init__(self, user: int) -> None:
        self.user = user

    def fit(self, parameters: NDArrays, config: dict[str, Any]) -> Any:
        assert set(config) == {"server_round", "lr"}
        moved = [array + 0.5 * (target(self.user)[:3] - array) for array in parameters]
        return moved, 10**6, {"loss": 1.0}

    def evaluate(self, parameters: NDArrays, config: dict[str, Any]) -> Any:  # noqa: ARG002
        return 2.0, 10, {"distance": float(np.sum(parameters[0] ** 2))}


def numpy_client(context: Context) -> Client:
    return PullsToItsTarget(int(context.node_config["partition-id"])).to_client()


def failing_client(context: Context) -> Client:
    if context.node_config["partition-id"] == 0:
        raise RuntimeError("no data")
    return numpy_client(context)


def two_arrays() -> ArrayRecord:
    return ArrayRecord({"one": Array(np.zeros(3)), "two": Array(np.ones(3))})


def test_numpy_clients_are_driven_under_the_message_api() -> None:
    """w − w_i = ½(w − y_i), unclipped, without noise: w moves halfway to the mean target."""
    ppsgd = parameters_strategy(evaluate_every=1, release=release(clip_norm=1e3))
    on = InProcessGrid(ClientApp(client_fn=numpy_client), 5)
    config = ConfigRecord({"lr": 0.1, "names": ["only scalars reach a NumPyClient"]})
    result = ppsgd.start(on, two_arrays(), num_rounds=1, train_config=config)
    centre = np.mean([target(user)[:3] for user in range(5)], axis=0)
    np.testing.assert_allclose(result.arrays["one"].numpy(), 0.5 * centre, rtol=1e-6)
    np.testing.assert_allclose(result.arrays["two"].numpy(), 0.5 + 0.5 * centre, rtol=1e-6)
    assert result.evaluate_metrics_clientapp[0] == {"distance": 0.0, "loss": 2.0}
    assert set(result.train_metrics_clientapp[1]) == {"epsilon"}


def test_a_message_holds_both_forms_until_all_who_answer_are_of_one_kind() -> None:
    """One who fails, or lies about its kind, must not keep the others from their form."""
    ppsgd = parameters_strategy(release=release(clip_norm=1e3))
    on = InProcessGrid(ClientApp(client_fn=numpy_client), 5)
    both = ["arrays", "config", "fitins.parameters", "fitins.config"]
    arrays = two_arrays()
    config = ConfigRecord({"lr": 0.1})
    liar = ConfigRecord({"lr": 0.1})
    for round_, (app, seen) in enumerate(
        [(numpy_client, both), (numpy_client, both[2:]), (failing_client, both[2:])], start=1
    ):
        on._app = ClientApp(client_fn=app)
        messages = ppsgd.configure_train(round_, arrays, config, on)
        assert list(messages[0].content) == seen
        arrays, _ = ppsgd.aggregate_train(round_, list(on.send_and_receive(messages)))
    messages = ppsgd.configure_train(4, arrays, config, on)
    assert list(messages[0].content) == both
    replies = list(on.send_and_receive(messages))
    replies[0] = Message(RecordDict({"arrays": arrays}), reply_to=messages[0])
    arrays, _ = ppsgd.aggregate_train(4, replies)
    (message, *_) = ppsgd.configure_train(5, arrays, liar, on)
    assert list(message.content) == both


@pytest.mark.parametrize("count", [1, 3])
def test_a_numpy_client_with_another_number_of_arrays_counts_as_zero(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    ppsgd, on = parameters_strategy(), grid()
    messages = ppsgd.configure_train(1, two_arrays(), ConfigRecord(), on)
    on.push_messages(messages)
    numbered = ArrayRecord([np.full(3, 5.0)] * count)
    reply = Message(RecordDict({"fitres.parameters": numbered}), reply_to=messages[0])
    with caplog.at_level(logging.DEBUG, logger="flwr.ppsgd"):
        arrays, _ = ppsgd.aggregate_train(1, [reply])
    np.testing.assert_array_equal(arrays["one"].numpy(), 0.0)
    assert "replies=0 zeros=5 missing=4 of-wrong-keys,-shape-or-dtype=1" in caplog.text


WRAPPERS = [
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("replies", ["gradient", "parameters"])
def test_flowers_dp_strategies_are_refused_around_ppsgd(wrapper: Any, replies: Any) -> None:
    """Before anything is sent, whoever drives the rounds."""
    numbers = {"noise_multiplier": 0.1, "num_sampled_clients": 5}
    if "Fixed" in wrapper.__name__:
        numbers["clipping_norm"] = 1.0
    ppsgd = strategy(replies=replies)
    wrapped = wrapper(ppsgd, **numbers)
    words = f"PPSGD inside Flower's {wrapper.__name__}: .*use it without {wrapper.__name__}"
    with pytest.raises(ValueError, match=words):
        wrapped.start(grid(), w0(), num_rounds=1)
    with pytest.raises(ValueError, match=words):
        wrapped.configure_train(1, w0(), ConfigRecord(), grid())
    assert ppsgd.ledger.rounds == 0
    assert np.any(flat(ppsgd.start(grid(), w0(), num_rounds=1).arrays)) == (replies == "gradient")


def test_a_stock_client_without_the_setting_gets_a_line_that_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ppsgd, on = strategy(), grid()
    replies = [
        Message(RecordDict({"arrays": w0()}), reply_to=message) for message in opened(ppsgd, on)
    ]
    with caplog.at_level(logging.DEBUG, logger="flwr.ppsgd"):
        ppsgd.aggregate_train(1, replies)
    assert "PPSGD(replies='parameters')" in caplog.text


def test_replies_must_be_of_a_known_kind() -> None:
    with pytest.raises(ValueError, match="'gradient' or 'parameters'"):
        strategy(replies="weights")


def test_an_extra_parameter_counts_as_zero() -> None:
    ppsgd, on = parameters_strategy(), grid()
    (message, *_) = opened(ppsgd, on)
    more = ArrayRecord({"0": Array(np.zeros(SIZE)), "1": Array(np.ones(SIZE))})
    arrays, _ = ppsgd.aggregate_train(1, [Message(RecordDict({"arrays": more}), reply_to=message)])
    np.testing.assert_array_equal(flat(arrays), 0.0)


def unpicklable() -> Any:
    lock = threading.Lock()

    def learner(context: Context) -> Any:
        with lock:
            return toy_learner(context)

    return learner


def test_a_learner_for_that_cannot_be_pickled_is_named_when_it_is_sent() -> None:
    app = client_app(unpicklable())
    with pytest.raises(
        TypeError, match=r"learner_for=<function unpicklable.*module-level function"
    ):
        pickle.dumps(app)


class Nodes(InProcessGrid):
    """Virtual nodes whose owner has set something in the node config."""

    def __init__(self, node_config: dict[str, Any], run_config: dict[str, Any]) -> None:
        super().__init__(client_app(toy_learner), 5, run_config)
        self._node_config = node_config

    def context(self, node_id: int) -> Context:
        context = super().context(node_id)
        context.node_config = {**context.node_config, **self._node_config}
        return context


STOCK: dict[str, Any] = {"local-step": 0.5, "local-steps": 2}


def test_local_steps_can_come_from_the_run_config_if_the_owner_of_the_node_lets_them() -> None:
    result = FedAvg().start(Nodes({"ppsgd-stock": True}, STOCK), w0(), num_rounds=1)
    np.testing.assert_allclose(
        flat(result.arrays), 0.75 * np.mean([target(i) for i in range(5)], axis=0)
    )


def test_a_run_config_never_turns_a_ppsgd_client_into_a_stock_one() -> None:
    """What a stock client returns are its parameters, unclipped."""
    for on in (
        InProcessGrid(client_app(toy_learner), 5, STOCK),
        Nodes({"ppsgd-stock": False}, STOCK),
        Nodes({}, {**STOCK, "ppsgd-stock": True}),
    ):
        replies = on.send_and_receive(FedAvg().configure_train(1, w0(), ConfigRecord(), on))
        reasons = {reply.error.reason for reply in replies}
        assert reasons == {"ClientError: refused-policy: ValueError"}


@pytest.mark.parametrize("bad", [{}, {"local-step": "x"}, {"local-step": 0}, {"local-step": True}])
def test_a_stock_client_needs_a_step(bad: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    on = Nodes({"ppsgd-stock": True}, bad)
    (reply, *_) = on.send_and_receive(FedAvg().configure_train(1, w0(), ConfigRecord(), on))
    assert reply.error.reason == "ClientError: refused-policy: ValueError"
    assert "local-step must be a positive number" in caplog.text
