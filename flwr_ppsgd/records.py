"""Flower's records and messages, read and made where Flower 1.41 keeps them.

Flower checks the type of each entry and argument, which takes longer in all than a small gradient.
What is made here needs no check. If the installed Flower keeps its entries or fields elsewhere, its
own public ways are taken.
"""

import functools
import time
from collections.abc import Mapping
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict

Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)
Thing = TypeVar("Thing")
KINDS = (ArrayRecord, ConfigRecord, MetricRecord, RecordDict)
EMPTY: dict[Any, Any] = {kind: kind() for kind in KINDS}
ENTRIES = "_data"  # where a record keeps them


def _twin(thing: Thing) -> Thing:
    """Another object with the same fields."""
    fresh = object.__new__(type(thing))
    fresh.__dict__.update(thing.__dict__)
    return fresh


def entries(record: Record) -> dict[str, Any]:
    """The entries of a record, to be read and not to be changed."""
    kept = record.__dict__.get(ENTRIES)
    return kept if type(kept) is dict else dict(record.items())


def put(record: Record, added: Mapping[str, Any]) -> None:
    """Put entries into a record.

    Args:
        record: is changed.
        added: of the types that such a record holds.
    """
    kept = record.__dict__.get(ENTRIES)
    if type(kept) is dict:
        kept.update(added)
    else:
        record.update(added)


def filled(kind: type[Record], made: Mapping[str, Any]) -> Record:
    """A new record with these entries, of the types that such a record holds."""
    record: Record = _twin(EMPTY[kind])
    if type(record.__dict__.get(ENTRIES)) is not dict:
        record = kind()
        record.update(made)
    else:
        record.__dict__[ENTRIES] = dict(made)
    return record


def copied_content(content: RecordDict) -> RecordDict:
    """New records over the same immutable bytes."""
    return _like(content, {name: _copied(record) for name, record in entries(content).items()})


def _copied(record: Record) -> Record:
    own = entries(record)
    if type(record) is ConfigRecord or not isinstance(record, ArrayRecord):
        return _like(record, own)
    return _like(record, {name: _twin(array) for name, array in own.items()})


def _like(sample: Record, own: Mapping[str, Any]) -> Record:
    """A record of the same kind, with entries of its own under the same names."""
    kind = type(sample)
    if kind in EMPTY:
        return filled(kind, own)
    fresh = sample.copy()  # whatever else somebody's own kind of record has
    put(fresh, own)
    return fresh


def content_of(message: Message) -> dict[str, Any]:
    """The records in a message, by name, to be read and not to be changed."""
    return entries(message.content)


def messages_to(contents: Mapping[Any, RecordDict], kind: str) -> list[Message]:
    """A message to each node.

    Args:
        contents: what each node gets, by its id.
        kind: of the messages, such as ``train``.
    """
    made: list[Message] = []
    for node, content in contents.items():
        if made and "_metadata" in made[0].__dict__:
            made.append(_addressed(made[0], node, content))
        else:
            made.append(Message(content, node, kind))
    return made


def _addressed(sample: Message, node: int, content: RecordDict) -> Message:
    """The same message to another node."""
    metadata = _twin(sample.metadata)
    metadata.dst_node_id = node
    message = _twin(sample)
    message.__dict__["_metadata"] = metadata
    message.content = content
    return message


def reply_to(message: Message, records: Mapping[str, Any]) -> Message:
    """The reply to a message, with records that were made here."""
    content = filled(RecordDict, records)
    if not _replies_are_known():
        return Message(content, reply_to=message)
    return _reply(content, message)


def _reply(content: RecordDict, message: Message) -> Message:
    asked = message.metadata.__dict__
    now = time.time()
    metadata = object.__new__(Metadata)
    metadata.__dict__.update(
        asked,
        _message_id="",
        _src_node_id=asked["_dst_node_id"],
        _dst_node_id=asked["_src_node_id"],
        _src_task_id=asked["_dst_task_id"],
        _dst_task_id=asked["_src_task_id"],
        _reply_to_message_id=asked["_message_id"],
        _created_at=now,
        _ttl=asked["_created_at"] + asked["_ttl"] - now,
        _delivered_at="",
    )
    reply = object.__new__(Message)
    reply.__dict__.update(_metadata=metadata, _content=content, _error=None)
    return reply


@functools.cache
def _replies_are_known() -> bool:
    """Whether replies that are made here are those that Flower makes, tried once."""
    asked = Metadata(
        run_id=1,
        message_id="2",
        src_node_id=3,
        dst_node_id=4,
        reply_to_message_id="5",
        group_id="6",
        created_at=time.time() - 30.0,
        ttl=60.0,
        message_type="train",
        src_task_id=7,
        dst_task_id=8,
    )
    try:
        message = object.__new__(Message)
        message.__dict__.update(_metadata=asked, _content=RecordDict(), _error=None)
        theirs = Message(RecordDict(), reply_to=message)
        ours = _reply(RecordDict(), message)
        same_end = abs(_end(theirs) - _end(ours)) < 1.0
        for each in (theirs, ours):
            each.metadata.created_at = each.metadata.ttl = 0.0
        return same_end and theirs.__dict__ == ours.__dict__
    except Exception:
        return False


def _end(message: Message) -> float:
    """When a message expires."""
    return message.metadata.created_at + message.metadata.ttl
