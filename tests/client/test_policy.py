"""The owner of a node sets limits, and no server, run config or insider gets round them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkState, LinkStateFactory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from flwr.superlink.servicer.fleet import fleet_handlers

from flwr_ppsgd import Order, client_app
from flwr_ppsgd.client.app import PPSGDClient
from flwr_ppsgd.client.policy import KEYS, Policy
from flwr_ppsgd.client.refusal import ClientError
from flwr_ppsgd.client.report import client_report
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
    config = {
        "ppsgd-state-dir": "x",
        "ppsgd-user": "ada",
        "ppsgd-max-clip-norm": 1,
        "ppsgd-max-step": 2,
        "ppsgd-max-epsilon": 3.5,
        "ppsgd-evaluate": False,
        "ppsgd-stock": False,
        "ppsgd-server-key": KEY.public,
        "ppsgd-secure": True,
        "ppsgd-min-noise-multiplier": 1.5,
        "ppsgd-min-clients": 20,
        "ppsgd-complete": True,
        "ppsgd-max-own-epsilon": 4,
        "ppsgd-epsilon": 1,
        "ppsgd-delta": 1e-6,
        "partition-id": 3,
        "another": "key",
    }
    assert set(KEYS) <= set(config)
    limits = Policy(1.0, 2.0, 3.5, 4.0, 1.0, 1e-6, False, False, KEY.public, True, True, 1.5, 20)
    assert Policy.of(config) == limits
    assert Policy.of({}) == Policy()


# --- the signature


# --- an insider: through Flower's own handlers, as an enrolled SuperNode reaches them


def superlink() -> tuple[LinkState, int, int, int]:
    """A SuperLink with a running run and two enrolled nodes: (state, run, insider, victim)."""
    memory = ":flwr-in-memory:"
    factory = LinkStateFactory(memory, NoOpFederationManager(), ObjectStoreFactory(memory))
    state = factory.state()
    insider, victim = (state.create_node("a", "a", key, 30.0) for key in (b"one", b"two"))
    for node in (insider, victim):
        state.activate_node(node, 30.0)
    run = state.create_run("f", "1", "h", {}, NOOP_FEDERATION_ID, None, "a", TaskType.SERVER_APP)
    task = state.get_run_info(run_ids=[run])[0].primary_task_id
    assert task is not None
    state.claim_task(task)
    state.activate_task(task)
    return state, run, insider, victim


def forge(state: LinkState, run: int, insider: int, victim: int, order: Order) -> None:
    """What a node may push: who pushes is checked, what the message says about itself is not."""
    forged = message(order)
    forged.metadata.__dict__.update(_run_id=run, _src_node_id=1, _dst_node_id=victim)
    forged.metadata.__dict__["_message_id"] = forged.object_id
    node = Node(node_id=insider)
    pushed = fleet_handlers.push_messages(
        PushMessagesRequest(
            node=node,
            messages_list=[message_to_proto(remove_content_from_message(forged))],
            message_object_trees=[get_object_tree(forged)],
        ),
        state,
    )
    objects = get_all_nested_objects(forged)
    for name in pushed.objects_to_push:
        one = PushObjectRequest(
            node=node,
            run_id=run,
            session_id=pushed.session_id,
            object_id=name,
            object_content=objects[name].deflate(),
        )
        fleet_handlers.push_object(one, state)


def received(state: LinkState, run: int, victim: int) -> Message:
    node = Node(node_id=victim)
    pulled = fleet_handlers.pull_messages(PullMessagesRequest(node=node), state, state.object_store)

    def content(name: str) -> bytes:
        request = PullObjectRequest(node=node, run_id=run, object_id=name)
        return fleet_handlers.pull_object(request, state).object_content

    return pull_and_inflate_object_from_tree(
        pulled.message_object_trees[0], content, lambda _: None, return_type=Message
    )


def test_an_insider_can_send_an_order_in_the_servers_name_and_a_pinned_client_refuses_it(
    tmp_path: Path,
) -> None:
    state, run, insider, victim = superlink()
    forge(state, run, insider, victim, replace(ORDER, server_key=KEY.public))
    arrived = received(state, run, victim)
    assert arrived.metadata.src_node_id == 1, "it says that it comes from the SuperLink"
    unpinned = context()
    client_app(toy_learner)(arrived, unpinned)
    assert unpinned.state, "whoever pins nothing obeys"
    pinned = context(server_key=KEY.public, state_dir=str(tmp_path))
    with pytest.raises(ClientError, match=r"^refused-signature: ValueError$"):
        client_app(toy_learner)(arrived, pinned)
    assert not pinned.state
    assert "refused-signature (1)" in client_report(tmp_path)
