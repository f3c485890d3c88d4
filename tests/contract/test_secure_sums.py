"""A secure sum: the server gets a noisy sum of bounded vectors or nothing, whoever misbehaves.

A round takes four exchanges. The server says in each message which round it is, and a client counts
the messages of a round.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from flwr_ppsgd import PPSGD, Ledger, Order, Poisson, Release, SecureSum, client_app
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract.hostile_clients import (
    APP,
    App,
    Floats,
    MeddlingGrid,
    Target,
    content_bytes,
    flat,
    grid,
    is_training,
    legacy_strategy,
    new_context,
    release,
    strategy,
    target,
    trained,
    user_of,
    w0,
)

CLIENTS = 9
RULES = SecureSum(honest=6, colluding=1)
EXCHANGES = [1, 2, 3, 4]
Gone = Mapping[tuple[int, int], set[int]]


def secure(z: float = 0.0, rules: SecureSum = RULES, **changes: Any) -> PPSGD:
    summed = release(z=z, population=CLIENTS, aggregation=rules)
    return strategy(**{"release": summed, **changes})


def plain(z: float = 0.0) -> PPSGD:
    return strategy(release=release(z=z, population=CLIENTS))


def of(app: App = APP) -> InProcessGrid:
    return grid(app, CLIENTS)


Before = Callable[[Message, Context, int, int], None]


class Exchanging:
    """The app on nodes that know which exchange of which round a message is.

    Args:
        app: what every node runs.
        before: is called first, with the message, the context, the round and the exchange.
    """

    def __init__(self, app: App = APP, before: Before | None = None) -> None:
        self._app = app
        self._before = before
        self._messages: Counter[tuple[int, int]] = Counter()  # by user and round
        self.replies: list[tuple[int, int, Message]] = []  # user, exchange, reply

    def __call__(self, message: Message, context: Context) -> Message:
        if not is_training(message):
            return self._app(message, context)
        round_ = int(message.content["config"]["server-round"])  # type: ignore[arg-type]
        user = user_of(context)
        self._messages[user, round_] += 1
        exchange = self._messages[user, round_]
        if self._before is not None:
            self._before(message, context, round_, exchange)
        reply = self.answer(message, context, round_, exchange)
        self.replies.append((user, exchange, reply))
        return reply

    def answer(self, message: Message, context: Context, round_: int, exchange: int) -> Message:  # noqa: ARG002
        return self._app(message, context)


def dropping(gone: Gone) -> Exchanging:
    """Some users do not answer; who, by round and exchange."""

    def drop(_: Message, context: Context, round_: int, exchange: int) -> None:
        if user_of(context) in gone.get((round_, exchange), set()):
            raise RuntimeError("gone")

    return Exchanging(before=drop)


# --- the sum


def test_without_noise_w_is_that_of_the_plain_sum_to_the_last_bit() -> None:
    np.testing.assert_array_equal(trained(secure(), of(), 3), trained(plain(), of(), 3))


class Still(Target):
    """Has nothing to say."""

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:  # noqa: ARG002
        return np.zeros_like(w), np.zeros_like(theta)


def still_learner(_: Context) -> Still:
    return Still(np.zeros(0))


def test_noise_in_w_is_that_of_all_clients_in_the_sum_and_fresh_in_every_round() -> None:
    """Variance (zC)²·n/h: nine shares where six are charged for."""
    size = 20_000
    z = 2.0
    seen: list[Floats] = []

    def keep(_: int, result: Any) -> None:
        seen.append(flat(result.arrays))

    on = of(client_app(still_learner))
    secure(z).start(on, w0(size), num_rounds=2, on_round=keep)
    scale = CLIENTS / z / np.sqrt(CLIENTS / RULES.honest)  # s_w = 1, C = 1
    first, second = np.diff(seen, axis=0) * scale
    for noise in (first, second):
        assert abs(noise.var() - 1) < 5 * np.sqrt(2 / size)
        assert abs(noise.mean()) < 5 / np.sqrt(size)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(size)


def test_a_client_bounds_its_own_vector() -> None:
    """The server could not: one user's gradient is a million times as long as the clip norm."""

    def loud(context: Context) -> Target:
        return Target(1e6 * target(0) if user_of(context) == 0 else np.zeros(6))

    w = trained(secure(), of(client_app(loud)), rounds=1)
    expected = target(0) / np.linalg.norm(target(0)) / CLIENTS
    np.testing.assert_allclose(w, expected, rtol=1e-6)


class Failing(Target):
    """Fails for some data, in one way or another."""

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:
        if self.target[0] > 0.8:
            raise RuntimeError(f"my data are {self.target}")
        if self.target[1] > 0.8:
            return np.full_like(w, np.nan), np.zeros_like(theta)
        return super().gradients(w, theta, order)


def test_a_learner_that_fails_is_no_dropout() -> None:
    """Whether it fails may depend on its data: zero is sent, with its share of the noise."""

    def failing(context: Context) -> Failing:
        return Failing(target(user_of(context)))

    app = client_app(failing)
    watched = Exchanging(app)
    summed = trained(secure(), of(watched), rounds=1)
    assert len(watched.replies) == 4 * CLIENTS
    np.testing.assert_array_equal(summed, trained(plain(), of(app), rounds=1))
    assert {user_fails(user) for user in range(CLIENTS)} == {0, 1, 2}


def user_fails(user: int) -> int:
    if target(user)[0] > 0.8:
        return 1
    return 2 if target(user)[1] > 0.8 else 0


# --- what the server sees


def check_random(words: Any) -> None:
    """Every byte is as frequent as any other (χ² with 255 degrees of freedom)."""
    counts = np.bincount(np.ascontiguousarray(words).view(np.uint8).reshape(-1), minlength=256)
    expected = counts.sum() / 256
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_squared - 255) < 6 * np.sqrt(2 * 255)


@pytest.mark.parametrize("value", [0.0, 1e9])
def test_masked_vectors_and_their_sum_look_alike_whatever_the_gradients_are(value: float) -> None:
    """Before the fourth exchange, which is charged, a server can do nothing with either."""
    size = 3_000

    def constant(_: Context) -> Target:
        return Target(np.full(size, value))

    app = Exchanging(client_app(constant))
    secure().start(of(app), w0(size), num_rounds=1)
    vectors = []
    for _, exchange, reply in app.replies:
        if exchange != 3:
            continue
        ((_, record),) = reply.content.array_records.items()
        vectors += [array.numpy().reshape(-1) for array in record.values()]
    assert len(vectors) == CLIENTS
    check_random(vectors)
    check_random(np.sum(vectors, axis=0, dtype=np.uint64))


def test_every_reply_is_one_record_and_only_the_third_holds_a_vector() -> None:
    app = Exchanging()
    trained(secure(1.0), of(app), rounds=2)
    assert len(app.replies) == 2 * 4 * CLIENTS
    for _, exchange, reply in app.replies:
        assert len(reply.content) == 1
        assert len(reply.content.array_records) == (exchange == 3)
        assert not reply.content.metric_records


def test_a_round_is_charged_before_anything_can_be_unmasked() -> None:
    charged: set[tuple[int, int]] = set()
    ppsgd = secure(1.0)

    def look(_: Message, __: Context, ___: int, exchange: int) -> None:
        charged.add((exchange, ppsgd.ledger.rounds))

    trained(ppsgd, of(Exchanging(before=look)), rounds=1)
    assert charged == {(1, 0), (2, 0), (3, 0), (4, 1)}


# --- dropouts


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_who_drops_out_is_in_the_sum_only_after_the_third_exchange(exchange: int) -> None:
    """Two of nine are gone in round 2: as if they had sent nothing, unless it was sent already."""
    gone = {1, 5}
    summed = trained(secure(), of(dropping({(2, exchange): gone})), rounds=3)
    silent = gone if exchange <= 3 else set()
    expected = trained(plain(), of(dropping({(2, 1): silent})), rounds=3)
    np.testing.assert_array_equal(summed, expected)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_too_few_survivors_leave_w_as_it_is_and_are_charged(exchange: int) -> None:
    ppsgd = secure()
    w = trained(ppsgd, of(dropping({(2, exchange): set(range(6))})), rounds=2)
    np.testing.assert_array_equal(w, trained(secure(), of(), rounds=1))
    assert ppsgd.ledger.rounds == 2


def test_rounds_in_which_nobody_answers_end_the_run() -> None:
    everyone = set(range(CLIENTS))
    app = dropping({(round_, 1): everyone for round_ in (1, 2, 3)})
    ppsgd = secure()
    with pytest.raises(RuntimeError, match="in round 1 each"):
        trained(ppsgd, of(app), rounds=5)
    assert ppsgd.ledger.rounds == 1


# --- hostile clients


class Garbling(Exchanging):
    """The first user changes what it sends in one exchange.

    Args:
        exchange: which one.
        garble: makes another content of the honest one.
    """

    def __init__(self, exchange: int, garble: Callable[[RecordDict], RecordDict]) -> None:
        super().__init__()
        self._exchange = exchange
        self._garble = garble

    def answer(self, message: Message, context: Context, round_: int, exchange: int) -> Message:
        reply = super().answer(message, context, round_, exchange)
        if user_of(context) == 0 and exchange == self._exchange:
            reply.content = self._garble(reply.content)
        return reply


def changed_values(
    content: RecordDict, bytes_to: Callable[[bytes], bytes], array_to: Callable[[Any], Any]
) -> RecordDict:
    """The same records with other bytes and arrays."""
    records: dict[str, Any] = {}
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = {key: Array(array_to(array.numpy())) for key, array in record.items()}
            records[name] = ArrayRecord(arrays)
        else:
            values = {key: bytes_to(value) for key, value in record.items()}  # type: ignore[arg-type]
            records[name] = ConfigRecord(values)  # type: ignore[arg-type]
    return RecordDict(records)


GARBLED: dict[str, Callable[[RecordDict], RecordDict]] = {
    "nothing": lambda _: RecordDict(),
    "no bytes": lambda content: changed_values(content, lambda _: b"", lambda _: np.zeros(0)),
    "cut": lambda content: changed_values(content, lambda data: data[:-1], lambda a: a[:-1]),
    "longer": lambda content: changed_values(
        content, lambda data: data + b"\0", lambda a: np.append(a, a[:1])
    ),
    "zeros": lambda content: changed_values(
        content, lambda data: bytes(len(data)), lambda a: a.astype(np.float64)
    ),
    "other records": lambda _: RecordDict({"gradient": w0(), "config": ConfigRecord({"a": 1})}),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", GARBLED)
def test_a_client_that_sends_garbage_is_a_dropout(kind: str, exchange: int) -> None:
    """The round goes on with the others, or has no sum; it is charged, and nothing raises."""
    ppsgd = secure()
    w = trained(ppsgd, of(Garbling(exchange, GARBLED[kind])), rounds=1)
    silent = {0} if exchange <= 3 else set()
    expected = trained(plain(), of(dropping({(1, 1): silent})), rounds=1)
    np.testing.assert_array_equal(w, expected)
    assert ppsgd.ledger.rounds == 1


def test_shares_with_flipped_bits_give_the_right_sum_or_none() -> None:
    """Whatever byte is hit, w is that of the round with the user, without it, or as it was."""
    with_user = trained(plain(), of(), rounds=1)
    without = trained(plain(), of(dropping({(1, 1): {0}})), rounds=1)
    sums = 0
    for place in range(0, 600, 40):

        def flipped(data: bytes, place: int = place) -> bytes:
            changed = bytearray(data)
            changed[place % len(changed)] ^= 1
            return bytes(changed)

        def garble(content: RecordDict, flip: Any = flipped) -> RecordDict:
            return changed_values(content, flip, lambda array: array)

        w = trained(secure(), of(Garbling(2, garble)), rounds=1)
        right = np.array_equal(w, with_user) or np.array_equal(w, without)
        sums += right
        assert right or not np.any(w)
    assert sums


def test_replies_that_come_twice_or_in_anothers_name_count_once() -> None:
    def twice(messages: list[Message], replies: list[Message]) -> list[Message]:
        forged = Message(replies[1].content, reply_to=messages[0])
        forged.metadata.__dict__["_src_node_id"] = messages[1].metadata.dst_node_id
        return [forged, *replies, *reversed(replies)]

    w = trained(secure(), MeddlingGrid(twice, users=CLIENTS))
    np.testing.assert_array_equal(w, trained(plain(), of()))


# --- what a client refuses


def outcome(message: Message, context: Context) -> str:
    """What a client says to a message; the node's state is as before."""
    kept = context.state.copy()
    try:
        APP(message, context)
    except Exception as error:
        return str(error)
    context.state = kept
    return "answered"


def all_refused(outcomes: list[str], count: int) -> bool:
    return len(outcomes) == count and all(each.startswith("refused-") for each in outcomes)


Attack = Callable[[Message, int, int], list[Message]]


def outcomes_of(
    attack: Attack, ppsgd: PPSGD, rounds: int = 2, grid_type: Any = InProcessGrid
) -> list[str]:
    """What the first user says to a server that asks for more, before each honest message.

    Args:
        attack: is given the honest message, the round and the exchange; returns what is asked for.
        ppsgd: the honest server.
        rounds: of the training.
        grid_type: its grid.
    """
    outcomes: list[str] = []

    def ask(message: Message, context: Context, round_: int, exchange: int) -> None:
        if user_of(context) == 0:
            outcomes.extend(outcome(asked, context) for asked in attack(message, round_, exchange))

    trained(ppsgd, grid_type(Exchanging(before=ask), CLIENTS), rounds)
    return outcomes


def test_no_exchange_is_answered_twice_or_out_of_turn() -> None:
    """In round 2 everything that was asked in round 1 is asked again, before each exchange."""
    earlier: list[Message] = []

    def replaying(message: Message, round_: int, _: int) -> list[Message]:
        if round_ == 1:
            earlier.append(message)
            return []
        return earlier

    assert all_refused(outcomes_of(replaying, secure(1.0)), 16)


def test_a_message_for_somebody_else_is_refused() -> None:
    """The second user's roster and shares are given to the first."""
    others: dict[int, Message] = {}

    class Remembering(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            sent = list(messages)
            if is_training(sent[1]):
                others[len(others) + 1] = sent[1]
            return super().send_and_receive(sent, timeout=timeout)

    def swapped(_: Message, __: int, exchange: int) -> list[Message]:
        return [others[exchange]] if exchange in (2, 3) else []

    assert all_refused(outcomes_of(swapped, secure(1.0), 1, Remembering), 2)


@pytest.mark.parametrize("terms", ["kept", "left out"])
def test_in_a_training_with_secure_sums_no_plain_order_is_obeyed(terms: str) -> None:
    """The server would see a user's vector."""

    def plainly(message: Message, round_: int, exchange: int) -> list[Message]:
        if (round_, exchange) != (2, 3):  # w comes along
            return []
        content = message.content.copy()
        for name, record in message.content.config_records.items():
            if "stage" in record:
                order = replace(Order.from_flat(record), stage=0, payload="")
                if terms == "left out":
                    order = replace(order, terms=None)
                content[name] = ConfigRecord(order.to_flat())
        return [Message(content, message.metadata.dst_node_id, "train")]

    assert all_refused(outcomes_of(plainly, secure(1.0)), 1)


def test_nothing_is_revealed_before_the_server_has_charged_it() -> None:
    """Survivors are named with as many charges as before."""

    def uncharged(message: Message, round_: int, exchange: int) -> list[Message]:
        return [with_charges(message, round_ - 1)] if exchange == 4 else []

    assert all_refused(outcomes_of(uncharged, secure(1.0)), 2)


def with_charges(message: Message, charges: int) -> Message:
    """The message of a server that says how often it has charged."""
    (order,) = (each for each in message.content.config_records.values() if "charges" in each)
    assert order["charges"] == charges + 1
    content = message.content.copy()
    for record in content.config_records.values():
        if "charges" in record:
            record["charges"] = charges
    return Message(content, message.metadata.dst_node_id, "train")


NOISE = 1.2345  # a number that nothing else in a message has


@pytest.mark.parametrize(
    ("name", "agreed", "other"),
    [
        ("z", NOISE, NOISE / 2),
        ("C", 1.625, 100.0),
        ("h", 6, 2),
        ("N", CLIENTS, 2 * CLIENTS),
    ],
)
def test_what_was_agreed_in_a_training_cannot_be_changed(
    name: str, agreed: float, other: float
) -> None:
    """Every number that equals the agreed one is replaced, in each exchange from round 2 on."""

    def changing(message: Message, round_: int, _: int) -> list[Message]:
        if round_ == 1:
            return []
        return [with_numbers(message, agreed, other)]

    summed = Release(Poisson(CLIENTS, 1.0), 1.625, NOISE, aggregation=RULES)
    assert all_refused(outcomes_of(changing, strategy(release=summed)), 4), name


def with_numbers(message: Message, agreed: float, other: float) -> Message:
    """The message with another number wherever it says the agreed one."""
    records: dict[str, Any] = {}
    found = 0
    for name, record in message.content.items():
        records[name] = record
        if isinstance(record, ConfigRecord) and name != "config":
            values = dict(record)
            for key, value in record.items():
                if type(value) is type(agreed) and value == agreed:
                    values[key] = type(agreed)(other)
                    found += 1
            records[name] = ConfigRecord(values)
    assert found, "the terms of the sum are not in the message"
    return Message(RecordDict(records), message.metadata.dst_node_id, "train")


def test_a_server_cannot_go_on_with_other_terms_or_without_them(tmp_path: Path) -> None:
    trained(secure(1.0, checkpoint_dir=tmp_path), of(), rounds=1)
    with pytest.raises(ValueError, match="aggregation"):
        strategy(release=release(population=CLIENTS), checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="aggregation"):
        secure(1.0, SecureSum(honest=7, colluding=1), checkpoint_dir=tmp_path)
    trained(secure(1.0, checkpoint_dir=tmp_path), of(), rounds=1)


def test_a_client_remembers_on_disk_what_it_has_answered(tmp_path: Path) -> None:
    """A node that has lost its state, or has it back as it was, answers no exchange again."""
    node = {"ppsgd-state-dir": str(tmp_path), "ppsgd-user": "ann"}
    firsts: list[Message] = []
    outcomes: list[str] = []

    class Forgetful(Exchanging):
        def answer(self, message: Message, context: Context, round_: int, exchange: int) -> Message:
            if user_of(context):
                return super().answer(message, context, round_, exchange)
            context.node_config.update(node)
            before = RecordDict(dict(context.state))
            reply = super().answer(message, context, round_, exchange)
            if exchange == 1:
                firsts.append(message)
            if exchange == 4:
                again = new_context(node=dict(context.node_config))
                again.run_id = context.run_id
                outcomes.append(outcome(firsts[-1], again))
                again.state = before
                outcomes.append(outcome(message, again))
            return reply

    trained(secure(1.0), of(Forgetful()))
    assert all_refused(outcomes, 4)


def test_no_secret_of_a_round_is_on_disk_or_left_in_the_nodes_state(tmp_path: Path) -> None:
    """All bytes that a node keeps between exchanges are gone after the round, and never on disk."""
    node = {"ppsgd-state-dir": str(tmp_path), "ppsgd-user": "ann"}
    secrets: set[bytes] = set()
    contexts: list[Context] = []

    def spy(_: Message, context: Context, __: int, ___: int) -> None:
        if user_of(context) == 0:
            context.node_config.update(node)
            secrets.update(kept_bytes(context))
            contexts.append(context)

    trained(secure(1.0), of(Exchanging(before=spy)))
    assert len(secrets) > 6
    on_disk = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in secrets:
        assert secret not in on_disk
        assert secret.hex().encode() not in on_disk
    assert not secrets & kept_bytes(contexts[-1])


def kept_bytes(context: Context) -> set[bytes]:
    """Long byte strings in the config records of a node's state."""
    found = set()
    for record in context.state.config_records.values():
        found |= {
            value for value in record.values() if isinstance(value, bytes) and len(value) > 15
        }
    return found


# --- restarts, and where it is refused


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_server_that_dies_in_a_round_redoes_it_and_theta_steps_once(
    exchange: int, tmp_path: Path
) -> None:
    """Charged again only if the fourth exchange had been asked for."""
    died = False

    def die(_: Message, context: Context, round_: int, at: int) -> None:
        nonlocal died
        if not died and (round_, at) == (2, exchange) and user_of(context) == 4:
            died = True
            raise KeyboardInterrupt

    on = of(Exchanging(before=die))
    with pytest.raises(KeyboardInterrupt):
        trained(secure(checkpoint_dir=tmp_path), on, rounds=3)
    again = secure(checkpoint_dir=tmp_path)
    w = trained(again, on, rounds=3)
    np.testing.assert_array_equal(w, trained(plain(), of(), rounds=3))
    assert again.ledger.rounds == (4 if exchange == 4 else 3)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (SecureSum(honest=9, colluding=1), "at most the 9 clients"),
        (SecureSum(honest=3, colluding=1), "to stay to the end"),
    ],
)
def test_rules_that_cannot_work_are_refused(rules: SecureSum, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        secure(rules=rules)


def test_clients_that_know_no_orders_and_the_legacy_api_are_refused() -> None:
    with pytest.raises(ValueError, match="replies='gradient'"):
        secure(replies="parameters")
    with pytest.raises(ValueError, match="four exchanges"):
        legacy_strategy(release=release(aggregation=SecureSum(3, 1)))
    with pytest.raises(ValueError, match="four exchanges"):
        secure().configure_train(1, w0(), ConfigRecord(), of())


def test_the_statement_says_from_whom_a_secure_sum_protects() -> None:
    ppsgd = secure(4.0)
    trained(ppsgd, of(), rounds=1)
    text = ppsgd.privacy_statement()
    data = ppsgd.privacy_data()
    assert "the server and any 1 of the other users together learn no more" in text
    assert "as long as the server follows the protocol" in text
    for wrong in ("which is trusted", "joint differential privacy", "everybody else"):
        assert wrong not in text
        assert wrong not in str(data)
    facts = (
        "more colluding users than 1",
        "a server that does not follow the protocol",
        "vouches for the list of users",
        "hostile clients",
        "HKDF",
        "Poly1305",
        "the clients' own random numbers",
    )
    for fact in facts:
        assert fact in text
    own_share = Ledger(data["delta"]).record(release(z=4.0 / np.sqrt(RULES.honest)))  # type: ignore[arg-type]
    assert data["epsilon_all_others_pooling"] == pytest.approx(own_share.epsilon())
    everyone = strategy(release=release(z=4.0, population=CLIENTS))
    trained(everyone, of(), rounds=1)
    assert ppsgd.privacy_data()["epsilon"] == everyone.privacy_data()["epsilon"]


def test_content_of_two_rounds_never_repeats() -> None:
    """Keys, shares and masks are fresh: no reply of a round is one of another round."""
    app = Exchanging()
    trained(secure(), of(app), rounds=3)
    contents = [content_bytes(reply) for _, _, reply in app.replies]
    assert len(set(contents)) == len(contents) == 3 * 4 * CLIENTS
