"""Every round releases, whatever comes back: each reply is a bounded vector or zero.

w is compared to the last bit with a round in which the hostile user stays silent.
"""

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.common import Code, FitRes, Parameters, Status, parameters_to_ndarrays
from flwr.server.client_proxy import ClientProxy
from numpy.typing import NDArray

from flwr_ppsgd.legacy import PPSGDClient
from tests.contract.hostile_clients import (
    APP,
    SIZE,
    USERS,
    Floats,
    Meddle,
    MeddlingGrid,
    Named,
    array_of,
    grid,
    is_training,
    learner_for,
    legacy_round,
    legacy_strategy,
    new_context,
    npy,
    release,
    sent_vector,
    strategy,
    target,
    trained,
    w0,
    without_first,
)

Arrays = list[Array]
SEED = {"insecure_seed": 1}
CLIPPED = target(0) / np.linalg.norm(target(0))  # the first user's reply, in units of C
PICKLE = b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94."


def of(array: NDArray[Any]) -> Arrays:
    return [Array(array)]


def an_object_array() -> Arrays:
    """Python objects, which only an unpickler could read."""
    data = npy(np.ones(SIZE)).replace(b"'<f8'", b"'|O' ")
    return [array_of(data[:128] + PICKLE, dtype="object")]


USELESS: dict[str, Callable[[], Arrays]] = {
    "nothing": list,
    "NaN": lambda: of(np.full(SIZE, math.nan)),
    "infinity": lambda: of(np.full(SIZE, math.inf)),
    "minus infinity": lambda: of(np.full(SIZE, -math.inf)),
    "one NaN": lambda: of(np.array([0.1] * (SIZE - 1) + [math.nan])),
    "too long": lambda: of(np.ones(SIZE + 1)),
    "too short": lambda: of(np.ones(SIZE - 1)),
    "another shape": lambda: of(np.ones((2, 3))),
    "a scalar": lambda: of(np.array(1.0)),
    "millions of numbers": lambda: of(np.ones(3_000_000, dtype=np.float32)),
    "one array more": lambda: [Array(np.ones(SIZE)), Array(np.ones(SIZE))],
    "whole numbers": lambda: of(np.ones(SIZE, dtype=np.int64)),
    "complex numbers": lambda: of(np.ones(SIZE, dtype=np.complex128)),
    "booleans": lambda: of(np.ones(SIZE, dtype=np.bool_)),
    "words": lambda: of(np.array(["1.0"] * SIZE)),
    "objects": an_object_array,
    "a declared shape that is not that of the data": lambda: [array_of(npy(np.ones(SIZE + 3)))],
    "fewer bytes than the head says": lambda: [array_of(npy(np.ones(SIZE))[:-8])],
    "more bytes than the head says": lambda: [array_of(npy(np.ones(SIZE)) + bytes(8))],
    "a head that claims gigabytes": lambda: [
        array_of(npy(np.ones(SIZE)).replace(b"(6,), }         ", b"(6000000000,), }"))
    ],
    "no bytes": lambda: [array_of(b"")],
    "garbage": lambda: [array_of(b"\x93NUMPY\x01\x00\xff\xffgarbage")],
    "a pickle": lambda: [array_of(PICKLE)],
}
WRONG_RECORDS: dict[str, Callable[[str], RecordDict]] = {
    "no record": lambda _: RecordDict(),
    "another key": lambda name: RecordDict({name: ArrayRecord({"b": Array(np.ones(SIZE))})}),
    "another record": lambda _: RecordDict({"weights": ArrayRecord([np.ones(SIZE)])}),
    "a config where arrays should be": lambda name: RecordDict({name: ConfigRecord({"a": 1.0})}),
    "another serialisation": lambda name: RecordDict(
        {name: ArrayRecord({"0": Array("float64", (SIZE,), "torch.save", npy(np.ones(SIZE)))})}
    ),
}
COUNTED_DTYPES = ["<f2", "<f4", ">f4", ">f8", "longdouble"]
apis = pytest.mark.parametrize("api", ["message", "legacy"])


# --- both APIs


class Answer(NamedTuple):
    """What a user sends."""

    user: int
    arrays: Arrays


Change = Callable[[list[Answer]], list[Answer]]


def after_a_round(api: str, change: Change) -> tuple[Floats, int]:
    """w, and the number of charges, if other answers come than the honest ones."""
    if api == "legacy":
        return after_a_legacy_round(change)

    def meddle(messages: list[Message], replies: list[Message]) -> list[Message]:
        name, _ = sent_vector(replies[0])
        honest = []
        for user, reply in enumerate(replies):
            honest.append(Answer(user, list(reply.content.array_records[name].values())))
        return [
            Message(with_arrays(arrays)(name), reply_to=messages[user])
            for user, arrays in change(honest)
        ]

    return w_and_charges(meddle)


def after_a_legacy_round(change: Change) -> tuple[Floats, int]:
    """With a failure and somebody who was not asked, who count for nothing."""
    ppsgd = legacy_strategy(**SEED)
    proxies: list[ClientProxy] = []
    honest = []
    for proxy, instructions in legacy_round(ppsgd):
        context = new_context(int(proxy.cid))
        client = PPSGDClient(learner_for(context), context)
        w = parameters_to_ndarrays(instructions.parameters)
        arrays, _, _ = client.fit(w, instructions.config)
        proxies.append(proxy)
        honest.append(Answer(int(proxy.cid), [Array(array) for array in arrays]))
    proxies.append(Named("stranger"))
    results = []
    for user, sent in [*change(honest), Answer(USERS, honest[0].arrays)]:
        tensors = [array.data for array in sent]
        more: dict[str, Any] = {"loss": 1e9}  # ignored, as the number of rows is
        parameters = Parameters(tensors, "numpy.ndarray")
        results.append((proxies[user], FitRes(Status(Code.OK, ""), parameters, 10**9, more)))
    after, _ = ppsgd.aggregate_fit(1, results, [RuntimeError("no data")])
    return parameters_to_ndarrays(after)[0], ppsgd.ledger.rounds


def honest(answers: list[Answer]) -> list[Answer]:
    return answers


def silent(answers: list[Answer]) -> list[Answer]:
    """The first user sends nothing."""
    return answers[1:]


@apis
def test_the_first_user_counts_if_nobody_meddles(api: str) -> None:
    """Without this the tests below could not tell zero from a vector."""
    all_five, _ = after_a_round(api, honest)
    without, charges = after_a_round(api, silent)
    np.testing.assert_allclose(all_five - without, CLIPPED / USERS, rtol=1e-6)
    assert charges == 1
    np.testing.assert_array_equal(all_five, trained(strategy(**SEED), grid(), rounds=1))


@apis
@pytest.mark.parametrize("kind", USELESS)
def test_a_vector_that_cannot_be_used_counts_as_zero(kind: str, api: str) -> None:
    w, charges = after_a_round(api, lambda sent: [Answer(0, USELESS[kind]()), *sent[1:]])
    np.testing.assert_array_equal(w, after_a_round(api, silent)[0])
    assert charges == 1


@apis
@pytest.mark.parametrize("factor", [1.01, 1e3, 1e30, 1e150])
def test_the_server_clips_whatever_the_client_says(factor: float, api: str) -> None:
    """‖Δw‖ ≤ s_w·C/D, in the direction that was sent."""

    def huge(answers: list[Answer]) -> list[Answer]:
        (array,) = answers[0].arrays
        return [Answer(0, of(factor * array.numpy())), *answers[1:]]

    w, charges = after_a_round(api, huge)
    moved = w - after_a_round(api, silent)[0]
    assert np.linalg.norm(moved) <= (1 + 1e-8) / USERS
    np.testing.assert_allclose(moved, CLIPPED / USERS, rtol=1e-6)
    assert charges == 1


@apis
def test_only_the_first_valid_reply_of_a_node_counts(api: str) -> None:
    def many(answers: list[Answer]) -> list[Answer]:
        (array,) = answers[0].arrays
        useless = Answer(0, of(math.nan * array.numpy()))
        other = Answer(0, of(-3 * array.numpy()))
        return [useless, *answers, other, answers[0], other]

    w, charges = after_a_round(api, many)
    np.testing.assert_array_equal(w, after_a_round(api, honest)[0])
    assert charges == 1


@apis
def test_nobody_at_all_still_releases(api: str) -> None:
    w, charges = after_a_round(api, lambda _: [])
    assert np.all(w != 0)
    assert charges == 1


# --- Message API


def w_and_charges(meddle: Meddle, rounds: int = 1, **changes: Any) -> tuple[Floats, int]:
    ppsgd = strategy(**{**SEED, **changes})
    w = trained(ppsgd, MeddlingGrid(meddle), rounds)
    return w, ppsgd.ledger.rounds


def first_sends(content: Callable[[str, Floats], RecordDict]) -> Meddle:
    """The first user's reply has this content, made of an honest one's record and vector."""

    def meddle(messages: list[Message], replies: list[Message]) -> list[Message]:
        return [Message(content(*sent_vector(replies[0])), reply_to=messages[0]), *replies[1:]]

    return meddle


def with_arrays(arrays: Arrays) -> Callable[[str], RecordDict]:
    named = {str(place): array for place, array in enumerate(arrays)}
    return lambda name: RecordDict({name: ArrayRecord(named)})


def assert_counts_as_zero(meddle: Meddle, rounds: int = 1) -> None:
    w, charges = w_and_charges(meddle, rounds)
    expected, _ = w_and_charges(without_first, rounds)
    np.testing.assert_array_equal(w, expected)
    assert charges == rounds


@pytest.mark.parametrize("kind", WRONG_RECORDS)
def test_a_reply_of_another_form_counts_as_zero(kind: str) -> None:
    assert_counts_as_zero(first_sends(lambda name, _: WRONG_RECORDS[kind](name)))


def test_an_error_counts_as_zero_and_the_rounds_go_on() -> None:
    def broken(messages: list[Message], replies: list[Message]) -> list[Message]:
        return [Message(Error(2, "\x1b[2Jit broke"), reply_to=messages[0]), *replies[1:]]

    assert_counts_as_zero(broken, rounds=3)


def test_a_reply_in_anothers_name_counts_for_nobody() -> None:
    """The first user stays silent, and the second answers for both."""

    def impersonating(messages: list[Message], replies: list[Message]) -> list[Message]:
        forged = Message(replies[1].content, reply_to=messages[0])
        second = messages[1].metadata.dst_node_id
        forged.metadata.__dict__["_src_node_id"] = second  # a SuperLink knows who pushed it
        return [forged, *replies[1:]]

    assert_counts_as_zero(impersonating)


def test_a_reply_to_the_round_before_counts_for_nobody() -> None:
    """The first user's replies come one round late, and then both at once."""
    kept: list[Message] = []

    def late(_: list[Message], replies: list[Message]) -> list[Message]:
        kept.append(replies[0])
        return [*kept[:-1], *replies[1:]]

    assert_counts_as_zero(late, rounds=3)


def test_a_reply_of_a_node_that_was_not_asked_counts_as_zero() -> None:
    """Of 40 users about ten are drawn; all others answer too."""
    few = release(population=40, rate=0.25)
    asked: list[int] = []

    def all_answer(messages: list[Message], replies: list[Message]) -> list[Message]:
        asked.append(len(messages))
        drawn = {message.metadata.dst_node_id for message in messages}
        others = [node for node in on.get_node_ids() if node not in drawn]
        content = replies[0].content
        strangers = [Message(content, reply_to=Message(content, node, "train")) for node in others]
        return [*strangers, *replies, *strangers]

    on = MeddlingGrid(all_answer, users=40)
    ppsgd = strategy(release=few, **SEED)
    w = trained(ppsgd, on, rounds=2)
    assert 0 < min(asked) <= max(asked) < 40
    np.testing.assert_array_equal(w, trained(strategy(release=few, **SEED), grid(users=40)))
    assert ppsgd.ledger.rounds == 2


@pytest.mark.parametrize("dtype", COUNTED_DTYPES)
def test_any_real_float_dtype_counts_as_the_numbers_that_it_holds(dtype: str) -> None:
    def sending(sent_as: Any) -> Meddle:
        def content(name: str, vector: Floats) -> RecordDict:
            return with_arrays(of(vector.astype(dtype).astype(sent_as)))(name)

        return first_sends(content)

    narrow, _ = w_and_charges(sending(dtype))
    double, _ = w_and_charges(sending(np.float64))
    np.testing.assert_allclose(narrow, double, atol=1e-8)
    silent, _ = w_and_charges(without_first)
    assert np.linalg.norm(narrow - silent) > 0.9 / USERS


def test_five_hostile_users_together_move_w_by_at_most_the_clip_norm() -> None:
    """Without noise: each sends the largest numbers that there are, or nothing that can be used."""
    largest = np.finfo(np.float64).max

    def hostile(messages: list[Message], replies: list[Message]) -> list[Message]:
        name, _ = sent_vector(replies[0])
        vectors = [largest, -largest, 1e-320, math.nan, 1e200]
        arrays = [of(np.full(SIZE, value)) for value in vectors]
        return [
            Message(with_arrays(array)(name), reply_to=message)
            for message, array in zip(messages, arrays, strict=True)
        ]

    w, charges = w_and_charges(hostile, release=release(z=0.0))
    assert np.linalg.norm(w) <= 3 / USERS
    assert charges == 1


def test_what_else_a_reply_holds_is_ignored() -> None:
    """Metrics, counts and further records change neither w nor the metrics of the round."""

    def content(name: str, vector: Floats) -> RecordDict:
        return RecordDict(
            {
                name: ArrayRecord([vector]),
                "epsilon": ConfigRecord({"epsilon": 0.0}),
                "more": ArrayRecord([np.full(3, 1e30)]),
            }
        )

    more = first_sends(content)
    for meddle in (more, lambda _, replies: replies):
        result = strategy(**SEED).start(MeddlingGrid(meddle), w0(), num_rounds=1)
        assert set(result.train_metrics_clientapp[1]) == {"epsilon"}
    w, _ = w_and_charges(more)
    expected, _ = w_and_charges(lambda _, replies: replies)
    np.testing.assert_array_equal(w, expected)


def test_metrics_report_and_log_do_not_tell_how_many_replied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Flower shows its log to everyone who may submit runs."""

    def report(meddle: Meddle) -> tuple[Any, ...]:
        ppsgd = strategy()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="flwr.ppsgd"):
            result = ppsgd.start(MeddlingGrid(meddle), w0(), num_rounds=2)
        return result.train_metrics_clientapp, ppsgd.privacy_data(), caplog.messages

    everyone = report(lambda _, replies: replies)
    assert everyone == report(without_first)
    assert everyone == report(lambda _, replies: replies[:1])


def failing_from(first: int) -> Callable[[Message, Context], Message]:
    """Clients all of which fail from some round on."""

    def failing(message: Message, context: Context) -> Message:
        if (
            is_training(message)
            and int(str(message.content.config_records["ppsgd-order"]["round"])) >= first
        ):
            raise RuntimeError("no data here")
        return APP(message, context)

    return failing


@pytest.mark.parametrize("users", [3, 12])
def test_two_rounds_in_which_nobody_could_be_used_end_the_run_and_are_charged(users: int) -> None:
    ppsgd = strategy(release=release(population=users))
    with pytest.raises(RuntimeError, match=r"(?s)rounds 2 and 3.*charged"):
        trained(ppsgd, grid(failing_from(2), users), rounds=9)
    assert ppsgd.ledger.rounds == 3


def test_a_round_between_them_in_which_somebody_replied_lets_the_run_go_on() -> None:
    """However few were asked in it."""
    failed = True  # a first round that fails would end the run

    def every_second_at_most(messages: list[Message], replies: list[Message]) -> list[Message]:
        nonlocal failed
        failed = len(messages) >= 10 and not failed
        return [] if failed else replies

    users = 20
    ppsgd = strategy(release=release(population=users, rate=0.5), insecure_seed=1)
    trained(ppsgd, MeddlingGrid(every_second_at_most, users=users), rounds=30)
    assert ppsgd.ledger.rounds == 30


@pytest.mark.parametrize("users", [3, 12])
def test_a_mistake_that_everybody_makes_costs_the_first_release_alone(users: int) -> None:
    ppsgd = strategy(release=release(population=users))
    with pytest.raises(RuntimeError, match=r"(?s)round 1 each client.*no data here.*charged"):
        trained(ppsgd, grid(failing_from(1), users), rounds=9)
    assert ppsgd.ledger.rounds == 1


def test_vectors_that_are_not_finite_never_end_a_run() -> None:
    """They may be a user's data: ending because of them would tell."""

    def not_finite(messages: list[Message], replies: list[Message]) -> list[Message]:
        name, _ = sent_vector(replies[0])
        content = with_arrays(of(np.full(SIZE, math.nan)))(name)
        return [Message(content, reply_to=message) for message in messages]

    _, charges = w_and_charges(not_finite, rounds=4)
    assert charges == 4
