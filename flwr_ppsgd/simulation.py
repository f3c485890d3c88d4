"""A Flower Grid that runs any ClientApp for any number of virtual nodes in this process, without
Ray.

Of Flower's internals it needs the identity of a task, without which no ``Message`` can be made,
the ``Run`` that a grid shows, and the field that holds a message's id: Flower offers no public way
to any of them.
"""

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import overload

from flwr.app import (
    Array,
    ArrayRecord,
    Context,
    Error,
    Message,
    RecordDict,
    UserConfig,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from threadpoolctl import ThreadpoolController

from flwr_ppsgd.checks import count

REMEDY = "install flwr==1.41.0, or use Flower's own simulation"

try:
    from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:  # pragma: no cover - depends on the installed Flower
    raise ImportError(
        f"InProcessGrid needs internals of Flower 1.41, which flwr {version('flwr')} has changed "
        f"({error}): {REMEDY}"
    ) from error

__all__ = ["InProcessGrid"]

log = logging.getLogger("flwr.ppsgd")

FIRST_NODE_ID = 1_000_000  # far from the ids that Flower reserves


class LazyReplies(Sequence[Message]):
    """A list of replies. A client runs when its reply is read for the first time.

    Args:
        messages: what was sent, one message for each reply.
        answer: runs the client that a message is for, and returns its reply.
    """

    def __init__(self, messages: Sequence[Message], answer: Callable[[Message], Message]) -> None:
        self._messages = messages
        self._answer = answer
        self._answered: list[Message] = []

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | Sequence[Message]:
        if isinstance(index, slice):
            return list(self)[index]
        last = range(len(self))[index]  # a negative index counts from the end
        unanswered = self._messages[len(self._answered) : last + 1]
        for message in unanswered:
            self._answered.append(self._answer(message))
        return self._answered[index]

    def once(self) -> Iterator[Message]:
        """Every reply, forgotten after it is handed out.

        A server that sums replies as it reads them needs memory for one reply only.
        """
        yield from self._answered
        unanswered = self._messages[len(self._answered) :]
        yield from map(self._answer, unanswered)


class _EachErrorOnce(logging.Filter):
    """Lets an error of clients through once: a mistake in the app is made on every node."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        cause = record.exc_info[1] if record.exc_info else ""
        text = f"{record.getMessage()}\n{cause}"
        is_new = text not in self._seen
        self._seen.add(text)
        return is_new


class InProcessGrid(Grid):
    """Virtual nodes in this process, each with a Context of its own; node i has ``partition-id`` i.

    Clients run one after the other, when their reply is read. If a client raises an exception, its
    reply is an error and its state stays as it was before, as in Flower's own simulation. An error
    that several clients log is shown once. Messages to nodes that do not exist are ignored.

    Args:
        client_app: the app that every node runs.
        num_nodes: the number of nodes.
        run_config: the run config that every node sees.
        run_id: the id of the run, as every node sees it.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        run_config: UserConfig | None = None,
        run_id: int = 1,
    ) -> None:
        nodes = count("num_nodes", num_nodes)
        _adopt_identity(run_id)
        self._app = client_app
        self._run = Run.create_empty(run_id)
        self._run_config = dict(run_config or {})
        self._node_ids = range(FIRST_NODE_ID, FIRST_NODE_ID + nodes)
        self._contexts: dict[int, Context] = {}
        self._pushed: dict[str, Message] = {}
        self._ids = itertools.count(1)
        self._each_error_once = _EachErrorOnce()
        # Flower's legacy loop sends from threads. BLAS limits and log filters belong to the
        # process, and Python 3.11 may raise if two threads parse headers of arrays at once.
        self._one_client = threading.RLock()

    def context(self, node_id: int) -> Context:
        """The Context of a node, made on first use: what stays on that user's device."""
        if node_id not in self._contexts:
            partition = node_id - FIRST_NODE_ID
            self._contexts[node_id] = Context(
                run_id=self._run.run_id,
                node_id=node_id,
                node_config={"partition-id": partition, "num-partitions": len(self._node_ids)},
                state=RecordDict(),
                run_config=dict(self._run_config),
            )
        return self._contexts[node_id]

    def get_node_ids(self) -> Sequence[int]:
        """The ids of all nodes, in the order of their ``partition-id``."""
        return self._node_ids

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,  # noqa: ARG002
    ) -> LazyReplies:
        """Replies that are made as they are read; nothing here can time out."""
        return LazyReplies(self._send_all(messages), self._answer)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages and return their ids; the clients run in ``pull_messages``."""
        ids = []
        for message in self._send_all(messages):
            message_id = message.metadata.message_id
            self._pushed[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies to messages that were pushed; each reply can be had once."""
        pushed = []
        for message_id in message_ids:
            if message_id in self._pushed:
                pushed.append(self._pushed.pop(message_id))
        return [self._answer(message) for message in pushed]

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to one node, not yet sent."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def set_run(self, run: Run) -> None:
        """Give nodes another run id from now on."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that nodes see."""
        return self._run

    def _send_all(self, messages: Iterable[Message]) -> list[Message]:
        """Send the messages whose node exists, and return those."""
        known = [each for each in messages if each.metadata.dst_node_id in self._node_ids]
        for message in known:
            self._stamp(message)
        return known

    def _stamp(self, message: Message) -> None:
        """Give a message its id, as a grid does when it sends one."""
        metadata = message.metadata.__dict__
        if "_message_id" not in metadata:
            raise RuntimeError(
                f"flwr {version('flwr')} does not keep message ids where flwr 1.41 does: {REMEDY}"
            )
        metadata["_message_id"] = str(next(self._ids))

    def _answer(self, message: Message) -> Message:
        """Run one client at a time, on its own copy of the content: strategies put one RecordDict
        into all messages."""
        with self._one_client:
            context = self.context(message.metadata.dst_node_id)
            state_before = dict(context.state)
            content = message.content
            message.content = _copy_content(content)
            log.addFilter(self._each_error_once)
            try:
                with _blas().limit(limits=1, user_api="blas"):
                    reply = self._app(message, context)
                if reply.has_content():
                    reply.content = _copy_content(reply.content)
            except Exception as error:
                log.debug("A client raised an exception", exc_info=True)
                context.state = RecordDict(state_before)
                reason = f"{type(error).__name__}: {error}"
                raised = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)
                reply = Message(raised, reply_to=message)
            finally:
                log.removeFilter(self._each_error_once)
                message.content = content
            self._stamp(reply)
            return reply


@functools.cache
def _blas() -> ThreadpoolController:
    """Clients run with one BLAS thread: their products are small, and on a busy machine the
    threads of small products mostly wait for each other."""
    return ThreadpoolController()


def _copy_content(content: RecordDict) -> RecordDict:
    """New records over the same immutable bytes."""
    copy = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            copy[name] = ArrayRecord(
                {
                    key: Array(array.dtype, array.shape, array.stype, array.data)
                    for key, array in record.items()
                }
            )
        else:
            copy[name] = record.copy()
    return copy


def _adopt_identity(run_id: int) -> None:
    """Let this process make messages, unless Flower has already given it an identity."""
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id = run_id
        TaskIdentity.task_id = 1
        TaskIdentity.node_id = SUPERLINK_NODE_ID
