"""Flower's own DP strategies, secure aggregation and mods around this package: refused, or working.

What would change a gradient, or add noise that no stated ε knows of, is refused before anything is
charged. What only looks on works.
"""

import json
import logging
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord
from flwr.client import Client
from flwr.client import mod as legacy_mods
from flwr.clientapp import ClientApp
from flwr.clientapp import mod as mods
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import NDArrays, Scalar, ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig, SimpleClientManager
from flwr.server import strategy as legacy_strategies
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow, SecAggWorkflow
from flwr.serverapp import GaussianPrivacyEvent, PrivacyAccountant
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import FedAvg

from flwr_ppsgd import SecureSum, client_app
from flwr_ppsgd.legacy import PPSGDClient
from tests.contract.hostile_clients import (
    SIZE,
    USERS,
    flat,
    grid,
    learner_for,
    legacy_strategy,
    new_context,
    published_by,
    release,
    strategy,
    trained,
    w0,
)
from tests.contract.targets import run_legacy

TWO = ServerConfig(num_rounds=2)
WRAPPERS = [
    "DifferentialPrivacyClientSideAdaptiveClipping",
    "DifferentialPrivacyClientSideFixedClipping",
    "DifferentialPrivacyServerSideAdaptiveClipping",
    "DifferentialPrivacyServerSideFixedClipping",
]
CLIPPING = ["fixedclipping_mod", "adaptiveclipping_mod", "LocalDpMod"]


def clipping_mod(module: Any, name: str) -> Any:
    """A mod of Flower's that changes what a client sends."""
    found = getattr(module, name)
    return found(1.0, 1.0, 1.0, 1e-3) if name == "LocalDpMod" else found


def wrapped(module: Any, name: str, inner: Any) -> Any:
    """A DP strategy of Flower's around another strategy."""
    numbers: dict[str, Any] = {"noise_multiplier": 0.1, "num_sampled_clients": USERS}
    if "Fixed" in name:
        numbers["clipping_norm"] = 1.0
    return getattr(module, name)(inner, **numbers)


def client_fn(context: Context) -> Client:
    return PPSGDClient(learner_for(context), context, local_step=0.5).to_client()


# --- the round, where Flower's strategies put it


def test_every_message_says_its_round_and_the_users_own_config_stays() -> None:
    """Flower's example of custom mods reads it from every message, checks and evaluations too."""
    seen: list[tuple[str, int]] = []

    def logging_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        config = message.content["config"]
        seen.append((message.metadata.message_type, int(config["server-round"])))  # type: ignore[arg-type]
        if message.metadata.message_type != "query":
            assert config["lr"] == 0.1
        return call_next(message, context)

    config = ConfigRecord({"lr": 0.1})
    app = client_app(learner_for, mods=[logging_mod])
    strategy(evaluate_every=1).start(
        grid(app), w0(), num_rounds=2, train_config=config, evaluate_config=config
    )
    assert dict(config) == {"lr": 0.1}
    rounds = [(kind, round_) for kind, round_ in dict.fromkeys(seen) if kind != "query"]
    assert rounds == [("evaluate", 0), ("train", 1), ("evaluate", 1), ("train", 2), ("evaluate", 2)]


def test_every_exchange_of_a_secure_sum_says_its_round() -> None:
    rounds: list[int] = []

    def logging_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        round_ = int(message.content["config"]["server-round"])  # type: ignore[arg-type]
        if message.metadata.message_type == "train":
            rounds.append(round_)
        return call_next(message, context)

    app = client_app(learner_for, mods=[logging_mod])
    secure = release(population=6, aggregation=SecureSum(4, 1))
    trained(strategy(release=secure), grid(app, users=6))
    assert rounds == [1] * 24 + [2] * 24


class Watched(PPSGDClient):
    """Notes the round that Flower's legacy clients read."""

    seen: list[tuple[str, Scalar]]

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> Any:
        self.seen.append(("fit", config["server_round"]))
        return super().fit(parameters, config)

    def evaluate(self, parameters: NDArrays, config: dict[str, Scalar]) -> Any:
        self.seen.append(("evaluate", config["server_round"]))
        return super().evaluate(parameters, config)


def test_every_legacy_config_says_its_round() -> None:
    Watched.seen = []

    def watched(context: Context) -> Client:
        return Watched(learner_for(context), context).to_client()

    ppsgd = legacy_strategy(evaluate_every=1)
    run_legacy(ppsgd, grid(ClientApp(client_fn=watched)), TWO)
    assert ppsgd.ledger.rounds == 2
    each = Counter({("fit", 1): 5, ("evaluate", 1): 5, ("fit", 2): 5, ("evaluate", 2): 5})
    assert Counter(Watched.seen) == each


# --- strategies around ours


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("replies", ["gradient", "parameters"])
def test_flowers_dp_strategies_are_refused_around_ppsgd(name: str, replies: str) -> None:
    """Before anything is sent, whoever drives the rounds; the strategy itself can still be used."""
    inner = strategy(replies=replies)
    outer = wrapped(strategies, name, inner)
    with pytest.raises(ValueError, match=f"PPSGD inside Flower's {name}.*use it without {name}"):
        outer.start(grid(), w0(), num_rounds=1)
    with pytest.raises(ValueError, match=f"PPSGD inside Flower's {name}"):
        outer.configure_train(1, w0(), ConfigRecord(), grid())
    assert inner.ledger.rounds == 0
    inner.start(grid(client_app(learner_for, local_step=0.1)), w0(), num_rounds=1)
    assert inner.ledger.rounds == 1


@pytest.mark.parametrize("name", WRAPPERS)
def test_flowers_legacy_dp_strategies_are_refused_around_ppsgd(name: str) -> None:
    inner = legacy_strategy()
    outer = wrapped(legacy_strategies, name, inner)
    words = f"PPSGDStrategy inside Flower's {name}.*use it without {name}"
    with pytest.raises(ValueError, match=words):
        run_legacy(outer, grid(ClientApp(client_fn=client_fn)), TWO)
    with pytest.raises(ValueError, match=words):
        outer.configure_fit(1, ndarrays_to_parameters([np.zeros(SIZE)]), SimpleClientManager())
    assert inner.ledger.rounds == 0


def secagg(workflow: Any, server: Any) -> None:
    """One round of Flower's secure aggregation."""
    on = grid(ClientApp(client_fn=client_fn, mods=[legacy_mods.secaggplus_mod]))
    context = LegacyContext(new_context(), config=ServerConfig(num_rounds=1), strategy=server)
    DefaultWorkflow(fit_workflow=workflow)(on, context)


@pytest.mark.parametrize("workflow", [SecAggPlusWorkflow(3, 2), SecAggWorkflow(2)])
def test_flowers_secure_aggregation_is_refused_around_ppsgd(workflow: Any) -> None:
    """One client of norm 7.5 once entered unclipped, under a statement that said "clipped"."""
    inner = legacy_strategy()
    with pytest.raises(ValueError, match=r"inside Flower's SecAgg.*aggregation=SecureSum"):
        secagg(workflow, inner)
    assert inner.ledger.rounds == 0


# --- mods around our clients


@pytest.mark.parametrize("name", CLIPPING)
def test_mods_that_clip_parameters_are_refused_when_the_app_is_made(name: str) -> None:
    with pytest.raises(ValueError, match=f"leave {name} out of mods"):
        client_app(learner_for, mods=[clipping_mod(mods, name)])


@pytest.mark.parametrize("name", CLIPPING)
def test_an_app_for_stock_strategies_keeps_such_mods_from_gradients(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = client_app(learner_for, local_step=0.5, mods=[clipping_mod(mods, name)])
    ppsgd = strategy()
    with pytest.raises(RuntimeError, match=r"(?i)nothing was charged|rounds 1 and 2"):
        trained(ppsgd, grid(app))
    assert f"leave {name} out of mods" in caplog.text


def test_a_clipping_mod_works_under_flowers_own_strategy() -> None:
    app = client_app(learner_for, local_step=0.5, mods=[mods.fixedclipping_mod])
    name = "DifferentialPrivacyClientSideFixedClipping"
    outer = wrapped(strategies, name, FedAvg(fraction_evaluate=0.0))
    assert np.any(flat(outer.start(grid(app), w0(), num_rounds=2).arrays))


@pytest.mark.parametrize("name", CLIPPING)
def test_legacy_clients_refuse_to_send_a_gradient_through_such_a_mod(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It would send w + clip(g − w), and more, in place of a gradient."""
    app = ClientApp(client_fn, mods=[clipping_mod(legacy_mods, name)])
    unchanged = legacy_strategy(release=release(z=0.0))
    kept = published_by(unchanged)
    with pytest.raises(RuntimeError, match="rounds 1 and 2"):
        run_legacy(unchanged, grid(app), TWO)
    for w in kept:
        np.testing.assert_array_equal(w, 0.0)
    if name == "LocalDpMod":  # the others do without a clip norm from the server
        assert "leave LocalDpMod out of mods" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"insecure_seed": 1, "evaluate_every": 1},
        {"release": release(z=0.0, aggregation=SecureSum(4, 1))},
    ],
    ids=["plain", "secure"],
)
def test_mods_that_only_look_change_nothing(changes: dict[str, Any]) -> None:
    app = client_app(learner_for, mods=[mods.message_size_mod, mods.arrays_size_mod])
    watched = trained(strategy(**changes), grid(app))
    assert np.all(watched != 0)
    np.testing.assert_array_equal(watched, trained(strategy(**changes), grid()))


def test_mods_that_only_look_change_nothing_in_the_legacy_api() -> None:
    found = []
    watched = ClientApp(client_fn, mods=[legacy_mods.message_size_mod])
    for app in (ClientApp(client_fn), watched):
        server = legacy_strategy(insecure_seed=1)
        published = published_by(server)
        run_legacy(server, grid(app), TWO)
        found.append(published[-1])
    np.testing.assert_array_equal(*found)


# --- what Flower's strategies do besides


def test_should_stop_ends_the_training_after_a_round_and_epsilon_is_that_of_the_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stop that looks at results is a function of the data."""
    caplog.set_level(logging.INFO, logger="flwr")
    asked: list[int] = []

    def should_stop(server_round: int, result: strategies.Result) -> bool:
        asked.append(server_round)
        return "epsilon" in result.train_metrics_clientapp[2] if server_round == 2 else False

    stopped = strategy()
    result = stopped.start(grid(), w0(), num_rounds=5, should_stop=should_stop)
    assert asked == [1, 2]
    assert stopped.ledger.rounds == 2
    assert np.any(flat(result.arrays))
    assert "should_stop has ended the training after round 2" in caplog.text
    planned = strategy()
    planned.start(grid(), w0(), num_rounds=5)
    assert stopped.privacy_data()["epsilon"] == planned.privacy_data()["epsilon"]


def test_a_training_logs_a_line_for_each_round_and_the_statement_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="flwr")
    central = MetricRecord({"accuracy": 0.5})
    strategy(evaluate_every=1).start(grid(), w0(), num_rounds=2, evaluate_fn=lambda *_: central)
    lines = [record.getMessage() for record in caplog.records]
    rounds = [line for line in lines if line.startswith("[ROUND ")]
    assert [line.partition("]")[0] for line in rounds] == ["[ROUND 0/2", "[ROUND 1/2", "[ROUND 2/2"]
    for line in rounds:
        assert re.search(r"epsilon \S+ · clients: distance \S+ · evaluate_fn: accuracy 0.5$", line)
    assert sum("joint differential privacy" in line for line in lines) == 1
    assert len(lines) <= 12


def test_the_ledger_is_readable_as_flowers_accountant() -> None:
    """Everyone in two rounds at z = 2: one Gaussian of 2/√2, whose ε at δ is known."""
    for ppsgd in (strategy(release=release(z=2.0), max_epsilon=10.0), legacy_strategy()):
        accountant: PrivacyAccountant = ppsgd.accountant
        assert accountant.num_releases == 0
        assert accountant.get_privacy_spent().epsilon == 0
        assert accountant.config.population_size == USERS
    ppsgd = strategy(release=release(z=2.0), max_epsilon=10.0)
    trained(ppsgd, grid())
    accountant = ppsgd.accountant
    spent = accountant.get_privacy_spent()
    assert spent.epsilon == accountant.get_epsilon(spent.delta) == ppsgd.ledger.epsilon()
    assert spent.num_releases == 2
    assert accountant.get_delta(spent.epsilon) == pytest.approx(spent.delta, rel=1e-6)
    assert accountant.get_epsilon(1e-3) < spent.epsilon
    event = GaussianPrivacyEvent(2.0, sample_size=USERS, population_size=USERS)
    assert not accountant.would_exceed(event)
    assert accountant.would_exceed(event, count=200)
    json.dumps(accountant.state_dict())
    with pytest.raises(TypeError, match="charges each release before it publishes it"):
        accountant.compose(event)


def test_the_accountant_of_a_seeded_training_has_no_epsilon() -> None:
    ppsgd = strategy(insecure_seed=1)
    trained(ppsgd, grid())
    assert np.isinf(ppsgd.accountant.get_privacy_spent().epsilon)
