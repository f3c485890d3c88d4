"""InProcessGrid: any ClientApp, any strategy, no Ray."""

import gc
import sys
import tracemalloc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_ppsgd import client_app
from flwr_ppsgd.simulation import InProcessGrid
from tests.support.toy import flat, grid, opened, release, strategy, toy_learner, w0

stock = ClientApp()


@stock.train()
def train(message: Message, context: Context) -> Message:
    """Counts the messages of a node in its state."""
    context.state["seen"] = MetricRecord({"times": 1 + times(context)})
    return Message(RecordDict(), reply_to=message)


def times(context: Context) -> int:
    seen = context.state.get("seen")
    return int(str(seen["times"])) if isinstance(seen, MetricRecord) else 0


def test_each_node_has_a_context_and_state_of_its_own() -> None:
    on = InProcessGrid(stock, 3, run_config={"lr": 0.1})
    node = on.get_node_ids()[1]
    list(on.send_and_receive([Message(RecordDict(), node, "train")]))
    assert [times(on.context(n)) for n in on.get_node_ids()] == [0, 1, 0]
    assert on.context(node).node_config == {"partition-id": 1, "num-partitions": 3}
    assert on.context(node).run_config == {"lr": 0.1}


vandal = ClientApp()


@vandal.train()
def deface(message: Message, context: Context) -> Message:
    """Changes everything it was given, then fails."""
    context.state["mark"] = MetricRecord({"here": 1})
    message.content.array_records["arrays"]["0"].data = b"defaced"
    message.content.config_records["config"]["defaced"] = True
    message.content["more"] = MetricRecord({"x": 1})
    raise RuntimeError("deliberate")


def test_a_client_cannot_touch_what_others_get_and_its_failure_is_an_error_reply() -> None:
    on = InProcessGrid(vandal, 2)
    content = RecordDict({"arrays": w0(np.ones(2)), "config": ConfigRecord()})
    messages = [Message(content, node, "train") for node in on.get_node_ids()]
    replies = list(on.send_and_receive(messages))
    assert [reply.error.code for reply in replies] == [2, 2]
    assert replies[0].error.reason == "RuntimeError: deliberate"
    assert flat(content.array_records["arrays"]).tolist() == [1.0, 1.0]
    assert list(content) == ["arrays", "config"]
    assert not content.config_records["config"]
    assert "mark" not in on.context(on.get_node_ids()[0]).state


def test_messages_to_unknown_nodes_are_dropped() -> None:
    on = grid(1)
    assert len(on.send_and_receive([Message(RecordDict(), 42, "train")])) == 0


def test_replies_can_be_read_as_a_list() -> None:
    on = grid()
    replies = on.send_and_receive(opened(strategy(), on))
    assert len(replies) == 5
    assert replies[3] is replies[3]
    assert [r.metadata.src_node_id for r in replies] == [r.metadata.src_node_id for r in replies[:]]
    assert replies[-1] is list(replies)[4]


def test_ppsgd_keeps_no_more_than_one_reply_at_a_time() -> None:
    """Server memory is that of the model, not of the cohort."""
    app = client_app(toy_learner)
    replies: list[weakref.ref[Message]] = []
    kept: list[int] = []

    def counted(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type == "train":
            gc.collect()
            kept.append(sum(each() is not None for each in replies))
            replies.append(weakref.ref(reply))
        return reply

    on = InProcessGrid(counted, 20)  # type: ignore[arg-type]
    strategy(release=release(20)).start(on, w0(), num_rounds=1)
    assert len(replies) == 20
    assert max(kept) <= 1


def test_a_grid_without_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="num_nodes must be a whole number from 1"):
        grid(0)


def work(call: Callable[[], object]) -> int:
    """How many functions a call has called, Python's and C's."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def memory(call: Callable[[], object]) -> int:
    """The most bytes that a call holds at once."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("listed", [False, True])
def test_a_round_asks_a_million_users_at_the_price_of_a_thousand(listed: bool) -> None:
    """Ten are drawn. Per user of the population there is a uniform of 8 bytes and a bit of a mask;
    not even a list of ids, which takes 40 bytes each."""

    def turns(population: int) -> Callable[[], object]:
        on = grid(population)
        ppsgd = strategy(
            release=release(population, rate=10 / population, z=1.0),
            delta=1e-9,
            insecure_seed=1,
            enrolled=on.get_node_ids() if listed else None,
        )
        rounds = iter(range(1, 100))

        def turn() -> None:
            round_ = next(rounds)
            messages = ppsgd.configure_train(round_, w0(), ConfigRecord(), on)
            assert len(messages) < 30
            ppsgd.aggregate_train(round_, on.send_and_receive(messages))

        turn()
        return turn

    few = turns(10**3)
    many = turns(10**6)
    calls = [sum(work(turn) for _ in range(10)) for turn in (few, many)]
    assert calls[1] < 2 * calls[0], "10^6 coins are drawn in 31 blocks"
    assert memory(many) < memory(few) + 12 * 10**6


def test_who_is_drawn_does_not_depend_on_how_the_nodes_are_listed() -> None:
    class Listed(InProcessGrid):
        def get_node_ids(self) -> list[int]:
            return list(super().get_node_ids())

    for round_ in (1, 2):
        asked = []
        for kind in (InProcessGrid, Listed):
            ppsgd = strategy(release=release(50, rate=0.2), insecure_seed=3)
            messages = ppsgd.configure_train(round_, w0(), ConfigRecord(), kind(stock, 50))
            asked.append([message.metadata.dst_node_id for message in messages])
        assert asked[0] == asked[1]
        assert asked[0]
