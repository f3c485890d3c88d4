"""The owner of a node sets limits in the node config, and no server gets round them.

What is beyond a limit is refused before the user's data are read, with one line in the client's
log; what is within is answered. θ never leaves, and a training reply is one vector alone.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import parameters_to_ndarrays
from flwr.serverapp.strategy import FedAvg

from flwr_ppsgd import PPSGD, Order, SecureSum, Steps, client_app
from flwr_ppsgd.legacy import PPSGDClient
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract.hostile_clients import (
    APP,
    USERS,
    App,
    Floats,
    MeddlingGrid,
    OwnedNode,
    Target,
    content_bytes,
    flat,
    grid,
    is_training,
    learner_for,
    legacy_round,
    legacy_strategy,
    new_context,
    pinned,
    ppsgd_command,
    release,
    sent_vector,
    strategy,
    target,
    trained,
    user_of,
    w0,
    without_first,
)

RULES = SecureSum(honest=4, colluding=1)
SIX = {"release": release(population=6, aggregation=RULES)}
CODE = r"^[a-z-]+: \w+$"  # all that a server gets to know of an error
KEY = "ed25519:" + "A" * 43 + "="
DELTA = 1e-5
OWN_LIMIT = {"ppsgd-max-own-epsilon": 1.0, "ppsgd-delta": DELTA}


def limited(tmp_path: Path, epsilon: float, **more: Any) -> dict[str, Any]:
    """The node config of a user with a limit on the own account."""
    place = {"ppsgd-state-dir": str(tmp_path / "device"), "ppsgd-user": "ann"}
    return {**place, "ppsgd-max-own-epsilon": epsilon, "ppsgd-delta": DELTA, **more}


def unread(context: Context) -> Target:
    """The first user's data must not be read."""
    assert user_of(context), "data were read"
    return learner_for(context)


def limits_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the clients log as errors; the data that must not be read would be among them."""
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def first_message(ppsgd: PPSGD, on: Any) -> Message:
    """What the first user is sent in round 1."""
    messages = ppsgd.configure_train(1, w0(), ConfigRecord(), on)
    on.push_messages(messages)
    return messages[0]


# --- limits on what the server asks for

Settings = dict[str, Any]
LIMITS: dict[str, tuple[Settings, Settings, Settings]] = {  # the node's; within; beyond
    "a clip norm": (
        {"ppsgd-max-clip-norm": 1.0},
        {"release": release(clip_norm=1.0)},
        {"release": release(clip_norm=1.01)},
    ),
    "a step": (
        {"ppsgd-max-step": 0.5},
        {"steps": Steps(shared=1.0, personal=0.5)},
        {"steps": Steps(shared=1.0, personal=0.51)},
    ),
    "an epsilon": (
        {"ppsgd-max-epsilon": 6.0},  # two rounds at z = 1 cost 5.7
        {"release": release(z=1.0)},
        {"release": release(z=0.9)},
    ),
    "an epsilon that is infinite": (
        {"ppsgd-max-epsilon": 6},
        {"release": release(z=1.0)},
        {"release": release(z=0.0)},
    ),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_what_is_above_a_limit_is_refused_before_data_are_read(
    limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The user counts as zero; the log has a line that names the limit, the server gets none."""
    node, _, beyond = LIMITS[limit]
    app = OwnedNode(node, client_app(unread))
    w = trained(strategy(**beyond), grid(app))
    assert np.all(np.isfinite(w))
    refusals = limits_in(caplog)
    assert refusals
    for line in refusals:
        assert next(iter(node)) in line
        assert "\n" not in line
    assert not app.replies


@pytest.mark.parametrize("limit", LIMITS)
def test_what_is_within_a_limit_is_answered(limit: str, caplog: pytest.LogCaptureFixture) -> None:
    node, within, _ = LIMITS[limit]
    app = OwnedNode(node)
    trained(strategy(**within), grid(app))
    assert not limits_in(caplog)
    assert [is_training(reply) for reply in app.replies].count(True) == 2


@pytest.mark.parametrize("limit", LIMITS)
def test_legacy_clients_keep_to_the_same_limits(
    limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    node, within, beyond = LIMITS[limit]
    assert legacy_reply(node, **within)
    with pytest.raises(Exception, match="refused"):
        legacy_reply(node, **beyond)
    (line,) = limits_in(caplog)
    assert next(iter(node)) in line


def legacy_reply(node: Mapping[str, Any], learner: Any = None, **settings: Any) -> list[Floats]:
    """The arrays with which a legacy client answers the first of two rounds."""
    ppsgd = legacy_strategy(**settings)
    ppsgd.server_config(2)  # fixes the planned rounds
    (_, instructions), *_ = legacy_round(ppsgd)
    context = new_context(node=node)
    client = PPSGDClient(learner or learner_for(context), context)
    w = parameters_to_ndarrays(instructions.parameters)
    arrays, examples, metrics = client.fit(w, instructions.config)
    assert (examples, metrics) == (1, {}), "the number of rows stays with the user"
    return arrays


@pytest.mark.parametrize("limit", ["ppsgd-max-clip-norm", "ppsgd-max-own-epsilon"])
def test_before_round_one_a_server_hears_that_nobody_would_obey(limit: str, tmp_path: Path) -> None:
    """Nothing is charged, and nobody's data are read."""

    def owned(message: Message, context: Context) -> Message:
        own = limited(tmp_path / str(user_of(context)), 1.0)
        context.node_config.update(own if limit in own else {limit: 0.5})
        return client_app(unread)(message, context)

    ppsgd = strategy(release=release(z=2.0))
    with pytest.raises(RuntimeError, match=r"none of 5 clients would obey.*refused-policy"):
        trained(ppsgd, grid(owned))
    assert ppsgd.ledger.rounds == 0


@pytest.mark.parametrize("limit", ["ppsgd-evaluate", "ppsgd-max-own-epsilon"])
def test_evaluation_can_be_switched_off_and_is_under_a_limit(
    limit: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Twelve evaluations at chosen w tell a user's data."""
    own = limited(tmp_path, 100.0)
    app = OwnedNode(own if limit in own else {limit: False})
    ppsgd = strategy(release=release(z=2.0), evaluate_every=1)
    result = ppsgd.start(grid(app), w0(), num_rounds=1)
    assert result.evaluate_metrics_clientapp[1]["distance"] > 0  # type: ignore[operator]
    kinds = [reply.metadata.message_type for reply in app.replies]
    assert "train" in kinds
    assert "evaluate" not in kinds
    assert all(limit in line for line in limits_in(caplog))


# --- stock strategies


def run_fedavg(app: App, run_config: dict[str, Any] | None = None) -> Floats:
    on = InProcessGrid(app, USERS, run_config)  # type: ignore[arg-type]
    return flat(FedAvg(fraction_evaluate=0.0).start(on, w0(), num_rounds=1).arrays)


def everywhere(node: Mapping[str, Any], app: App = APP) -> App:
    def owned(message: Message, context: Context) -> Message:
        context.node_config.update(node)
        return app(message, context)

    return owned


def test_a_stock_strategy_is_answered_only_if_app_or_owner_say_so() -> None:
    """Two steps of .5 on ½(w − y)² leave a quarter of the way: w is .75 of the mean target."""
    steps: dict[str, Any] = {"local-step": 0.5, "local-steps": 2}
    expected = 0.75 * np.mean([target(user) for user in range(USERS)], axis=0)
    owned = run_fedavg(everywhere({"ppsgd-stock": True}), steps)
    np.testing.assert_allclose(owned, expected)
    built = run_fedavg(client_app(learner_for, local_step=0.5, local_steps=2))
    np.testing.assert_allclose(built, expected)


@pytest.mark.parametrize(
    ("node", "run_config"),
    [
        ({}, {"local-step": 0.5}),
        ({}, {"local-step": 0.5, "ppsgd-stock": True}),
        ({"ppsgd-stock": False}, {"local-step": 0.5}),
    ],
)
def test_a_run_config_never_makes_a_client_send_its_parameters(
    node: dict[str, Any], run_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    on = grid(everywhere(node, client_app(unread)))
    for context in map(on.context, on.get_node_ids()):
        context.run_config.update(run_config)
    messages = FedAvg().configure_train(1, w0(), ConfigRecord(), on)
    for reply in on.send_and_receive(messages):
        assert reply.has_error()
    assert all("ppsgd-stock" in line for line in limits_in(caplog))


# --- the training's key


def test_a_client_that_pins_a_key_obeys_that_training_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over a restart of the server too. Any change to what was signed is refused."""
    first = strategy(checkpoint_dir=tmp_path)
    trained(first, grid(), rounds=1)
    node = pinned(tmp_path)
    app = OwnedNode(node)
    again = strategy(checkpoint_dir=tmp_path)
    trained(again, grid(app), rounds=3)
    assert [is_training(reply) for reply in app.replies].count(True) == 2
    assert not limits_in(caplog)

    stranger = OwnedNode(node, client_app(unread))
    trained(strategy(), grid(stranger), rounds=1)
    assert not stranger.replies
    assert all("ppsgd-server-key" in line for line in limits_in(caplog))


def test_nothing_that_a_pinned_client_obeys_can_be_changed_on_the_way(tmp_path: Path) -> None:
    """Neither a field, nor w, nor the type of the message, nor the run."""
    ppsgd = strategy(checkpoint_dir=tmp_path)
    trained(ppsgd, grid(), rounds=1)
    context = new_context(node=pinned(tmp_path))
    again = strategy(checkpoint_dir=tmp_path)
    on = grid()
    messages = again.configure_train(2, w0(), ConfigRecord(), on)
    on.push_messages(messages)
    changed = list(tampered(messages[0]))
    assert len(changed) > 10
    for message in changed:
        with pytest.raises(Exception, match="refused"):
            APP(message, context)
    for kind in ("evaluate", "query"):
        replayed = Message(messages[0].content, messages[0].metadata.dst_node_id, kind)
        with pytest.raises(Exception, match="refused-signature"):
            APP(replayed, context)
    elsewhere = new_context(node=pinned(tmp_path))
    elsewhere.run_id = 77
    with pytest.raises(Exception, match="refused-signature"):
        APP(messages[0], elsewhere)
    assert not APP(messages[0], context).has_error()
    again.close()


def tampered(message: Message) -> Any:
    """The message with one number, switch or word changed, for each in it but the user's config."""
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            moved = {key: Array(array.numpy() + 1.0) for key, array in record.items()}
            yield with_record(message, name, ArrayRecord(moved))
        elif name != "config":
            for key, value in record.items():
                other = ConfigRecord({**record, key: changed(value)})
                yield with_record(message, name, other)


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if math.isfinite(value) else 1.0
    return value[:-1] + value[-1:] * 2


def with_record(message: Message, name: str, record: Any) -> Message:
    content = RecordDict({**message.content, name: record})
    return Message(content, message.metadata.dst_node_id, message.metadata.message_type)


# --- secure sums only


SECURE_ONLY = {"ppsgd-secure": True}


@pytest.mark.parametrize("kind", ["a plain sum", "evaluation", "a stock strategy"])
def test_a_node_that_demands_secure_sums_answers_nothing_else(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    on = grid(everywhere(SECURE_ONLY, client_app(unread, local_step=0.5)))
    ppsgd = strategy(evaluate_every=1)
    server: Any = FedAvg() if kind == "a stock strategy" else ppsgd
    configure = server.configure_evaluate if kind == "evaluation" else server.configure_train
    replies = on.send_and_receive(configure(1, w0(), ConfigRecord(), on))
    assert len(replies) == USERS
    for reply in replies:
        assert reply.has_error()
    assert limits_in(caplog)
    assert all("ppsgd-secure" in line for line in limits_in(caplog))


@pytest.mark.parametrize(
    ("limit", "obeys"),
    [
        ({}, True),
        ({"ppsgd-min-noise-multiplier": 1.0}, True),
        ({"ppsgd-min-noise-multiplier": 1.5}, False),
        ({"ppsgd-min-clients": 5}, True),
        ({"ppsgd-min-clients": 6}, False),
    ],
)
def test_a_node_that_demands_secure_sums_answers_them_with_enough_noise_and_company(
    limit: dict[str, Any], obeys: bool, caplog: pytest.LogCaptureFixture
) -> None:
    app = OwnedNode({**SECURE_ONLY, **limit})
    trained(strategy(**SIX), grid(app, users=6))
    assert [is_training(reply) for reply in app.replies].count(True) == (8 if obeys else 0)
    lines = limits_in(caplog)
    assert (not lines) == obeys
    assert all(next(iter(limit)) in line for line in lines)


class Wicked(Target):
    """Does, by the sign of a number that only this user knows, one thing or another."""

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:
        if self.target[0] > 0:
            raise RuntimeError(f"my data are {self.target}")
        if self.target[1] > 0:
            return np.full_like(w, np.nan), np.full_like(theta, np.nan)
        if self.target[2] > 0:
            return w[:-1], theta
        return super().gradients(w, theta, order)


SIGNS = [(1, 1, 1), (-1, 1, 1), (-1, -1, 1), (-1, -1, -1)]


def wicked(signs: tuple[int, int, int]) -> Wicked:
    return Wicked(np.array([*signs, 0.5, 0.5, 0.5]))


@pytest.mark.parametrize("limit", ["ppsgd-secure", "ppsgd-max-own-epsilon"])
def test_an_order_that_publishes_nothing_gets_the_same_bytes_whatever_the_learner_does(
    limit: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server chooses w: whether a learner fails there would tell its data, a bit at a time."""
    own = limited(tmp_path, 1.0)
    local = strategy(steps=Steps(shared=0.0, personal=0.5))
    asked = first_message(local, grid())
    answers = set()
    for signs in SIGNS:
        app = client_app(lambda _, signs=signs: wicked(signs))  # type: ignore[misc]
        reply = app(asked, new_context(node=own if limit in own else SECURE_ONLY))
        assert not reply.has_error()
        answers.add(content_bytes(reply))
    assert answers == {b""}
    failures = limits_in(caplog)
    assert len(failures) == len(SIGNS) - 1


def broken_learner(context: Context) -> Target:
    raise RuntimeError(f"no data of {user_of(context)}")


def test_a_learner_that_cannot_be_made_is_no_secret_channel_either() -> None:
    local = strategy(steps=Steps(shared=0.0, personal=0.5))
    asked = first_message(local, grid())
    reply = client_app(broken_learner)(asked, new_context(node=SECURE_ONLY))
    assert content_bytes(reply) == b""
    with pytest.raises(Exception, match="failed"):  # whoever trusts the server lets it know
        client_app(broken_learner)(asked, new_context())


def test_legacy_clients_keep_failures_to_themselves_too() -> None:
    nothing = {"steps": Steps(shared=0.0, personal=0.5)}
    for signs in SIGNS:
        assert legacy_reply(SECURE_ONLY, wicked(signs), **nothing) == []
    with pytest.raises(Exception, match="refused"):
        legacy_reply(SECURE_ONLY, wicked(SIGNS[0]))


# --- mistakes in the node config

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a word": ({"ppsgd-max-clip-norm": "x"}, "ppsgd-max-clip-norm must be a number"),
    "below zero": ({"ppsgd-max-step": -1}, "ppsgd-max-step must be a number"),
    "not a number": ({"ppsgd-max-epsilon": math.nan}, "ppsgd-max-epsilon must be a number"),
    "a switch for a number": ({"ppsgd-max-epsilon": True}, "ppsgd-max-epsilon must be a number"),
    "a word for a switch": ({"ppsgd-evaluate": "false"}, "ppsgd-evaluate must be true or false"),
    "a number for a switch": ({"ppsgd-stock": 1}, "ppsgd-stock must be true or false"),
    "no key": ({"ppsgd-server-key": "abc"}, "ppsgd-server-key must be a public key"),
    "an unknown name": ({"ppsgd-max-clipnorm": 1}, "did you mean 'ppsgd-max-clip-norm'?"),
    "limits of secure sums alone": ({"ppsgd-min-clients": 3}, "set ppsgd-secure = true too"),
    "secure and stock": ({"ppsgd-secure": True, "ppsgd-stock": True}, "exclude each other"),
    "a key and stock": ({"ppsgd-server-key": KEY, "ppsgd-stock": True}, "exclude each other"),
    "a directory and no user": ({"ppsgd-state-dir": "x"}, "ppsgd-user"),
    "no delta": ({**OWN_LIMIT, "ppsgd-delta": 0.0}, "ppsgd-delta must be above 0"),
    "a delta not given": ({"ppsgd-max-own-epsilon": 1.0}, "ppsgd-delta must be above 0"),
    "half a delta": ({**OWN_LIMIT, "ppsgd-delta": 0.5}, "ppsgd-delta must be above 0"),
    "an account and no directory": (OWN_LIMIT, "set ppsgd-state-dir too"),
    "an account and stock": (
        {**OWN_LIMIT, "ppsgd-state-dir": "x", "ppsgd-user": "ann", "ppsgd-stock": True},
        "exclude each other",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_node_config_is_one_line_and_nothing_is_answered(
    mistake: str, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    node, says = MISTAKES[mistake]
    context = new_context(node=node)
    if "ppsgd-state-dir" in node:
        del context.node_config["partition-id"]
    asked = first_message(strategy(), grid())
    with pytest.raises(Exception, match=CODE) as refused:
        client_app(unread)(asked, context)
    lines = limits_in(caplog)
    assert lines
    assert all(says in line for line in lines)
    assert says not in str(refused.value)


# --- what leaves the device


def test_what_is_refused_and_what_left_is_in_the_clients_own_report(tmp_path: Path) -> None:
    node = {"ppsgd-state-dir": str(tmp_path), "ppsgd-user": "ann", "ppsgd-evaluate": False}
    ppsgd = strategy(evaluate_every=1)
    trained(ppsgd, grid(OwnedNode(node)))
    report = ppsgd_command("client-report", tmp_path)
    assert "took part in 2 rounds" in report
    assert "nothing but the clipped gradient" in report
    assert "refused-policy (3)" in report
    assert "5." in report  # ε that was promised
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*"))


def test_a_training_reply_is_one_clipped_vector_in_the_form_of_w() -> None:
    names = {"one": Array(np.zeros((2, 2), np.float32)), "two": Array(np.zeros(2))}
    seen: list[Message] = []

    def watched(message: Message, context: Context) -> Message:
        seen.append(APP(message, context))
        return seen[-1]

    strategy(evaluate_every=1).start(grid(watched), ArrayRecord(names), num_rounds=2)
    training = [reply for reply in seen if is_training(reply)]
    assert len(training) == 2 * USERS
    for reply in training:
        ((_, record),) = reply.content.items()
        assert isinstance(record, ArrayRecord)
        assert {key: array.numpy().shape for key, array in record.items()} == {
            "one": (2, 2),
            "two": (2,),
        }
        assert np.linalg.norm(sent_vector(reply)[1]) <= 1 + 1e-6


class Fixed(Target):
    """A gradient of w that does not depend on θ, and a θ that somebody else must not see."""

    def __init__(self, theta: Floats) -> None:
        super().__init__(target(0))
        self._theta = theta

    def initial_theta(self) -> Floats:
        return self._theta

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:  # noqa: ARG002
        return w - self.target, theta


@pytest.mark.parametrize("size", [6, 50])
def test_no_byte_that_leaves_in_training_depends_on_theta(size: int) -> None:
    """Same gradients of w, another θ: the same bytes, and none of them are θ's."""
    sent = []
    for seed in (1, 2):
        theta = np.random.default_rng(seed).normal(size=size)
        seen: list[bytes] = []
        app = client_app(lambda _, theta=theta: Fixed(theta))  # type: ignore[misc]

        def watched(
            message: Message, context: Context, app: Any = app, seen: Any = seen
        ) -> Message:
            reply: Message = app(message, context)
            seen.append(content_bytes(reply))
            return reply

        trained(strategy(insecure_seed=3), grid(watched), rounds=3)
        everything = b"".join(seen)
        for number in theta:
            assert np.float64(number).tobytes() not in everything
            assert np.float32(number).tobytes() not in everything
        sent.append(seen)
    assert sent[0] == sent[1]


def test_an_error_says_a_code_and_never_the_learners_own_words() -> None:
    """Flower sends the text of an exception, and in simulations its causes."""
    asked = first_message(strategy(), grid())
    with pytest.raises(Exception, match=CODE) as told:
        client_app(lambda _: wicked((1, 1, 1)))(asked, new_context())
    assert told.value.__cause__ is None
    assert told.value.__context__ is None


def test_a_refusal_is_the_same_for_w_as_silence() -> None:
    app = OwnedNode({"ppsgd-max-clip-norm": 0.5})
    refused = trained(strategy(insecure_seed=1), grid(app))
    silent = trained(strategy(insecure_seed=1), MeddlingGrid(without_first))
    np.testing.assert_array_equal(refused, silent)
