"""The node config is read whole; what its limits refuse is in tests.contract.test_node_limits."""

import math
from dataclasses import replace
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from flwr_ppsgd import Order, client_app
from flwr_ppsgd.client.app import PPSGDClient
from flwr_ppsgd.client.policy import KEYS, Policy
from flwr_ppsgd.client.refusal import ClientError
from flwr_ppsgd.signature import TrainingKey
from flwr_ppsgd.simulation import InProcessGrid
from tests.support.toy import toy_learner, w0

InProcessGrid(client_app(toy_learner), 1)  # without one Flower lets nobody make a message
ORDER = Order(1, 0.5, 1.0, "mean", True, training=7, epsilon=2.0)
KEY = TrainingKey.new()
KINDS = ["train", "evaluate"]


def context(**node: Any) -> Context:
    config: dict[str, Any] = {"partition-id": 0}
    config |= {"ppsgd-" + key.replace("_", "-"): value for key, value in node.items()}
    return Context(1, 2, config, RecordDict(), {})


def message(order: Order | None, kind: str = "train", w: ArrayRecord | None = None) -> Message:
    content = RecordDict({"arrays": w or w0()})
    if order is not None:
        content["ppsgd-order"] = ConfigRecord(order.to_flat())
    return Message(content, 5, kind)


def by_message(on: Context, order: Order | None, kind: str, w: ArrayRecord | None = None) -> Any:
    return client_app(toy_learner)(message(order, kind, w), on)


def by_legacy(on: Context, order: Order | None, kind: str, w: ArrayRecord | None = None) -> Any:
    client = PPSGDClient(toy_learner(on), on)
    arrays = (w or w0()).to_numpy_ndarrays()
    flat = order.to_flat() if order else {}
    return client.fit(arrays, flat) if kind == "train" else client.evaluate(arrays, flat)


both_apis = pytest.mark.parametrize("ask", [by_message, by_legacy])


@both_apis
@pytest.mark.parametrize("kind", KINDS)
def test_malformed_orders_are_refused_and_theta_stays(ask: Any, kind: str) -> None:
    for change in ({"clip_norm": math.inf}, {"step": -1.0}, {"promise": "\x1b[2J"}):
        on = context()
        with pytest.raises(ClientError, match=r"^refused-order: ValueError$"):
            ask(on, replace(ORDER, **change), kind)
        assert not on.state


def test_a_private_key_in_the_wrong_place_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    wrong = "ed25519-private:" + KEY.private.hex()
    with pytest.raises(ClientError):
        by_message(context(server_key=wrong), ORDER, "train")
    assert KEY.private.hex() not in caplog.text


def test_every_key_is_read() -> None:
    config: dict[str, Any] = {"ppsgd-state-dir": "x", "ppsgd-user": "ada", "partition-id": 3}
    config |= {"ppsgd-max-clip-norm": 1, "ppsgd-max-step": 2, "ppsgd-max-epsilon": 3.5}
    config |= {"ppsgd-evaluate": False, "ppsgd-stock": False, "ppsgd-server-key": KEY.public}
    config |= {"ppsgd-secure": True, "ppsgd-min-noise-multiplier": 1.5, "ppsgd-min-clients": 20}
    config |= {"ppsgd-max-own-epsilon": 4, "ppsgd-epsilon": 1, "ppsgd-delta": 1e-6}
    config |= {"ppsgd-complete": True, "another": "key"}
    assert set(KEYS) <= set(config)
    limits = Policy(1.0, 2.0, 3.5, 4.0, 1.0, 1e-6, False, False, KEY.public, True, True, 1.5, 20)
    assert Policy.of(config) == limits
    assert Policy.of({}) == Policy()
