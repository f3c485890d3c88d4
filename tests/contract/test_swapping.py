"""One ClientApp under any strategy, one strategy over any ClientApp, one grid for all of them."""

import pickle
import threading
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import NDArrays, Scalar, ndarrays_to_parameters
from flwr.server import ServerConfig
from flwr.server import strategy as legacy_strategies
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, FedProx, Strategy

from flwr_ppsgd import PPSGD, Order, Steps, client_app
from flwr_ppsgd.legacy import PPSGDClient
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract.hostile_clients import (
    SIZE,
    USERS,
    Floats,
    Meddle,
    MeddlingGrid,
    OwnedNode,
    Target,
    flat,
    grid,
    learner_for,
    published_by,
    release,
    strategy,
    target,
    trained,
    user_of,
    w0,
)
from tests.contract.targets import run_legacy

CENTRE = np.mean([target(user) for user in range(USERS)], axis=0)
SERVES_ALL = client_app(learner_for, local_step=0.5, local_steps=2)
STOCK: list[Strategy] = [FedAvg(), FedAdam(eta=0.1), FedProx(proximal_mu=0.1), FedMedian()]


# --- our client under stock strategies


@pytest.mark.parametrize("stock", STOCK, ids=lambda stock: type(stock).__name__)
def test_one_client_app_serves_ppsgd_and_stock_strategies(stock: Strategy) -> None:
    """w moves towards the users' targets, and evaluation is answered."""
    result = stock.start(grid(SERVES_ALL), w0(), num_rounds=3)
    assert np.linalg.norm(flat(result.arrays) - CENTRE) < np.linalg.norm(CENTRE)
    assert result.evaluate_metrics_clientapp[3]["distance"] >= 0  # type: ignore[operator]
    quiet = release(z=0.0)
    moved = trained(strategy(release=quiet), grid(SERVES_ALL))
    np.testing.assert_array_equal(moved, trained(strategy(release=quiet), grid()))


def test_the_proximal_term_of_fedprox_by_hand() -> None:
    """Two steps of .5 on ½(w − y)² + ½(w − w_0)² from w_0 = 0: .5·y, and it stays there."""
    result = FedProx(proximal_mu=1.0).start(grid(SERVES_ALL), w0(), num_rounds=1)
    np.testing.assert_allclose(flat(result.arrays), 0.5 * CENTRE)


class Remembering(Target):
    """Notes every θ that it is asked about."""

    seen: list[Floats]

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:
        self.seen.append(theta.copy())
        return super().gradients(w, theta, order)


def remembering(context: Context) -> Remembering:
    return Remembering(target(user_of(context)))


def test_stock_strategies_leave_theta_alone() -> None:
    Remembering.seen = []
    app = client_app(remembering, local_step=0.5, local_steps=2)
    FedAvg(fraction_evaluate=0.0).start(grid(app), w0(), num_rounds=2)
    assert len(Remembering.seen) == 2 * 2 * USERS
    np.testing.assert_array_equal(Remembering.seen, 0.0)


def test_one_training_after_another_on_the_same_nodes() -> None:
    """FedAvg, PPSGD and FedAvg again: each finds clients that serve it."""
    on = grid(SERVES_ALL)
    first = FedAvg().start(on, w0(), num_rounds=1).arrays
    private = strategy(release=release(z=0.0)).start(on, first, num_rounds=2).arrays
    last = FedAvg().start(on, private, num_rounds=1).arrays
    for arrays in (first, private, last):
        assert np.linalg.norm(flat(arrays) - CENTRE) < np.linalg.norm(CENTRE)


@pytest.mark.parametrize("bad", [{}, {"local-step": "x"}, {"local-step": 0}, {"local-step": True}])
def test_a_stock_client_needs_a_step(bad: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """If its owner lets it serve stock strategies and the app says nothing of a step."""
    on = InProcessGrid(OwnedNode({"ppsgd-stock": True}), USERS, bad)  # type: ignore[arg-type]
    (reply, *_) = on.send_and_receive(FedAvg().configure_train(1, w0(), ConfigRecord(), on))
    assert reply.error.reason == "ClientError: refused-policy: ValueError"
    assert "local-step must be a positive number" in caplog.text


def test_other_record_keys_get_one_clear_line(caplog: pytest.LogCaptureFixture) -> None:
    on = grid(SERVES_ALL)
    stock = FedAvg(arrayrecord_key="model")
    (reply, *_) = on.send_and_receive(stock.configure_train(1, w0(), ConfigRecord(), on))
    assert reply.has_error()
    assert "arrayrecord_key='arrays'" in caplog.text


def client_fn(context: Context) -> Client:
    return PPSGDClient(learner_for(context), context, local_step=0.5, local_steps=2).to_client()


@pytest.mark.parametrize("name", ["FedAvg", "FedAdam"])
def test_one_legacy_client_serves_stock_strategies(name: str) -> None:
    """FedAvg's w is .75 of the mean target after one round, as in the Message API."""
    initial = ndarrays_to_parameters([np.zeros(SIZE)])
    stock = getattr(legacy_strategies, name)(initial_parameters=initial, fraction_evaluate=0.0)
    published = published_by(stock)
    run_legacy(stock, grid(ClientApp(client_fn)), ServerConfig(num_rounds=1))
    (w,) = published
    if name == "FedAvg":
        np.testing.assert_allclose(w, 0.75 * CENTRE)
    assert np.all(w * CENTRE > 0)


# --- clients that know nothing of this package, under PPSGD


def parameters_strategy(**changes: Any) -> PPSGD:
    settings: dict[str, Any] = {
        "release": release(z=0.0, clip_norm=1e3),
        "steps": Steps(shared=1.0, personal=0.0),
        "replies": "parameters",
        **changes,
    }
    return strategy(**settings)


ordinary = ClientApp()


@ordinary.train()
def train(message: Message, context: Context) -> Message:
    """Moves halfway to the user's target, and reports more than anybody should see."""
    arrays = message.content.array_records["arrays"]
    config = message.content.config_records["config"]
    assert int(config["server-round"]) >= 1  # type: ignore[arg-type]
    moved = {
        name: Array(array.numpy() + 0.5 * (target(user_of(context)) - array.numpy()))
        if name == "w"
        else array
        for name, array in arrays.items()
    }
    content = RecordDict(
        {
            "arrays": ArrayRecord(moved),
            "metrics": MetricRecord({"num-examples": 10**9 * (1 + user_of(context)), "loss": 5.0}),
            "more": ArrayRecord([np.full(3, 1e30)]),
        }
    )
    return Message(content, reply_to=message)


def named() -> ArrayRecord:
    """w, and a buffer that is not trained."""
    return ArrayRecord(
        {
            "w": Array(np.zeros(SIZE)),
            "norm.num_batches_tracked": Array(np.array(7, dtype=np.int64)),
        }
    )


def test_ordinary_clients_are_driven_by_their_parameters() -> None:
    """w − w_i = ½(w − y_i): w moves halfway to the plain mean, whatever counts they report."""
    result = parameters_strategy().start(grid(ordinary), named(), num_rounds=1)
    np.testing.assert_allclose(result.arrays["w"].numpy(), 0.5 * CENTRE, atol=1e-6)
    assert set(result.train_metrics_clientapp[1]) == {"epsilon"}


def test_buffers_travel_and_keep_their_values() -> None:
    noisy = release(z=1.0, clip_norm=5.0)
    result = parameters_strategy(release=noisy).start(grid(ordinary), named(), num_rounds=2)
    assert list(result.arrays) == list(named())
    assert int(result.arrays["norm.num_batches_tracked"].numpy()) == 7
    assert np.all(result.arrays["w"].numpy() != 0)


def test_the_difference_is_clipped_as_a_gradient() -> None:
    """One user moves by (30, 40, 0, …) with C = 5 and D = 5: w moves by (3, 4, 0, …)/5."""
    step = np.array([30.0, 40.0, 0, 0, 0, 0])

    def one_moves(messages: list[Message], _: list[Message]) -> list[Message]:
        sent = messages[0].content.array_records["arrays"]
        moved = ArrayRecord({name: Array(array.numpy() + step) for name, array in sent.items()})
        return [Message(RecordDict({"arrays": moved}), reply_to=messages[0])]

    w = trained(
        parameters_strategy(release=release(z=0.0, clip_norm=5.0)),
        MeddlingGrid(one_moves, ordinary_on_w0),
        rounds=1,
    )
    np.testing.assert_allclose(w, [0.6, 0.8, 0, 0, 0, 0], rtol=1e-8, atol=1e-12)


def ordinary_on_w0(message: Message, context: Context) -> Message:  # noqa: ARG001
    """Sends back what it got."""
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)


def useless(name: str, record: str) -> Meddle:
    replies = {
        "one array more": ArrayRecord({"0": Array(np.ones(SIZE)), "1": Array(np.ones(SIZE))}),
        "another name": ArrayRecord({"b": Array(np.ones(SIZE))}),
        "NaN": ArrayRecord([np.full(SIZE, np.nan)]),
        "none": ArrayRecord(),
    }

    def meddle(messages: list[Message], _: list[Message]) -> list[Message]:
        return [Message(RecordDict({record: replies[name]}), reply_to=messages[0])]

    return meddle


@pytest.mark.parametrize("record", ["arrays", "fitres.parameters"])
@pytest.mark.parametrize("name", ["one array more", "another name", "NaN", "none"])
def test_parameters_that_cannot_be_used_count_as_zero(name: str, record: str) -> None:
    """As the clients of either API send them."""
    ppsgd = parameters_strategy()
    w = trained(ppsgd, MeddlingGrid(useless(name, record), ordinary_on_w0), rounds=1)
    moved = (name, record) == ("another name", "fitres.parameters")  # there they are numbered
    assert np.any(w) == moved
    assert ppsgd.ledger.rounds == 1


class PullsToItsTarget(NumPyClient):
    """Moves halfway to the user's target."""

    def __init__(self, user: int) -> None:
        self.user = user

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> Any:
        assert set(config) == {"server_round", "lr"}
        moved = [array + 0.5 * (target(self.user) - array) for array in parameters]
        return moved, 10**6, {"loss": 1.0}

    def evaluate(self, parameters: NDArrays, config: dict[str, Scalar]) -> Any:  # noqa: ARG002
        return 2.0, 10, {"distance": float(np.sum(parameters[0] ** 2))}


def numpy_client(context: Context) -> Client:
    return PullsToItsTarget(user_of(context)).to_client()


def test_numpy_clients_are_driven_under_the_message_api() -> None:
    """In training and in evaluation, with the scalars of the user's config."""
    config = ConfigRecord({"lr": 0.1, "names": ["only scalars reach a NumPyClient"]})
    on = grid(ClientApp(client_fn=numpy_client))
    ppsgd = parameters_strategy(evaluate_every=1)
    result = ppsgd.start(on, w0(), num_rounds=1, train_config=config)
    np.testing.assert_allclose(flat(result.arrays), 0.5 * CENTRE, atol=1e-6)
    assert result.evaluate_metrics_clientapp[0] == {"distance": 0.0, "loss": 2.0}


def test_ordinary_clients_of_both_kinds_take_part_in_one_training() -> None:
    """Nobody knows of which kind a client is: every message holds w in both forms."""
    numbered = ClientApp(client_fn=numpy_client)

    def mixed(message: Message, context: Context) -> Message:
        return (numbered if user_of(context) % 2 else ordinary)(message, context)

    only_w = ArrayRecord({"w": Array(np.zeros(SIZE))})
    config = ConfigRecord({"lr": 0.1})
    result = parameters_strategy().start(grid(mixed), only_w, 2, train_config=config)
    np.testing.assert_allclose(flat(result.arrays), 0.75 * CENTRE, atol=1e-6)


def test_a_learner_in_place_of_the_function_that_makes_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"learner_for must be .*, got a Target"):
        client_app(Target(target(0)))  # type: ignore[arg-type]


def test_a_learner_for_that_cannot_be_pickled_is_named_when_it_is_sent() -> None:
    lock = threading.Lock()

    def locked(context: Context) -> Target:
        with lock:
            return learner_for(context)

    with pytest.raises(TypeError, match=r"learner_for=<function .*locked.*module-level function"):
        pickle.dumps(client_app(locked))


def test_a_stock_client_without_the_setting_gets_a_line_that_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stock_only(message: Message, context: Context) -> Message:
        if message.metadata.message_type == MessageType.TRAIN:
            return ordinary_on_w0(message, context)
        return Message(RecordDict(), reply_to=message)

    caplog.set_level("DEBUG", logger="flwr.ppsgd")
    with pytest.raises(RuntimeError, match="in round 1 each"):
        trained(strategy(), grid(stock_only))
    assert "replies='parameters'" in caplog.text


# --- InProcessGrid


def test_any_callable_is_a_client_app_for_the_grid() -> None:
    """Each node has a context of its own, which outlives a message."""
    visits: dict[int, int] = {}

    def counting(message: Message, context: Context) -> Message:
        count = int(context.state.get("visits", ConfigRecord({"n": 0}))["n"]) + 1  # type: ignore[arg-type]
        context.state["visits"] = ConfigRecord({"n": count})
        visits[user_of(context)] = count
        reply = {"arrays": message.content["arrays"]}
        return Message(
            RecordDict({**reply, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message
        )

    result = FedAvg(fraction_evaluate=0.0).start(grid(counting), w0(), num_rounds=3)
    assert visits == dict.fromkeys(range(USERS), 3)
    np.testing.assert_array_equal(flat(result.arrays), 0.0)


def test_a_client_that_raises_is_an_error_reply_and_its_state_is_as_before() -> None:
    def failing(_: Message, context: Context) -> Message:
        context.state["half"] = ConfigRecord({"done": True})
        raise RuntimeError("in the middle")

    on = grid(failing)
    messages = [Message(RecordDict({"arrays": w0()}), node, "train") for node in on.get_node_ids()]
    replies = list(on.send_and_receive(messages))
    assert len(replies) == USERS
    for reply in replies:
        assert "in the middle" in str(reply.error.reason)
    assert not any(on.context(node).state for node in on.get_node_ids())


def test_the_grid_answers_pushed_messages_once() -> None:
    on = grid(ordinary_on_w0)
    nodes = list(on.get_node_ids())
    messages = [Message(RecordDict({"arrays": w0()}), node, "train") for node in nodes]
    ids = list(on.push_messages(messages))
    assert len(set(ids)) == USERS
    replies = list(on.pull_messages(ids))
    assert [reply.metadata.reply_to_message_id for reply in replies] == ids
    assert [reply.metadata.src_node_id for reply in replies] == nodes
    assert not list(on.pull_messages(ids))
