"""Records and messages are those that Flower would make, wherever it keeps their parts."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)

from flwr_ppsgd import records
from flwr_ppsgd.records import (
    content_of,
    copied_content,
    entries,
    filled,
    messages_to,
    put,
    reply_to,
)
from flwr_ppsgd.simulation.flower_internals import adopt_identity

VALUES = np.arange(6.0)
FIELDS: dict[str, Any] = {"round": 3, "promise": "none", "step": 0.5, "publishes": True}


def content() -> RecordDict:
    return RecordDict(
        {
            "arrays": ArrayRecord({"w": Array(VALUES)}),
            "config": ConfigRecord({**FIELDS}),
            "metrics": MetricRecord({"loss": 0.5}),
        }
    )


def asked() -> Message:
    """A message as a client gets it."""
    adopt_identity(1)
    message = Message(content(), 7, "train.default", ttl=60.0, group_id="round 3", dst_task_id=11)
    message.metadata.__dict__["_message_id"] = "the id"
    message.metadata.created_at -= 30.0
    return message


def lasting(metadata: Metadata) -> dict[str, Any]:
    """All fields, and the moment when the message expires instead of when it was made."""
    fields = dict(metadata.__dict__)
    fields["expires"] = pytest.approx(fields.pop("_created_at") + fields.pop("_ttl"), abs=1e-3)
    return fields


def test_records_are_filled_as_flower_would() -> None:
    order = filled(ConfigRecord, FIELDS)
    assert order == ConfigRecord({**FIELDS})
    assert order.deflate() == ConfigRecord({**FIELDS}).deflate()
    made = {
        "arrays": filled(ArrayRecord, {"w": Array(VALUES)}),
        "config": order,
        "metrics": filled(MetricRecord, {"loss": 0.5}),
    }
    assert filled(RecordDict, made) == content()
    assert filled(RecordDict, made).object_id == content().object_id
    assert not filled(ConfigRecord, {})  # each one is new


def test_a_filled_record_checks_what_is_put_in_later() -> None:
    with pytest.raises(TypeError):
        filled(MetricRecord, {})["loss"] = "large"  # type: ignore[assignment]


class Elsewhere(ConfigRecord):
    """A record of a Flower that keeps entries in another place."""

    def __init__(self) -> None:
        self.__dict__["checked"] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.__dict__["checked"][key] = value

    def __getitem__(self, key: str) -> Any:
        return self.__dict__["checked"][key]

    def items(self) -> Any:
        return self.__dict__["checked"].items()


def test_a_flower_that_keeps_entries_elsewhere_checks_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = Elsewhere()
    put(record, {"round": 3})
    assert record.__dict__["checked"] == entries(record) == {"round": 3}
    monkeypatch.setitem(records.EMPTY, Elsewhere, Elsewhere())
    assert entries(filled(Elsewhere, FIELDS)) == FIELDS
    assert entries(filled(Elsewhere, {})) == {}


def change_an_array(changed: RecordDict) -> None:
    changed.array_records["arrays"]["w"].data = b"other"


def change_an_entry(changed: RecordDict) -> None:
    changed.config_records["config"]["round"] = 4


def remove_an_array(changed: RecordDict) -> None:
    del changed.array_records["arrays"]["w"]


def add_a_metric(changed: RecordDict) -> None:
    changed.metric_records["metrics"]["more"] = 1.0


def remove_a_record(changed: RecordDict) -> None:
    del changed["config"]


@pytest.mark.parametrize(
    "change",
    [change_an_array, change_an_entry, remove_an_array, add_a_metric, remove_a_record],
)
def test_a_copy_can_be_changed_alone(change: Callable[[RecordDict], None]) -> None:
    own = content()
    fresh = copied_content(own)
    assert fresh == own
    change(fresh)
    assert fresh != own
    assert own == content()


class Remembering(ConfigRecord):
    """Somebody's own kind of record, which holds more than entries."""

    def __init__(self) -> None:
        super().__init__({"round": 3})
        self.__dict__["cache"] = []


def test_a_copy_shares_nothing_that_somebody_put_beside_the_entries() -> None:
    own = RecordDict({"order": Remembering()})
    own.__dict__["cache"] = []
    own["order"].__dict__["_object_id"] = "of the old entries"
    fresh = copied_content(own)
    assert type(fresh["order"]) is Remembering
    assert fresh == own
    for record in (fresh, fresh["order"]):
        assert not {"cache", "_object_id"} & set(record.__dict__)


def test_messages_to_many_are_those_to_each() -> None:
    adopt_identity(1)
    contents = {node: content() for node in (5, 9, 7)}
    made = messages_to(contents, "train")
    for (node, own), message in zip(contents.items(), made, strict=True):
        theirs = Message(own, node, "train")
        assert lasting(message.metadata) == lasting(theirs.metadata)
        assert message.content is own
        assert not message.has_error()
    made[0].metadata.__dict__["_message_id"] = "one"
    assert made[1].metadata.message_id == ""
    assert messages_to({}, "train") == []


def test_a_reply_is_the_one_that_flower_makes() -> None:
    message = asked()
    reply = reply_to(message, entries(content()))
    theirs = Message(content(), reply_to=message)
    assert lasting(reply.metadata) == lasting(theirs.metadata)
    assert reply.metadata.dst_node_id != reply.metadata.src_node_id == 7
    assert set(reply.__dict__) == set(theirs.__dict__)
    assert reply.content == content()
    assert content_of(reply).keys() == content().keys()
    assert not reply.has_error()
    assert records._replies_are_known()


@pytest.fixture
def another_flower(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One whose messages have a field more."""
    made = Message.__init__

    def with_a_field_more(self: Message, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        self.__dict__["_priority"] = 1

    monkeypatch.setattr(Message, "__init__", with_a_field_more)
    records._replies_are_known.cache_clear()
    yield
    records._replies_are_known.cache_clear()


@pytest.mark.usefixtures("another_flower")
def test_a_flower_with_other_messages_makes_the_reply_itself() -> None:
    reply = reply_to(asked(), {})
    assert reply.__dict__["_priority"] == 1
    assert not records._replies_are_known()


def test_a_flower_whose_messages_cannot_be_read_makes_the_reply_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> Message:
        raise KeyError("_dst_node_id")

    records._replies_are_known.cache_clear()
    monkeypatch.setattr(records, "_reply", refuse)
    assert reply_to(asked(), {}).metadata.reply_to_message_id == "the id"
    monkeypatch.undo()
    records._replies_are_known.cache_clear()


def test_a_copy_of_a_message_stands_alone() -> None:
    """What ``copy.deepcopy`` gives is what was made here."""
    first, second = messages_to({5: content(), 9: content()}, "evaluate")
    assert copy.deepcopy(second).content == second.content
    second.content = RecordDict()
    assert first.content == content()
    assert Message(Error(1, "none"), reply_to=first).metadata.dst_node_id != 5
