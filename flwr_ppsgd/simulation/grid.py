"""A Flower Grid that runs any ClientApp for any number of virtual nodes in this process, without Ray."""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flwr_ppsgd.simulation import flower_internals as _flower

log = logging.getLogger("flwr.ppsgd")

FIRST_NODE_ID = 1_000_000  # far from the ids that Flower reserves


class Replies(Sequence[Message]):
    """A list of replies whose clients run when it is read. ``once`` forgets each reply after handing it out, so that a
    server that sums as it reads needs memory for one."""

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
        for message in self._messages[len(self._answered) : range(len(self))[index] + 1]:
            self._answered.append(self._answer(message))
        return self._answered[index]

    def once(self) -> Iterator[Message]:
        yield from self._answered
        yield from map(self._answer, self._messages[len(self._answered) :])


class InProcessGrid(Grid):
    """``num_nodes`` virtual nodes, each with a Context of its own; node ``i`` has ``partition-id`` i.

    A client that raises becomes an error reply and its state is as before, as in Flower's simulation. Clients run one
    after the other, when their reply is read. A message to a node that does not exist is dropped.
    """

    def __init__(
        self, client_app: ClientApp, num_nodes: int, run_config: UserConfig | None = None, run_id: int = 1
    ) -> None:
        if num_nodes < 1:
            raise ValueError(f"num_nodes must be at least 1, got {num_nodes!r}")
        _flower.adopt_identity(run_id)
        self._app = client_app
        self._run = _flower.empty_run(run_id)
        self._run_config = dict(run_config or {})
        self._node_ids = range(FIRST_NODE_ID, FIRST_NODE_ID + num_nodes)
        self._contexts: dict[int, Context] = {}
        self._pushed: dict[str, Message] = {}
        self._ids = itertools.count(1)

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

    def get_node_ids(self) -> list[int]:
        return list(self._node_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Replies:  # noqa: ARG002
        """Replies that are made as they are read; nothing here can time out."""
        return Replies([self._send(message) for message in messages if self._knows(message)], self._answer)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = [self._send(message) for message in messages if self._knows(message)]
        self._pushed.update({message.metadata.message_id: message for message in sent})
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        pushed = [self._pushed.pop(message_id) for message_id in message_ids if message_id in self._pushed]
        return [self._answer(message) for message in pushed]

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def set_run(self, run: _flower.Run) -> None:
        self._run = run

    @property
    def run(self) -> _flower.Run:
        return self._run

    def _knows(self, message: Message) -> bool:
        return message.metadata.dst_node_id in self._node_ids

    def _send(self, message: Message) -> Message:
        _flower.stamp(message, str(next(self._ids)))
        return message

    def _answer(self, message: Message) -> Message:
        """Run the client on its own copy of the content: strategies put one RecordDict into all messages."""
        context = self.context(message.metadata.dst_node_id)
        before, content = context.state.copy(), message.content
        message.content = _flower.copy_content(content)
        try:
            reply = self._app(message, context)
            if reply.has_content():
                reply.content = _flower.copy_content(reply.content)
        except Exception as error:
            log.debug("A client raised", exc_info=True)
            context.state = before
            reply = Message(Error(_flower.CLIENT_RAISED, f"{type(error).__name__}: {error}"), reply_to=message)
        finally:
            message.content = content
        return self._send(reply)
