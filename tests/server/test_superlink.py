"""Bytes are hostile before they are a message: each reply is read by itself, or is an error."""

import json
import tracemalloc
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    add_header_to_object_body,
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_ppsgd import client_app
from flwr_ppsgd.server import superlink
from flwr_ppsgd.server.curator import NobodyUsableError
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.wire import GRADIENT
from tests.support.toy import SIZE, flat, grid, make_replies, opened, strategy, toy_learner, w0

W_BYTES = 176
MOST = superlink.TIMES_W * W_BYTES + superlink.SPARE_BYTES
Contents = dict[str, bytes]
Answer = SimpleNamespace  # any protobuf message, by its fields


class Store:
    """A SuperLink's store of objects: what was pushed as replies, however it was made."""

    def __init__(self) -> None:
        self.objects: Contents = {}
        self.replies: dict[str, tuple[Any, ObjectTree]] = {}
        self.confirmed: list[str] = []

    def put(self, reply: Message) -> str:
        """A reply as an honest client pushes it; returns its id."""
        for object_id, value in get_all_nested_objects(reply).items():
            self.objects[object_id] = value.deflate()
        self.answer(reply, reply.object_id, get_object_tree(reply))
        return reply.object_id

    def answer(self, reply: Message, object_id: str, tree: ObjectTree) -> None:
        answered = reply.metadata.reply_to_message_id
        proto = Answer(src_node_id=reply.metadata.src_node_id, dst_node_id=1, group_id="")
        vars(proto).update(message_id=object_id, reply_to_message_id=answered)
        vars(proto).update(ttl=3600.0, message_type="train", metadata=proto)
        self.replies[answered] = (proto, tree)


class Client:
    """The SuperLink's API, as far as replies are fetched over it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def PullMessages(self, request: Any) -> Answer:  # noqa: N802 - Flower's name
        found = [self._store.replies[i] for i in request.message_ids if i in self._store.replies]
        return Answer(
            messages_list=[proto for proto, _ in found],
            message_object_trees=[tree for _, tree in found],
        )

    def PullObject(self, request: Any) -> Answer:  # noqa: N802
        content = self._store.objects.get(request.object_id)
        return Answer(
            object_found=content is not None, object_available=True, object_content=content
        )

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self._store.confirmed.append(request.message_object_id)


class HttpGrid:
    """Flower's grid over HTTP, known by its name."""

    node = None

    def __init__(self, store: Store) -> None:
        self._runtime_client = Client(store)
        self.run = Answer(run_id=1)

    def push_messages(self, messages: list[Message]) -> list[str]:
        return [message.metadata.message_id for message in messages]


def asked(count: int = 5) -> tuple[Any, list[Message]]:
    """A strategy whose first round is open, and its messages."""
    ppsgd = strategy()
    return ppsgd, opened(ppsgd, grid(count))


def fetched(store: Store, messages: list[Message], size: int = W_BYTES) -> list[Message]:
    """All that was put there, which is an answer to each message."""
    return list(superlink.ask(HttpGrid(store), messages, 60.0, size))  # type: ignore[arg-type]


def honest(messages: list[Message]) -> list[Message]:
    return make_replies(messages, lambda place: np.full(SIZE, 0.1 * (place + 1)))


def test_honest_replies_are_read_as_they_were_sent() -> None:
    _, messages = asked()
    store = Store()
    ids = [store.put(reply) for reply in honest(messages)]
    replies = fetched(store, messages)
    assert not any(reply.has_error() for reply in replies)
    found = [flat(reply.content.array_records[GRADIENT])[0] for reply in replies]
    np.testing.assert_allclose(sorted(found), [0.1, 0.2, 0.3, 0.4, 0.5])
    assert sorted(store.confirmed) == sorted(ids)


def rewritten(store: Store, reply: Message, kind: str, change: Callable[[bytes], bytes]) -> None:
    """Put a reply of which every object of a kind has another body; ids are right again."""

    def rebuilt(value: Any) -> tuple[str, ObjectTree]:
        content = value.deflate()
        children = [rebuilt(child) for child in (value.children or {}).values()]
        head, _, body = content.partition(b"\x00")
        ids = [object_id for object_id, _ in children]
        if head.startswith(kind.encode() + b" "):
            body = change(body)
        for old, new in zip((value.children or {}), ids, strict=True):
            body = body.replace(old.encode(), new.encode())
        changed = head.split(b" ")[0] + b" " + ",".join(ids).encode() + b" "
        content = changed + str(len(body)).encode() + b"\x00" + body
        own = get_object_id(content)
        store.objects[own] = content
        return own, ObjectTree(object_id=own, children=[tree for _, tree in children])

    own, tree = rebuilt(reply)
    store.answer(reply, own, tree)


def array_with(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda body: json.dumps({**json.loads(body), **fields}, separators=(",", ":")).encode()


HOSTILE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "a body that is no JSON": ("Array", lambda _: b"\xff{"),
    "an empty object": ("Array", lambda _: b"{}"),
    "a chunk index out of range": ("Array", array_with(arraychunk_ids=[7])),
    "a chunk index that is a word": ("Array", array_with(arraychunk_ids=["zero"])),
    "a shape that is a word": ("Array", array_with(shape="wide")),
    "a chunk named very often": ("Array", array_with(arraychunk_ids=[0] * 400_000)),
    "records that are a list": ("RecordDict", lambda _: b"[]"),
    "an array record that is a number": ("ArrayRecord", lambda _: b"7"),
    "a message without metadata": ("Message", lambda _: b""),
    "a message of random bytes": ("Message", lambda _: bytes(range(256))),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_malformed_reply_counts_as_zero_and_the_round_is_charged(case: str) -> None:
    """The other four are read, the round is released and charged, in little memory."""
    ppsgd, messages = asked()
    store = Store()
    first, *others = honest(messages)
    kind, change = HOSTILE[case]
    rewritten(store, first, kind, change)
    for reply in others:
        store.put(reply)
    tracemalloc.start()
    arrays, _ = ppsgd.aggregate_train(1, fetched(store, messages))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_allclose(
        flat(arrays), -np.full(SIZE, 0.2 + 0.3 + 0.4 + 0.408248) / 5, rtol=1e-4
    )
    assert ppsgd.ledger.rounds == 1
    assert peak < 40e6


def test_a_reply_that_claims_another_sender_is_refused() -> None:
    _, messages = asked()
    store = Store()
    reply, *_ = honest(messages)
    reply.metadata.__dict__["_src_node_id"] = messages[1].metadata.dst_node_id
    object_id = store.put(reply)
    proto, _ = store.replies[messages[0].metadata.message_id]
    proto.src_node_id = messages[0].metadata.dst_node_id
    assert object_id
    (found,) = fetched(store, messages[:1])
    assert found.has_error()
    assert "says it is" in str(found.error.reason)


def test_a_reply_larger_than_a_few_models_is_not_fetched_whole() -> None:
    _, messages = asked()
    store = Store()
    content = RecordDict({GRADIENT: ArrayRecord([np.zeros(400_000)])})
    store.put(Message(content, reply_to=messages[0]))
    (found,) = fetched(store, messages[:1])
    assert found.has_error()
    assert f"more than {MOST} bytes" in str(found.error.reason)


def test_a_tree_of_many_objects_or_levels_is_refused() -> None:
    wide = ObjectTree(object_id="r", children=[ObjectTree(object_id="c")] * superlink.MOST_OBJECTS)
    deep = ObjectTree(object_id="leaf")
    for _ in range(superlink.MOST_DEPTH + 1):
        deep = ObjectTree(object_id="node", children=[deep])
    for tree in (wide, deep):
        with pytest.raises(superlink.HostileReplyError, match="objects"):
            list(superlink.object_ids(tree))


def test_what_is_missing_in_the_store_is_an_error_reply() -> None:
    _, messages = asked()
    store = Store()
    store.put(honest(messages)[0])
    store.objects.clear()
    (found,) = fetched(store, messages[:1])
    assert found.has_error()


@pytest.mark.fuzz
@settings(deadline=None)
@given(st.data())
def test_any_change_to_the_bytes_gives_a_message(data: st.DataObject) -> None:
    """Flipped, cut and inserted bytes, with ids that are right again."""
    _, messages = asked(5)
    store = Store()
    content = RecordDict({GRADIENT: w0(), "metrics": MetricRecord({"loss": 1.0})})
    kind = data.draw(
        st.sampled_from(["Message", "RecordDict", "ArrayRecord", "Array", "ArrayChunk"])
    )

    def change(body: bytes) -> bytes:
        place = data.draw(st.integers(0, len(body)))
        put = data.draw(st.binary(max_size=8))
        gone = data.draw(st.integers(0, 8))
        return body[:place] + put + body[place + gone :]

    rewritten(store, Message(content, reply_to=messages[0]), kind, change)
    (found,) = fetched(store, messages[:1])
    assert isinstance(found, Message)


def test_a_flower_that_has_changed_its_internals_is_named() -> None:
    _, messages = asked()
    bare = HttpGrid(Store())
    del bare._runtime_client
    with pytest.raises(RuntimeError, match=r"install flwr==1\.41\.0"):
        list(superlink.ask(bare, messages, 0.0, W_BYTES))  # type: ignore[arg-type]


def test_the_head_of_an_object_is_as_flower_writes_it() -> None:
    """``check_inflated_size`` reads bodies after the first zero byte."""
    value = w0()["0"]
    assert add_header_to_object_body(b"body", value).partition(b"\x00")[2] == b"body"


def test_of_an_error_with_a_traceback_its_last_line_counts() -> None:
    reason = (
        "<class 'RayTaskError'>:<'\x1b[36mray::run()\x1b[39m\n  File x\nError: refused-policy'>"
    )
    assert superlink.last_line(reason) == "Error: refused-policy"
    assert superlink.last_line("refused-policy: RefusedError") == "refused-policy: RefusedError"


def test_clients_that_flower_cannot_run_are_seen_before_the_first_round() -> None:
    """Such as an app that cannot be pickled for Ray: nothing is charged."""

    class Broken(InProcessGrid):
        def send_and_receive(self, messages: Iterable[Message], **_: Any) -> Any:
            return [Message(Error(0, "cannot be pickled"), reply_to=each) for each in messages]

    server = strategy()
    with pytest.raises(NobodyUsableError, match=r"cannot be pickled\. Nothing was charged"):
        server.start(Broken(client_app(toy_learner), 5), w0(), num_rounds=2)
    assert server.ledger.rounds == 0
