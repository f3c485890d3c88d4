"""Replies that a SuperLink announces and does not have hold no round beyond its timeout.

The SuperLink is in this process: Flower's own grid and handlers, without a network between them.
Nodes work while the server asks for replies.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers

from tests.contract.hostile_clients import (
    APP,
    USERS,
    App,
    Floats,
    Meddle,
    MeddlingGrid,
    is_training,
    new_context,
    pinned,
    strategy,
    trained,
    without_first,
)
from tests.support.time_limit import time_limit

MEMORY = ":flwr-in-memory:"
LIMIT = 300  # seconds for a test that takes a few
Upload = Callable[[int, int], bool]


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """A grid that waits for ever ends its test."""
    with time_limit(LIMIT):
        yield


class SuperLink:
    """Nodes behind a SuperLink, and the grid through which a server reaches them.

    Args:
        uploads: called with a user and the number of requests since this user's reply was
            announced; whether the user uploads it now. Until then the SuperLink knows of the reply
            and does not have it. Answers to checks are always there.
        app: what every node runs.
        users: the number of nodes.
        slow: seconds that the SuperLink takes for each object, once there are replies of training.
    """

    def __init__(
        self, uploads: Upload, app: App = APP, users: int = USERS, slow: float = 0.0
    ) -> None:
        self._uploads = uploads
        self._slow = slow
        self._app = app
        factory = LinkStateFactory(MEMORY, NoOpFederationManager(), ObjectStoreFactory(MEMORY))
        self._state = factory.state()
        self._run_id = self._started_run()
        self.contexts = dict(self._new_node(user) for user in range(users))
        self._announced: list[Announced] = []
        self._lock = threading.Lock()

    def _started_run(self) -> int:
        state = self._state
        run_id = state.create_run(
            "f", "1", "h", {}, NOOP_FEDERATION_ID, None, "a", TaskType.SERVER_APP
        )
        task = state.get_run_info(run_ids=[run_id])[0].primary_task_id
        assert task is not None
        state.claim_task(task)
        state.activate_task(task)
        return run_id

    def _new_node(self, user: int) -> tuple[int, Context]:
        node = self._state.create_node("a", "a", str(user).encode(), 30.0)
        self._state.activate_node(node, 3600.0)
        return node, Context(self._run_id, node, {"partition-id": user}, RecordDict(), {})

    @contextmanager
    def grid(self) -> Iterator[Any]:
        """Flower's own grid over HTTP, which asks the handlers below in place of a server."""
        found = HttpGrid(token="none", insecure=True)
        found.set_run(self._state.get_run_info(run_ids=[self._run_id])[0])
        vars(found)["_client"] = RuntimeClient(self)
        # Flower gives these to each process of a run
        with mock.patch.multiple(TaskIdentity, _run_id=self._run_id, _task_id=1, _node_id=1):
            yield found

    def handle(self, name: str, request: Any) -> Any:
        """What Flower's SuperLink answers to a request of the server."""
        with self._lock:  # Flower's grid asks in several threads
            if name in ("pull_messages", "pull_object"):
                self._let_nodes_work()
            task = SimpleNamespace(run_id=self._run_id)
            answer = getattr(runtime_handlers, name)(request, self._state, task)
            trains = any(announced.is_training for announced in self._announced)
        if name == "pull_object" and trains:
            time.sleep(self._slow)
        return answer

    def _let_nodes_work(self) -> None:
        for announced in self._announced:
            announced.requests += 1
            announced.upload_if(self._uploads)
        for node, context in self.contexts.items():
            while (message := self._received(node)) is not None:
                reply = self._app(message, context)
                announced = Announced(self, int(context.node_config["partition-id"]), reply)
                self._announced.append(announced)
                announced.upload_if(self._uploads)

    def _received(self, node: int) -> Message | None:
        """The next message for a node."""
        state = self._state
        asking = Node(node_id=node)
        request = PullMessagesRequest(node=asking)
        pulled = fleet_handlers.pull_messages(request, state, state.object_store)
        if not pulled.message_object_trees:
            return None

        def content(name: str) -> bytes:
            wanted = PullObjectRequest(node=asking, run_id=self._run_id, object_id=name)
            return fleet_handlers.pull_object(wanted, state).object_content

        message = pull_and_inflate_object_from_tree(
            pulled.message_object_trees[0], content, lambda _: None, return_type=Message
        )
        message.metadata.__dict__["_message_id"] = message.object_id
        return message

    def announce(self, message: Message, sender: int) -> Any:
        """Let the SuperLink know of a node's message; the answer says which objects it wants."""
        message.metadata.__dict__["_message_id"] = message.object_id
        request = PushMessagesRequest(
            node=Node(node_id=sender),
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
        )
        return fleet_handlers.push_messages(request, self._state)

    def push_and_receive(self, message: Message, sender: int) -> Message | None:
        """What comes to the node that a message is for, whichever node has sent it."""
        answer = self.announce(message, sender)
        objects = get_all_nested_objects(message)
        parts = {name: objects[name].deflate() for name in answer.objects_to_push}
        self.upload(sender, answer.session_id, parts)
        return self._received(message.metadata.dst_node_id)

    def upload(self, node: int, session: str, objects: Mapping[str, bytes]) -> None:
        """Push the objects of a message."""
        for name, content in objects.items():
            request = PushObjectRequest(
                node=Node(node_id=node),
                run_id=self._run_id,
                session_id=session,
                object_id=name,
                object_content=content,
            )
            assert fleet_handlers.push_object(request, self._state).stored


class Announced:
    """A reply that the SuperLink knows of.

    Args:
        link: the SuperLink.
        user: whose reply it is.
        reply: the whole of it.
    """

    def __init__(self, link: SuperLink, user: int, reply: Message) -> None:
        self._link = link
        self._user = user
        self.is_training = reply.metadata.message_type == "train"
        self._node = reply.metadata.src_node_id
        answer = link.announce(reply, self._node)
        self._session = answer.session_id
        objects = get_all_nested_objects(reply)
        self._objects = {name: objects[name].deflate() for name in answer.objects_to_push}
        self.requests = 0

    def upload_if(self, uploads: Upload) -> None:
        """Upload it, if its user does so now and has not done so before."""
        if not self._objects or (self.is_training and not uploads(self._user, self.requests)):
            return
        self._link.upload(self._node, self._session, self._objects)
        self._objects = {}


class RuntimeClient:
    """What Flower's grid talks to; each request goes to Flower's own handler.

    Args:
        link: the SuperLink.
    """

    def __init__(self, link: SuperLink) -> None:
        self._link = link

    def GetNodes(self, request: Any) -> Any:  # noqa: N802 - Flower's name, as those below
        return self._link.handle("get_nodes", request)

    def PushMessages(self, request: Any) -> Any:  # noqa: N802
        return self._link.handle("push_messages", request)

    def PushObject(self, request: Any) -> Any:  # noqa: N802
        return self._link.handle("push_object", request)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        return self._link.handle("pull_messages", request)

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        return self._link.handle("pull_object", request)

    def ConfirmMessageReceived(self, request: Any) -> Any:  # noqa: N802
        return self._link.handle("confirm_message_received", request)


def over_superlink(uploads: Upload, round_timeout: float, slow: float = 0.0) -> Floats:
    """w after one round."""
    ppsgd = strategy(round_timeout=round_timeout, insecure_seed=1)
    with SuperLink(uploads, slow=slow).grid() as on:
        w = trained(ppsgd, on, rounds=1)
    assert ppsgd.ledger.rounds == 1
    return w


def in_process(meddle: Meddle) -> Floats:
    return trained(strategy(insecure_seed=1), MeddlingGrid(meddle), rounds=1)


def test_a_reply_that_is_announced_and_never_uploaded_is_missing_at_the_timeout() -> None:
    """The others' are read, whatever their order; w is as if this user had stayed silent."""
    w = over_superlink(lambda user, _: user != 0, round_timeout=4.0)
    np.testing.assert_array_equal(w, in_process(without_first))


def test_a_reply_that_is_uploaded_late_counts_while_its_round_is_open() -> None:
    """It is tried again after the others, and read once it is there."""
    w = over_superlink(lambda user, requests: user != 0 or requests > 25, round_timeout=3600.0)
    np.testing.assert_array_equal(w, in_process(lambda _, replies: replies))


def test_what_cannot_be_read_before_the_timeout_is_missing() -> None:
    """Each reply takes more than the time of the round: a hostile one has thousands of objects."""
    w = over_superlink(lambda *_: True, round_timeout=1.0, slow=0.6)
    np.testing.assert_array_equal(w, in_process(lambda *_: []))


def test_an_order_that_an_insider_forges_is_refused_if_the_key_is_pinned(tmp_path: Path) -> None:
    """Flower's handlers take what an enrolled node sends in the server's name for the server's."""
    orders: list[Message] = []

    def heard(message: Message, context: Context) -> Message:
        if is_training(message):
            orders.append(message)
        return APP(message, context)

    link = SuperLink(lambda *_: True, heard)
    insider, victim, *_ = link.contexts
    with link.grid() as on:  # whose messages say that they are from the server
        trained(strategy(checkpoint_dir=tmp_path), on, rounds=1)
        content = orders[0].content
        moved = {name: Array(w.numpy() + 9) for name, w in content.array_records["arrays"].items()}
        forgery = Message(RecordDict({**content, "arrays": ArrayRecord(moved)}), victim, "train")
        received = link.push_and_receive(forgery, insider)
    assert received is not None
    careless = link.contexts[victim]
    careful = new_context(node=pinned(tmp_path))
    careful.run_id = careless.run_id
    assert APP(orders[0], careful).has_content()
    with pytest.raises(Exception, match="refused-signature"):
        APP(received, careful)
    assert APP(received, careless).has_content(), "a client that pins no key obeys anybody"
