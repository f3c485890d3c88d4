"""One ClientApp under any strategy, one strategy over any ClientApp."""

import logging
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import NDArrays
from flwr.serverapp.strategy import (
    FedAvg,
)

from flwr_ppsgd import Steps, client_app
from flwr_ppsgd.simulation import InProcessGrid
from tests.support.toy import grid, opened, release, strategy, target, toy_learner, w0

# An ordinary PyTorch client that knows nothing of this package.


ordinary = ClientApp()


def parameters_strategy(**changes: Any) -> Any:
    return strategy(
        **{
            "release": release(clip_norm=5.0),
            "steps": Steps(shared=1.0, personal=0.0),
            "replies": "parameters",
            **changes,
        }
    )


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


def test_replies_must_be_of_a_known_kind() -> None:
    with pytest.raises(ValueError, match="'gradient' or 'parameters'"):
        strategy(replies="weights")


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


@pytest.mark.parametrize("bad", [{}, {"local-step": "x"}, {"local-step": 0}, {"local-step": True}])
def test_a_stock_client_needs_a_step(bad: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    on = Nodes({"ppsgd-stock": True}, bad)
    (reply, *_) = on.send_and_receive(FedAvg().configure_train(1, w0(), ConfigRecord(), on))
    assert reply.error.reason == "ClientError: refused-policy: ValueError"
    assert "local-step must be a positive number" in caplog.text
