"""InProcessGrid: any ClientApp, any strategy, no Ray."""

import gc
import weakref

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    Krum,
    Strategy,
)

from flwr_ppsgd.simulation.grid import InProcessGrid
from tests.support.toy import flat, grid, opened, release, strategy, w0

stock = ClientApp()


@stock.train()
def train(message: Message, context: Context) -> Message:
    """Half a step toward the node's own number."""
    w = flat(message.content.array_records["arrays"])
    partition = int(context.node_config["partition-id"])
    goal = 1.0 + partition  # never w itself: Flower's DP wrapper divides by ‖update‖
    arrays = ArrayRecord([w + 0.5 * (goal - w)])
    metrics = MetricRecord({"num-examples": 1, "loss": 0.5})
    context.state["seen"] = MetricRecord({"times": 1 + times(context)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@stock.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    metrics = MetricRecord({"num-examples": 1, "times": times(context)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def times(context: Context) -> int:
    seen = context.state.get("seen")
    return int(str(seen["times"])) if isinstance(seen, MetricRecord) else 0


@pytest.mark.parametrize(
    "stock_strategy",
    [
        FedAvg(),
        FedAdam(),
        FedProx(proximal_mu=0.1),
        FedMedian(),
        FedTrimmedAvg(),
        Krum(),
        DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, 6),
    ],
    ids=lambda s: type(s).__name__,
)
def test_stock_strategies_run_unmodified(stock_strategy: Strategy) -> None:
    result = stock_strategy.start(InProcessGrid(stock, 6), w0(np.zeros(3)), num_rounds=3)
    assert np.all(np.isfinite(flat(result.arrays)))
    assert result.evaluate_metrics_clientapp[3]["times"] == 3


def test_fedavg_gives_what_it_should() -> None:
    """Nodes pull toward 1..6 by half: .5·3.5, then .75·3.5."""
    result = FedAvg().start(InProcessGrid(stock, 6), w0(np.zeros(1)), num_rounds=2)
    np.testing.assert_allclose(flat(result.arrays), 0.75 * 3.5)


def test_each_node_has_a_context_and_state_of_its_own() -> None:
    on = InProcessGrid(stock, 3, run_config={"lr": 0.1})
    node = on.get_node_ids()[1]
    message = Message(
        RecordDict({"arrays": w0(np.zeros(1)), "config": ConfigRecord()}), node, "train"
    )
    list(on.send_and_receive([message]))
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


def test_replies_know_the_message_they_answer() -> None:
    on = grid()
    messages = opened(strategy(), on)
    replies = on.send_and_receive(messages)
    assert [r.metadata.reply_to_message_id for r in replies] == [
        m.metadata.message_id for m in messages
    ]
    assert len({m.metadata.message_id for m in messages}) == 5


def test_messages_to_unknown_nodes_are_dropped() -> None:
    on = grid(1)
    assert len(on.send_and_receive([Message(RecordDict(), 42, "train")])) == 0


def test_push_and_pull() -> None:
    on = grid()
    ids = on.push_messages(strategy().configure_train(1, w0(), ConfigRecord(), on))
    replies = on.pull_messages(ids[:2])
    assert {reply.metadata.reply_to_message_id for reply in replies} == set(ids[:2])
    assert len(on.pull_messages(ids)) == 3
    assert on.pull_messages(ids) == []


def test_replies_can_be_read_as_a_list() -> None:
    on = grid()
    replies = on.send_and_receive(opened(strategy(), on))
    assert len(replies) == 5
    assert replies[3] is replies[3]
    assert [r.metadata.src_node_id for r in replies] == [r.metadata.src_node_id for r in replies[:]]
    assert replies[-1] is list(replies)[4]


def test_ppsgd_keeps_no_more_than_one_reply_at_a_time() -> None:
    """Server memory is that of the model, not of the cohort."""
    on = grid(20)
    ppsgd = strategy(release=release(20))
    replies = on.send_and_receive(opened(ppsgd, on))
    alive: list[weakref.ref[Message]] = []
    most = 0
    answer = replies._answer

    def counted(message: Message) -> Message:
        nonlocal most
        gc.collect()
        most = max(most, sum(ref() is not None for ref in alive))
        reply = answer(message)
        alive.append(weakref.ref(reply))
        return reply

    replies._answer = counted
    ppsgd.aggregate_train(1, replies)
    assert len(alive) == 20
    assert most <= 1


def test_a_grid_without_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="num_nodes must be a whole number from 1"):
        grid(0)
