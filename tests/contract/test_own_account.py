"""A device keeps its own account over all servers, and everyone may have an ε of their own.

What would pass a limit is refused at the check before round one: nothing is charged, and nobody's
data are read.
"""

import math
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.serverapp.strategy import FedAvg

from flwr_ppsgd import PPSGD, AdditiveLinear, Minibatches, Order, SecureSum, client_app
from flwr_ppsgd.legacy import PPSGDClient, PPSGDStrategy
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract.hostile_clients import (
    APP,
    App,
    Floats,
    OwnedNode,
    Target,
    content_bytes,
    flat,
    grid,
    is_training,
    learner_for,
    ppsgd_command,
    release,
    sent_vector,
    strategy,
    target,
    trained,
    user_of,
    w0,
)
from tests.contract.targets import run_legacy
from tests.contract.test_node_limits import DELTA, limited, unread
from tests.contract.test_recipe import USERS as PEOPLE
from tests.contract.test_recipe import Users, kept_by

SIX = release(z=2.0, population=6, aggregation=SecureSum(honest=4, colluding=1))


def gaussian(answers: int, z: float, delta: float = DELTA) -> float:
    """ε of so many answers with noise multiplier z, by the accountant."""
    return float(dp_accounting.get_epsilon_gaussian(z / math.sqrt(answers), delta))


def answers(app: OwnedNode) -> int:
    return [is_training(reply) for reply in app.replies].count(True)


def answered(node: dict[str, Any], rounds: int = 2, app: App = APP, **changes: Any) -> int:
    """How often a user with this node config answers in a training at z = 2."""
    owned = OwnedNode(node, app)
    trained(strategy(**{"release": release(z=2.0), **changes}), grid(owned), rounds)
    return answers(owned)


# --- the limit


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_plan_that_fits_is_answered_and_one_that_does_not_is_refused_at_once(
    tmp_path: Path, rounds: int
) -> None:
    """The limit is what two answers at z = 2 cost; a tenth of δ is kept for secure sums."""
    node = limited(tmp_path, gaussian(2, 2.0, 0.9 * DELTA) * 1.0001)
    assert answered(node, rounds) == (2 if rounds == 2 else 0)


def test_one_account_holds_over_all_trainings_and_servers(tmp_path: Path) -> None:
    """Two answers each: the third training is refused, whoever asks."""
    node = limited(tmp_path, gaussian(4, 2.0, 0.9 * DELTA) * 1.0001)
    assert [answered(node) for _ in range(3)] == [2, 2, 0]
    report = ppsgd_command("client-report", tmp_path / "device")
    spent = gaussian(4, 2.0, 0.9 * DELTA)
    assert f"ε {math.ceil(1000 * spent) / 1000:g} at δ 1e-05, if each server adds" in report
    assert "this device has enforced its bound and its count" in report
    assert "by the servers' word: ε at most" in report
    assert "the largest that was ever set" in report


def test_a_secure_sum_has_two_numbers_in_the_report(tmp_path: Path) -> None:
    app = OwnedNode(limited(tmp_path, 50.0))
    trained(strategy(release=SIX), grid(app, users=6), rounds=1)
    report = ppsgd_command("client-report", tmp_path / "device")
    for z, condition in ((2.0, "if h of those summed"), (1.0, "if nobody but this device")):
        epsilon = math.ceil(1000 * gaussian(1, z, 0.9 * DELTA)) / 1000
        assert f"ε {epsilon:g}, {condition}" in report


def test_without_a_limit_the_account_is_kept_all_the_same(tmp_path: Path) -> None:
    """A limit that comes later counts what has left before."""
    node = {"ppsgd-state-dir": str(tmp_path / "device"), "ppsgd-user": "ann"}
    assert answered(node) == 2
    assert "set ppsgd-delta" in ppsgd_command("client-report", tmp_path / "device")
    assert answered(limited(tmp_path, gaussian(3, 2.0, 0.9 * DELTA))) == 0


def test_a_limit_is_refused_after_answers_that_no_epsilon_covers(tmp_path: Path) -> None:
    """Measures left the device before the limit was set: no account can bound them."""
    node = {"ppsgd-state-dir": str(tmp_path / "device"), "ppsgd-user": "ann"}
    assert answered(node, rounds=1, evaluate_every=1) == 1
    assert answered(limited(tmp_path, 100.0), rounds=1) == 0
    assert "outside every ε" in ppsgd_command("client-report", tmp_path / "device")


def test_what_a_registered_function_sends_is_counted_and_noted_too(tmp_path: Path) -> None:
    """Flower lets an app answer messages of its own kind, such as ``train.mine``."""
    app = client_app(learner_for, local_step=0.5)

    @app.train("mine")
    def mine(message: Message, context: Context) -> Message:  # noqa: ARG001
        return Message(RecordDict({"arrays": w0()}), reply_to=message)

    node = {"ppsgd-state-dir": str(tmp_path / "device"), "ppsgd-user": "ann"}
    on = grid(OwnedNode(node, app))
    content = RecordDict({"arrays": w0()})
    (reply,) = on.send_and_receive([Message(content, on.get_node_ids()[0], "train.mine")])
    assert set(reply.content) == {"arrays"}
    report = ppsgd_command("client-report", tmp_path / "device")
    assert "outside every ε" in report
    assert "bytes of arrays" in report


OUTSIDE: dict[str, Callable[[Any], Any]] = {
    "a stock strategy": lambda on: FedAvg().configure_train(1, w0(), ConfigRecord(), on),
    "no noise": lambda on: strategy(release=release(z=0.0)).configure_train(
        1, w0(), ConfigRecord(), on
    ),
    "no plan": lambda on: strategy().configure_train(1, w0(), ConfigRecord(), on),
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_what_has_no_epsilon_is_refused_under_a_limit(kind: str, tmp_path: Path) -> None:
    """Rounds that somebody drives by hand have no plan."""
    app = OwnedNode(limited(tmp_path, 100.0), client_app(unread, local_step=0.5))
    on = grid(app)
    first = on.get_node_ids()[0]
    (message,) = [each for each in OUTSIDE[kind](on) if each.metadata.dst_node_id == first]
    (reply,) = on.send_and_receive([message])
    assert "refused-policy" in str(reply.error.reason)


class Failing(Target):
    """Fails on its own data, which a server could choose w to find out."""

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:  # noqa: ARG002
        raise RuntimeError(f"my data are {self.target}")


def failing(context: Context) -> Target:
    return Failing(target(0)) if user_of(context) == 0 else learner_for(context)


def test_a_learner_that_fails_costs_what_an_answer_costs_under_a_limit(tmp_path: Path) -> None:
    """Otherwise how often it fails, which may depend on its data, decides when the limit ends."""
    node = limited(tmp_path, gaussian(3, 2.0, 0.9 * DELTA) * 1.0001)
    assert answered(node, app=client_app(failing)) == 0
    assert answered(node) == 0
    assert answered(node, rounds=1) == 1


def test_a_damaged_account_is_refused_and_nothing_is_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A spent account with its number made smaller by hand."""
    node = limited(tmp_path, gaussian(2, 2.0, 0.9 * DELTA) * 1.0001)
    assert answered(node) == 2
    (path,) = (tmp_path / "device").rglob("*.sqlite")
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE fact SET value = replace(value, '0.5', '0.1') WHERE name = 'account'")
    app = OwnedNode(node, client_app(unread))
    trained(strategy(release=release(z=2.0)), grid(app), rounds=2)
    assert not app.replies
    assert "'account' is not what was written" in caplog.text
    assert "is damaged" in ppsgd_command("client-report", tmp_path / "device")


def test_an_account_that_is_put_back_while_a_node_runs_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A restored backup forgets what was spent; who starts anew with one is told so in the docs."""
    node = limited(tmp_path, 100.0)
    device = tmp_path / "device"
    backup = tmp_path / "backup"

    class Restoring(OwnedNode):
        def __call__(self, message: Message, context: Context) -> Message:
            if user_of(context) == 0 and answers(self) == 1 and not backup.exists():
                shutil.copytree(device, backup)
            elif user_of(context) == 0 and answers(self) == 2:
                shutil.rmtree(device)
                shutil.copytree(backup, device)
            return super().__call__(message, context)

    app = Restoring(node)
    trained(strategy(release=release(z=2.0)), grid(app), rounds=4)
    assert answers(app) == 2
    assert "has gone back in time" in caplog.text


def test_delta_and_the_plan_are_fixed_by_the_first_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that plans one round more on resume is refused by whoever keeps an account."""
    checkpoint = {"checkpoint_dir": tmp_path / "server"}
    app = OwnedNode(limited(tmp_path, 100.0))
    trained(strategy(**checkpoint), grid(app), rounds=2)
    trained(strategy(**checkpoint), grid(app), rounds=3)
    assert answers(app) == 2
    assert "the first Order of this training had 2" in caplog.text
    assert answered(limited(tmp_path, 100.0, **{"ppsgd-delta": 2 * DELTA}), rounds=1) == 0
    assert "the account was begun with 1e-05" in caplog.text


def test_what_servers_promise_is_summed_over_their_trainings(tmp_path: Path) -> None:
    """Two rounds at z = 1 cost 5.7 each: the second training would make it 11.4."""
    node = {
        "ppsgd-state-dir": str(tmp_path / "device"),
        "ppsgd-user": "ann",
        "ppsgd-max-epsilon": 11.0,
    }
    assert [answered(node, release=release(z=1.0)) for _ in range(2)] == [2, 0]


# --- everyone's own ε


def wanting(epsilon: float, **more: Any) -> dict[str, Any]:
    return {"ppsgd-epsilon": epsilon, "ppsgd-delta": DELTA, **more}


@pytest.mark.parametrize("aggregation", [None, SecureSum(honest=4, colluding=1)])
def test_half_the_bound_is_half_the_signal_and_the_epsilon_that_was_asked_for(
    aggregation: SecureSum | None,
) -> None:
    """Only the first user says anything: w is its vector, clipped to f·C, divided by N.

    f = ½ is ε of noise 2z, which the accountant gives.
    """
    z = 0.01
    own = gaussian(1, 2 * z)
    w = []
    for node in ({}, wanting(own)):
        app = OwnedNode(node, client_app(loud))
        summed = release(z=z, population=6, aggregation=aggregation)
        w.append(trained(strategy(release=summed), grid(app, users=6), rounds=1))
    direction = target(0) / np.linalg.norm(target(0))
    assert 6 * w[0] @ direction == pytest.approx(1.0, abs=0.07)  # noise of .01 to .012
    assert 6 * w[1] @ direction == pytest.approx(0.5, abs=0.07)


def loud(context: Context) -> Target:
    return Target(100 * target(0) if user_of(context) == 0 else np.zeros(6))


def norms(node: dict[str, Any], **changes: Any) -> tuple[list[float], set[int]]:
    """Of the first user's vectors, and how long its replies are."""
    app = OwnedNode(node, client_app(loud))
    trained(strategy(**changes), grid(app), rounds=2)
    replies = [reply for reply in app.replies if is_training(reply)]
    vectors = [sent_vector(reply)[1] for reply in replies]
    sizes = {len(content_bytes(reply)) for reply in replies}
    return [float(np.linalg.norm(vector)) for vector in vectors], sizes


@pytest.mark.parametrize("factor", [0.5, 0.1])
def test_f_is_the_largest_that_the_own_epsilon_allows(factor: float) -> None:
    """Two rounds at z = 3: ε of noise 3/(f·√2). The messages are as long as anybody's."""
    asked = gaussian(2, 3.0 / factor)
    found, sizes = norms(wanting(asked), release=release(z=3.0))
    np.testing.assert_allclose(found, factor, rtol=1e-4)
    whole, same = norms({}, release=release(z=3.0))
    np.testing.assert_allclose(whole, 1.0, rtol=1e-6)
    assert sizes == same
    found, _ = norms(wanting(2 * gaussian(2, 3.0)), release=release(z=3.0))
    np.testing.assert_allclose(found, 1.0, rtol=1e-6)  # f is never above 1


@pytest.mark.parametrize("way", ["regression", "sparse"])
def test_everything_that_auto_asks_for_has_the_same_factor(way: str) -> None:
    """A user who answers adds ½·f to the count beside a scalar."""
    users = Users(way)
    seen: list[tuple[str, Floats]] = []
    app = client_app(users.learner)

    def heard(message: Message, context: Context) -> Message:
        if user_of(context) == 0:
            context.node_config.update(wanting(0.5, **{"ppsgd-delta": 1e-3}))
        reply = app(message, context)
        if user_of(context) == 0 and is_training(message):
            asked = Order.from_flat(message.content["ppsgd-order"]).asks
            seen.append((asked, flat(reply.content.array_records["gradient"])))
        return reply

    auto = PPSGD.auto(**users.auto(epsilon=40.0, delta=1e-3, insecure_seed=None))
    auto.start(InProcessGrid(heard, PEOPLE), users.w)  # type: ignore[arg-type]
    (unit,) = [vector for asked, vector in seen if asked == "unit"]
    factor = 2 * unit[1]
    plan = [(auto.training.release, auto.rounds_done), *((r, 1) for r in before_of(auto))]
    mu = math.sqrt(sum(times * (factor / each.noise_multiplier) ** 2 for each, times in plan))
    assert dp_accounting.get_epsilon_gaussian(1 / mu, 1e-3) == pytest.approx(0.5, rel=1e-3)
    bounded = {asked: vector for asked, vector in seen if asked in ("columns", "solution")}
    assert set(bounded) == ({"columns", "solution"} if users.sparse else {"solution"})
    assert all(np.linalg.norm(vector) <= factor * (1 + 1e-9) for vector in bounded.values())


def before_of(auto: PPSGD) -> list[Any]:
    assert auto.training.recipe is not None
    return list(auto.training.recipe.before.values())


REFUSED: dict[str, dict[str, Any]] = {
    "sampling": {"release": release(z=3.0, rate=0.9)},
    "no noise": {"release": release(z=0.0)},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_there_is_no_f_under_sampling_or_without_noise(kind: str) -> None:
    app = OwnedNode(wanting(1.0), client_app(unread))
    trained(strategy(**REFUSED[kind]), grid(app), rounds=3)
    assert not app.replies


def test_f_is_fixed_before_the_first_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Set, or changed, between two rounds of a training it is refused."""
    at = {"ppsgd-state-dir": str(tmp_path / "device"), "ppsgd-user": "ann"}

    class Changing(OwnedNode):
        def __call__(self, message: Message, context: Context) -> Message:
            if user_of(context) == 0 and answers(self) == 1:
                self._node = {**at, **wanting(1.0)}
            return super().__call__(message, context)

    app = Changing(at)
    trained(strategy(release=release(z=3.0)), grid(app), rounds=2)
    assert answers(app) == 1
    assert "it is fixed before the first answer" in caplog.text


TENTHS = 60
ROWS = 12  # of each user; the last 4 are for testing
FEATURES = 8


def tenth_learner(context: Context) -> AdditiveLinear:
    """Everybody's y is the same function of x, up to a little of their own."""
    user = user_of(context)
    source = np.random.default_rng(user)
    shared = np.random.default_rng(1000).normal(size=FEATURES)
    x = source.normal(size=(ROWS, FEATURES))
    y = x @ (shared + 0.1 * source.normal(size=FEATURES)) + 0.5 * source.normal(size=ROWS)
    y = y[:, None]
    rows = Minibatches(x[:8], y[:8], 4, seed=0, user=user)
    return AdditiveLinear(rows, FEATURES, 1, test=(x[8:], y[8:]), task="regression")


def errors_of(asking: range, epsilon: float) -> tuple[Floats, PPSGD, dict[str, Any], set[int]]:
    """Of everyone's personal model, and of own rows alone; with everything that is published."""
    measured: dict[int, tuple[float, float]] = {}
    lengths: set[int] = set()
    app = client_app(tenth_learner)

    def owned(message: Message, context: Context) -> Message:
        user = user_of(context)
        if user in asking:
            context.node_config.update(wanting(epsilon / 4, **{"ppsgd-delta": 1e-3}))
        reply = app(message, context)
        if is_training(message):
            asked = Order.from_flat(message.content["ppsgd-order"]).asks
            lengths.add(hash((asked, len(content_bytes(reply)))))
        if "metrics" in reply.content:
            found: Any = reply.content["metrics"]
            measured[user] = (found["loss"], found["local_loss"])
        return reply

    auto = PPSGD.auto(
        population=TENTHS,
        epsilon=epsilon,
        delta=1e-3,
        task="regression",
        evaluate_every=1,
        insecure_seed=4,
    )
    w = ArrayRecord([np.zeros((FEATURES, 1))])
    result = auto.start(InProcessGrid(owned, TENTHS), w)  # type: ignore[arg-type]
    errors = np.array([measured[user] for user in range(TENTHS)])
    return errors, auto, auto.published(result.arrays), lengths


def test_a_tenth_that_asks_for_a_quarter_costs_the_others_little_and_nobody_can_tell_who() -> None:
    """Everybody's error stays near that of a training in which nobody asks, and far below that of
    own rows alone; whoever asks, all but the noisy numbers that are published is the same."""
    before, plain, published, lengths = errors_of(range(0), 8.0)
    after, asked, _, with_tenth = errors_of(range(6), 8.0)
    _, others, other_published, with_others = errors_of(range(30, 36), 8.0)
    for group in (slice(0, 6), slice(6, TENTHS)):
        mine, local = after[group].mean(axis=0)
        assert mine < 0.25 * local
        assert mine < 1.15 * before[group, 0].mean()
    assert lengths == with_tenth == with_others
    data = [each.privacy_data() for each in (plain, asked, others)]
    for each in data:
        each.pop("unit_and_size")  # released with noise, as w is
    assert data[0] == data[1] == data[2]
    assert published.keys() == other_published.keys()
    same = [np.array_equal(published[name], other_published[name]) for name in published]
    assert not all(same), "f has its effect"


# --- auto's scalars, and the last w


def test_a_node_below_the_bound_of_scalars_says_so_at_the_check() -> None:
    """√1.25: the check before the first release already tells."""
    users = Users("regression")

    def owned(message: Message, context: Context) -> Message:
        context.node_config["ppsgd-max-clip-norm"] = 1.1
        return client_app(unread)(message, context)

    auto = PPSGD.auto(population=PEOPLE, epsilon=40.0, delta=1e-3, task="regression")
    with pytest.raises(RuntimeError, match="refused-policy"):
        auto.start(InProcessGrid(owned, PEOPLE), users.w)  # type: ignore[arg-type]
    assert auto.ledger.rounds == 0


@pytest.mark.parametrize("legacy", [True, False])
def test_who_answers_no_evaluation_gets_the_last_w_all_the_same(legacy: bool) -> None:
    """And no number about its rows leaves."""
    users = Users("regression")
    measured: list[tuple[int, Any]] = []

    def client_fn(context: Context) -> Client:
        return PPSGDClient(users.learner(context), context).to_client()

    inner = ClientApp(client_fn=client_fn) if legacy else client_app(users.learner)

    def app(message: Message, context: Context) -> Message:
        if user_of(context) == 0:
            context.node_config["ppsgd-evaluate"] = False
        reply = inner(message, context)
        if message.metadata.message_type == "evaluate":
            measures = dict(reply.content).get("evaluateres.metrics" if legacy else "metrics")
            measured.append((user_of(context), measures))
        return reply

    settings: dict[str, Any] = {
        "population": PEOPLE,
        "epsilon": 40.0,
        "delta": 1e-3,
        "task": "regression",
        "evaluate_every": 1,
    }
    on = InProcessGrid(app, PEOPLE)  # type: ignore[arg-type]
    if not legacy:
        PPSGD.auto(**settings).start(on, users.w)
    else:
        w = ndarrays_to_parameters(users.w.to_numpy_ndarrays())
        server = PPSGDStrategy.auto(initial_parameters=w, **settings)
        run_legacy(server, on, server.server_config())
    assert sorted(kept_by(on)) == list(range(PEOPLE))
    assert any(measures for user, measures in measured if user)
    assert not any(measures for user, measures in measured if not user)


# --- what leaves once, or not at all


class Odd(Target):
    """A gradient of another dtype."""

    dtype: Any = None

    def gradients(self, w: Floats, theta: Floats, order: Order) -> Any:
        gradient, own = super().gradients(w, theta, order)
        return gradient.astype(self.dtype), own


@pytest.mark.parametrize("dtype", [np.float16, np.longdouble, np.complex128, object])
@pytest.mark.parametrize("secure", [True, False])
def test_gradients_of_other_dtypes_count_as_zero(dtype: Any, secure: bool) -> None:
    def odd(context: Context) -> Target:
        learner = Odd(target(user_of(context))) if user_of(context) == 0 else Target(np.zeros(6))
        learner.__dict__["dtype"] = dtype
        return learner

    summed = release(z=0.0, population=6, aggregation=SIX.aggregation if secure else None)
    app = OwnedNode({}, client_app(odd))
    w = trained(strategy(release=summed), grid(app, users=6), rounds=1)
    np.testing.assert_array_equal(w, 0.0)
    if secure:
        assert answers(app) == 4, "no dropout"
