"""What a client refuses in a secure sum, whoever asks: once per round, on fixed terms."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from flwr_ppsgd import Order, Poisson, Release, SecureSum, client_app
from flwr_ppsgd.client.account import Agreement
from flwr_ppsgd.client.app import PPSGDClient
from flwr_ppsgd.client.policy import Policy
from flwr_ppsgd.client.refusal import ClientError, RefusedError
from flwr_ppsgd.client.report import client_report
from flwr_ppsgd.secure.terms import SecureTerms
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.wire import DATA, ORDER, SECURE, payload_hash
from tests.support.toy import release, strategy, toy_learner, w0

RULES = SecureSum(honest=4, colluding=1)
CLIENTS = 6
APP = client_app(toy_learner)
TERMS = SecureTerms.of(Release(Poisson(6, 1.0), 1.0, 1.0, aggregation=RULES), None)
TRAINING: dict[str, Any] = {"training": 8, "starts": (1,), "charges": 2}
PLAN = {"gradient": (1.0, 9)}
ORDER_1 = Order(3, 0.5, 1.0, "mean", True, terms=TERMS, stage=3, plan=PLAN, **TRAINING)


def refused(message: Message, context: Context) -> str:
    """The error of a message that must be refused."""
    with pytest.raises(ClientError) as caught:
        APP(message, context)
    return str(caught.value)


def run(meddle: Callable[[Message, Context], None], **node_config: str) -> None:
    """Two rounds. Before partition 0 answers a message, it can be asked for something else."""

    def watching(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 0:
            context.node_config.update(node_config)
            meddle(message, context)
        return APP(message, context)

    ppsgd = strategy(release=replace(release(CLIENTS, z=1.0), aggregation=RULES))
    ppsgd.start(InProcessGrid(watching, CLIENTS), w0(), num_rounds=2)  # type: ignore[arg-type]


def order_of(message: Message) -> Order:
    return Order.from_flat(message.content[ORDER])


def with_order(message: Message, order: Order, payload: bytes | None = None) -> Message:
    """The same message with another Order, and another payload."""
    records = dict(message.content)
    records[ORDER] = ConfigRecord(order.to_flat())
    if payload is not None:
        records[SECURE] = ConfigRecord({DATA: payload})
    return Message(RecordDict(records), dst_node_id=1, message_type="train")


def before_the_charge(message: Message, order: Order) -> list[Message]:
    """Survivors are named before the round is charged."""
    if order.stage != 4:
        return []
    return [with_order(message, replace(order, charges=order.charges - 1))]


def other_payloads(message: Message, order: Order) -> list[Message]:
    """One that is not the named one, and one that cannot be read."""
    if order.stage == 1:
        return []
    flipped = bytearray(message.content[SECURE][DATA])  # type: ignore[arg-type]
    flipped[-1] ^= 1
    named = replace(order, payload=payload_hash(b"xyz"))
    return [with_order(message, order, bytes(flipped)), with_order(message, named, b"xyz")]


def fewer_colluders(message: Message, order: Order) -> list[Message]:
    """The other terms: tests.contract.test_secure_sums."""
    if order.round == 1 or order.terms is None:
        return []
    return [with_order(message, replace(order, terms=replace(order.terms, colluding=0)))]


def without_a_mask(message: Message, order: Order) -> list[Message]:
    """In a training that has had a secure sum."""
    if order.round == 1 or order.stage != 3:
        return []
    plain = (replace(order, terms=None, stage=0), replace(order, stage=0))
    return [with_order(message, each) for each in plain]


@pytest.mark.parametrize(
    ("lies", "count"),
    [(before_the_charge, 2), (other_payloads, 12), (fewer_colluders, 4), (without_a_mask, 2)],
)
def test_a_server_that_lies_is_refused(
    lies: Callable[[Message, Order], list[Message]], count: int
) -> None:
    seen: list[str] = []

    def meddle(message: Message, context: Context) -> None:
        order = order_of(message)
        if order.stage:
            seen.extend(refused(each, context) for each in lies(message, order))

    run(meddle)
    assert seen == ["refused-secure: ValueError"] * count


def test_a_legacy_client_answers_no_exchange_of_a_secure_sum() -> None:
    """It knows nothing of masks: its vector would go out as it is."""
    context = InProcessGrid(APP, 1).context(1_000_000)
    context.node_config["ppsgd-secure"] = True
    client = PPSGDClient(toy_learner(context), context)
    for stage in (0, 1, 3):
        order = replace(ORDER_1, stage=stage)
        with pytest.raises(ClientError, match="refused-"):
            client.fit([np.zeros(6)], order.to_flat())


def test_no_more_rounds_are_answered_than_are_planned_with_restarts() -> None:
    memory = Agreement().with_order(ORDER_1, Policy())
    for round_ in range(1, 10):
        memory = memory.with_answer(replace(ORDER_1, round=round_))
    with pytest.raises(RefusedError, match="9 answers were given and 9 are planned"):
        memory.with_answer(replace(ORDER_1, round=10))
    restarted = replace(ORDER_1, round=9, starts=(1, 9))
    memory = memory.with_answer(restarted)
    with pytest.raises(RefusedError, match="with 1 restarts"):
        memory.with_answer(replace(restarted, round=10))


def test_a_round_of_an_earlier_start_is_not_answered_any_more() -> None:
    memory = Agreement().with_order(ORDER_1, Policy())
    memory = memory.with_answer(replace(ORDER_1, round=3, starts=(1, 3)))
    for round_, starts in ((4, (1,)), (3, (1, 3))):
        with pytest.raises(RefusedError, match="a round is answered once"):
            memory.with_answer(replace(ORDER_1, round=round_, starts=starts))
    memory.with_answer(replace(ORDER_1, round=3, starts=(1, 3, 3)))


def test_client_report_tells_of_masked_vectors_and_refusals(tmp_path: Path) -> None:
    firsts: list[Message] = []

    def again(message: Message, context: Context) -> None:
        if order_of(message).stage == 1:
            firsts.append(message)
        if order_of(message).stage == 4:
            refused(firsts[-1], context)

    run(again, **{"ppsgd-state-dir": str(tmp_path), "ppsgd-user": "ann"})
    text = client_report(tmp_path)
    assert "masked vectors: 2; each hides a gradient that was bounded and had noise" in text
    assert "refused-secure (2)" in text
    assert "against the server and any 1 of the other users together" in text


def test_a_scalar_that_is_not_published_is_no_order() -> None:
    """A node that is for secure sums must not answer it in plain."""
    vote = replace(ORDER_1, terms=None, stage=0, asks="size", publishes=False)
    content = RecordDict({"arrays": w0(), ORDER: ConfigRecord(vote.to_flat())})
    asked = Message(content, dst_node_id=1, message_type="train")
    context = Context(1, 1, {"partition-id": 0, "ppsgd-secure": True}, RecordDict(), {})
    with pytest.raises(ClientError, match="refused-order"):
        APP(asked, context)
