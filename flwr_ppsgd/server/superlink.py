"""Replies from a SuperLink, one by one: bytes are hostile before they are a message.

Flower's own ``pull_messages`` inflates all replies together, and one that is malformed raises and
ends the run. Here each reply is fetched by itself, within a bound on its size; one that cannot be
read becomes an error reply of that node, which counts as zero. One that was announced and is not
uploaded yet is tried again after the others, until the time is over: nobody holds a round longer
than that. It needs what Flower's ``pull_messages`` is made of, which is not public: the protobuf
messages of its requests and the helpers that inflate objects. They are imported when they are first
needed.
"""

import contextlib
import json
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from flwr.app import Error, Message, Metadata
from flwr.serverapp import Grid

log = logging.getLogger("flwr.ppsgd")

POLL_SECONDS = 1.0
CHECK_SECONDS = 120.0  # to wait for remote nodes' answers to a check
REFUSALS = ("refused-", "node-config")  # in the codes with which our clients refuse
MALFORMED = 2  # Flower's code for a client that raised
NOT_RUN = 0  # its code for a client that it could not run
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SPARE_BYTES = 1 << 20  # for names, heads and measures
TIMES_W = 4  # the most bytes of a reply, in sizes of w
MOST_OBJECTS = 10_000
MOST_DEPTH = 8


class HostileReplyError(ValueError):
    """A reply whose bytes are not what a reply may be."""


class NotUploadedError(RuntimeError):
    """A reply that was announced, and of which an object cannot be had now."""


def ask(
    grid: Grid,
    messages: Sequence[Message],
    timeout: float,
    size: int,
) -> Iterable[Message]:
    """Send, and wait for replies until all are there or the time is over.

    Late replies are never fetched. Flower's own loop trusts the wall clock, which may go back and
    keep a round open for as long.

    Args:
        grid: the nodes.
        messages: one for each asked node.
        timeout: in seconds.
        size: of w, in bytes; a reply may inflate to a few times that.
    """
    if not _is_remote(grid):
        return grid.send_and_receive(messages, timeout=timeout)
    return _fetch_replies(grid, messages, timeout, TIMES_W * size + SPARE_BYTES)


def refusals_of(
    grid: Grid,
    messages: Sequence[Message],
    timeout: float,
    size: int,
) -> list[str]:
    """What those said who would not obey; nothing if one client would.

    An error of a client that is no refusal of ours may come from one that does not know checks: it
    counts as one that would obey. Who does not answer in time, or could not be run at all (an app
    that cannot be pickled for Ray), counts as one that would not. All answers
    are waited for: in a simulation, a check that is still at work on a node would put the node's
    state back to what it was before the first round. The arguments are those of ``ask``.
    """
    if _is_remote(grid):  # in a simulation nobody is offline, but Ray may start slowly
        timeout = min(timeout, CHECK_SECONDS)
    replies = list(ask(grid, messages, timeout, size))
    refused = []
    for error in (reply.error for reply in replies if reply.has_error()):
        if error.code == NOT_RUN or any(word in str(error.reason) for word in REFUSALS):
            refused.append(last_line(str(error.reason)))
    if len(refused) < len(replies):
        return []
    silent = len(messages) - len(replies)
    return refused + [f"no answer within {timeout:g} s"] * silent


def last_line(reason: str) -> str:
    """The last line of an error that comes with a traceback, as Ray's do, without colours."""
    lines = [line.strip() for line in COLOURS.sub("", reason).splitlines() if line.strip()]
    return lines[-1].removesuffix("'>") if len(lines) > 1 else reason


def _is_remote(grid: Grid) -> bool:
    """Whether this is Flower's grid over HTTP, by its name: importing it takes long."""
    return any(kind.__name__ == "HttpGrid" for kind in type(grid).__mro__)


def _fetch_replies(
    grid: Any, messages: Sequence[Message], timeout: float, most: int
) -> Iterator[Message]:
    """Replies as they come, each forgotten here once it is handed out.

    A SuperLink announces a reply once. What is not uploaded yet goes to the back of the queue.
    """
    deadline = time.monotonic() + timeout
    unheard = {message_id for message_id in grid.push_messages(messages) if message_id}
    late: list[tuple[Any, Any]] = []  # announced, and not uploaded when they were last tried
    while unheard or late:
        announced = _new_announcements(grid, unheard)
        queue = [*announced, *late]
        late = []
        for proto, tree in queue:
            try:
                yield _fetch_reply(grid, proto, tree, most, deadline)
            except NotUploadedError:
                late.append((proto, tree))
        left = deadline - time.monotonic()
        if left <= 0:
            return
        if unheard or late:
            time.sleep(min(POLL_SECONDS, left))


def _new_announcements(grid: Any, unheard: set[str]) -> list[tuple[Any, Any]]:
    """The replies that are new to the SuperLink; what they answer is taken out of ``unheard``."""
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest

    client = _client_of(grid)
    if not unheard:
        return []
    found = client.PullMessages(PullAppMessagesRequest(message_ids=sorted(unheard)))
    announced = []
    for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
        answered = proto.metadata.reply_to_message_id
        if answered in unheard:
            unheard.discard(answered)
            announced.append((proto, tree))
    return announced


def _client_of(grid: Any) -> Any:
    """Flower's connection to the SuperLink."""
    client = getattr(grid, "_runtime_client", None)
    if client is None or not hasattr(client, "PullObject"):
        raise RuntimeError(
            f"flwr {version('flwr')} keeps its connection elsewhere than 1.41 does, so replies "
            "cannot be fetched one by one: install flwr==1.41.0"
        )
    return client


def _fetch_reply(grid: Any, proto: Any, tree: Any, most: int, deadline: float) -> Message:
    """One reply, or an error if it cannot be read; NotUploadedError if it is not there."""
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

    client = _client_of(grid)
    try:
        contents = _contents(grid, client, tree, most, deadline)
        reply = _inflate_reply(proto, contents, most)
    except NotUploadedError:
        raise
    except Exception as error:  # whatever a client sent, it is never a reason to stop a round
        reply = _reply_unread(grid, proto.metadata, f"{type(error).__name__}: {error}")
    confirmation = ConfirmMessageReceivedRequest(
        node=grid.node,
        run_id=grid.run.run_id,
        message_object_id=proto.metadata.message_id,
    )
    with contextlib.suppress(Exception):  # what is not confirmed is forgotten with the run
        client.ConfirmMessageReceived(confirmation)
    return reply


def _inflate_reply(proto: Any, contents: dict[str, bytes], most: int) -> Message:
    """One reply; HostileReplyError if its objects or its size are not what a reply may be."""
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    message_id = proto.metadata.message_id
    check_inflated_size(contents, most)
    message = inflate_object_from_contents(message_id, contents)
    if not isinstance(message, Message):
        raise HostileReplyError(f"a {type(message).__name__} where a Message was expected")
    # what the sender says of itself must be what the SuperLink knows
    claimed = (message.metadata.src_node_id, message.metadata.reply_to_message_id)
    known = (proto.metadata.src_node_id, proto.metadata.reply_to_message_id)
    if claimed != known:
        raise HostileReplyError(f"a reply that says it is {claimed} and is {known}")
    message.metadata.__dict__["_message_id"] = message_id
    return message


def _contents(grid: Any, client: Any, tree: Any, most: int, deadline: float) -> dict[str, bytes]:
    """The reply's objects, at most ``most`` bytes of them, as far as there is time."""
    from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, pull_objects

    pull = make_pull_object_fn_protobuf(client.PullObject, grid.node, grid.run.run_id)
    total = 0

    def pull_in_bounds(object_id: str) -> bytes:
        nonlocal total
        if time.monotonic() >= deadline:
            raise NotUploadedError("the round is over")
        try:
            content = pull(object_id)
        except ObjectUnavailableError as error:  # Flower would wait for it, for hours
            raise NotUploadedError(str(error)) from None
        total += len(content)
        if total > most:
            raise HostileReplyError(f"more than {most} bytes")
        return content

    ids = list(dict.fromkeys(object_ids(tree)))
    return pull_objects(ids, pull_in_bounds)


def object_ids(tree: Any) -> Iterator[str]:
    """The ids in an object tree, which may be neither deep nor large."""
    count = 0
    waiting = [(tree, 0)]
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if count > MOST_OBJECTS or depth > MOST_DEPTH:
            raise HostileReplyError(f"more than {MOST_OBJECTS} objects, or {MOST_DEPTH} levels")
        yield node.object_id
        waiting += [(child, depth + 1) for child in node.children]


def check_inflated_size(contents: Mapping[str, bytes], most: int) -> None:
    """Refuse arrays that name a chunk so often that they would inflate to more than ``most``."""
    from flwr.supercore.inflatable.inflatable_object import (
        get_object_children_ids_from_object_content,
        get_object_type_from_object_content,
    )

    total = 0
    for content in contents.values():
        if get_object_type_from_object_content(content) != "Array":
            continue
        children = get_object_children_ids_from_object_content(content)
        sizes = [len(contents[child]) for child in children]
        _, _, body = content.partition(b"\x00")
        chunks = json.loads(body)["arraychunk_ids"]
        total += sum(sizes[chunk] for chunk in chunks)
        if total > most:
            raise HostileReplyError(f"arrays that would inflate to more than {most} bytes")


def _reply_unread(grid: Any, metadata: Any, reason: str) -> Message:
    """An error in the name of the node whose reply cannot be read."""
    from flwr.app.message import make_message

    return make_message(
        metadata=Metadata(
            run_id=grid.run.run_id,
            message_id="",
            src_node_id=metadata.src_node_id,
            dst_node_id=metadata.dst_node_id,
            reply_to_message_id=metadata.reply_to_message_id,
            group_id=metadata.group_id,
            created_at=time.time(),
            ttl=metadata.ttl,
            message_type=metadata.message_type,
        ),
        error=Error(MALFORMED, f"a reply that cannot be read: {reason}"),
    )
