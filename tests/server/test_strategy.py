"""PPSGD under Flower: one round, whatever comes back; budget; enrolment; what is released."""

import logging
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Error, Message

from flwr_ppsgd import Poisson, Release, Steps, client_app
from flwr_ppsgd.server.replies import mean_of
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.statement import rounded_up
from flwr_ppsgd.training import Enrolled
from tests.support.toy import (
    SIZE,
    Toy,
    flat,
    grid,
    make_replies,
    opened,
    release,
    strategy,
    toy_learner,
    w0,
)

ONE = np.full(SIZE, 0.1)


def test_replies_without_message_ids_are_known_by_their_source() -> None:
    """Hand-made messages have the id ''."""
    ppsgd, on = strategy(), grid()
    messages = ppsgd.configure_train(1, w0(), ConfigRecord(), on)
    arrays, _ = ppsgd.aggregate_train(1, make_replies(messages, lambda _: ONE))
    np.testing.assert_allclose(flat(arrays), -0.1, rtol=1e-8)


def test_an_error_from_a_dead_supernode_is_mapped_by_the_message_it_answers() -> None:
    """Flower gives it source 1, which belongs to nobody."""
    ppsgd, on = strategy(), grid()
    messages = opened(ppsgd, on)
    dead = Message(Error(5, "node unavailable"), reply_to=messages[0])
    dead.metadata.__dict__["_src_node_id"] = 1
    arrays, _ = ppsgd.aggregate_train(1, [dead, *make_replies(messages[1:], lambda _: ONE)])
    np.testing.assert_allclose(flat(arrays), -0.4 / 5, rtol=1e-8)


def test_the_released_step_is_a_whole_number_of_grid_steps() -> None:
    """w_t = fl(w_{t−1} − s_w·g·k/D) with k whole; from w = 0 the k can be read off exactly."""
    r = Release(Poisson(4, 1.0), clip_norm=1.0, noise_multiplier=1.0)
    ppsgd, on = strategy(release=r, steps=Steps(shared=1.0, personal=0.0)), grid(4)
    replies = make_replies(opened(ppsgd, on), lambda place: ONE * (place + 1) / 7)
    arrays, _ = ppsgd.aggregate_train(1, replies)
    k = -flat(arrays) * 4 * 2.0**32
    np.testing.assert_array_equal(k, np.rint(k))


def test_one_strategy_is_one_training(caplog: pytest.LogCaptureFixture) -> None:
    """A second call goes on with the same w; one that asks for no more rounds than were done says
    so."""
    ppsgd, nodes = strategy(release=release(z=1.0), insecure_seed=2), grid()
    ppsgd.start(nodes, w0(), num_rounds=2)
    continued = ppsgd.start(nodes, w0(), num_rounds=4)
    straight = strategy(release=release(z=1.0), insecure_seed=2).start(grid(), w0(), num_rounds=4)
    np.testing.assert_array_equal(flat(continued.arrays), flat(straight.arrays))
    again = ppsgd.start(nodes, w0(), num_rounds=4)
    np.testing.assert_array_equal(flat(again.arrays), flat(straight.arrays))
    assert "All 4 rounds are done already" in caplog.text
    assert ppsgd.ledger.rounds == 4


def test_aggregating_a_round_that_was_not_configured_is_refused_and_releases_nothing() -> None:
    ppsgd = strategy(release=release(z=1.0))
    with pytest.raises(ValueError, match="without being configured"):
        ppsgd.aggregate_train(1, [])
    opened(ppsgd, grid())
    with pytest.raises(ValueError, match="round 2 was aggregated"):
        ppsgd.aggregate_train(2, [])
    ppsgd.aggregate_train(1, [])
    with pytest.raises(ValueError, match="without being configured"):
        ppsgd.aggregate_train(1, [])
    assert ppsgd.ledger.rounds == 1


class SomeOnline(InProcessGrid):
    """A grid on which more nodes come online at each look."""

    def __init__(self, population: int, *looks: int) -> None:
        super().__init__(client_app(toy_learner), population)
        self.looks = list(looks)

    def get_node_ids(self) -> list[int]:
        online = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return list(super().get_node_ids())[:online]


def test_the_run_waits_for_the_stated_share_with_a_message(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flwr_ppsgd.server.enrolment.POLL_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, logger="flwr.ppsgd"):
        opened(strategy(enrolled=Enrolled(min_online=0.8)), SomeOnline(5, 0, 2, 4))
    assert "Waiting for 4 of 5 enrolled nodes (min_online=0.8): 2 online" in caplog.text


def test_enrolled_nodes_that_are_offline_count_as_zero_until_they_come() -> None:
    """Three of five are online and send .1 each, and D stays 5; the others take free places."""
    ppsgd, on = strategy(enrolled=Enrolled(min_online=0.5)), SomeOnline(5, 3, 5)
    messages = opened(ppsgd, on)
    assert len(messages) == 3
    arrays, _ = ppsgd.aggregate_train(1, make_replies(messages, lambda _: ONE))
    np.testing.assert_allclose(flat(arrays), -0.3 / 5, rtol=1e-8)
    assert len(ppsgd.configure_train(2, arrays, ConfigRecord(), on)) == 5


def test_nodes_that_come_when_all_places_are_taken_have_none() -> None:
    ppsgd = strategy(enrolled=Enrolled(min_online=0.5), evaluate_every=1)
    on = SomeOnline(7, 3, 7)
    first = opened(ppsgd, on)
    ppsgd.aggregate_train(1, [])
    asked = ppsgd.configure_evaluate(1, w0(), ConfigRecord(), on)
    ids = [message.metadata.dst_node_id for message in asked]
    assert len(ids) == 5
    assert {message.metadata.dst_node_id for message in first} <= set(ids)


def test_more_nodes_than_the_population_is_an_error_that_says_so() -> None:
    words = "7 nodes are online but the cohort's population is 5.*enrolled"
    with pytest.raises(ValueError, match=words):
        strategy().start(grid(7), w0(), num_rounds=1)


class Impatient(InProcessGrid):
    """Remembers how long it was told to wait, and never hears of the last node."""

    waited: float | None = None

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Any:
        self.waited = timeout
        return list(super().send_and_receive(messages, timeout=timeout))[:-1]


def test_a_round_has_a_timeout_and_whoever_is_later_counts_as_zero(
    caplog: pytest.LogCaptureFixture,
) -> None:
    on = Impatient(client_app(toy_learner), 5)
    with caplog.at_level("DEBUG", logger="flwr.ppsgd"):
        strategy(round_timeout=7.5).start(on, w0(), num_rounds=1)
    assert on.waited == 7.5
    assert "server-private: round=1 replies=4 zeros=1 missing=1" in caplog.text


def failing(message: Message, context: Context) -> Message:  # noqa: ARG001
    raise RuntimeError("no data here")


def test_small_and_empty_cohorts_never_end_a_run() -> None:
    ppsgd = strategy(release=release(population=30, rate=0.1), insecure_seed=1)
    ppsgd.start(InProcessGrid(failing, 30), w0(), num_rounds=8)  # type: ignore[arg-type]
    assert ppsgd.ledger.rounds == 8


def test_names_that_clients_choose_never_meet_names_that_are_ours() -> None:
    hostile = ("epsilon", "round", "deployed_epsilon", "\x1b[2Jloss", "n" * 65, "", "accuracy")
    assert mean_of([dict.fromkeys(hostile, 0.5)]) == {"accuracy": 0.5}
    many = {f"m{place}": 1.0 for place in range(1000)}
    assert len(mean_of([many])) == 50


def test_no_client_can_make_itself_the_mean() -> None:
    """Of 11 clients with weight 1, one claims 10¹⁸: it counts for ten."""
    own = [{"accuracy": 1.0, "num-examples": 1.0}] * 10
    hostile = {"accuracy": 0.0, "num-examples": 1e18}
    assert mean_of([*own, hostile])["accuracy"] == pytest.approx(0.5)
    assert mean_of([*own, {"accuracy": 1e308}])["accuracy"] == 1.0


def test_control_characters_of_a_client_never_reach_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def hostile(message: Message, context: Context) -> Message:  # noqa: ARG001
        raise RuntimeError("\x1b]0;owned\x07\nround=1 epsilon=0")

    ppsgd = strategy(release=release(population=30, rate=0.3), insecure_seed=2)
    with caplog.at_level("INFO", logger="flwr.ppsgd"):
        ppsgd.start(InProcessGrid(hostile, 30), w0(), num_rounds=2)  # type: ignore[arg-type]
    private = [line for line in caplog.messages if line.startswith("server-private")]
    assert private
    assert all(line.isprintable() for line in private)


@pytest.mark.parametrize(("size", "hopeless"), [(60_000, True), (4, False)])
def test_before_round_one_it_is_said_whether_this_can_learn(
    size: int, hopeless: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """√T·qN/(z·√d) for T = 4, N = 10, z = 2: 0.04 for 60,000 parameters, 5 for four."""
    on = InProcessGrid(client_app(lambda _: Toy(np.zeros(size))), 10)
    with caplog.at_level("INFO", logger="flwr.ppsgd"):
        strategy(release=release(population=10, z=2.0)).start(on, w0(np.zeros(size)), num_rounds=4)
    expected = math.sqrt(4) * 10 / (2.0 * math.sqrt(size))
    assert f"at best {expected:.2g}" in caplog.text
    assert ("This cannot learn: even if all users agree" in caplog.text) == hopeless
    assert ("allow a larger epsilon, or share about" in caplog.text) == hopeless


def test_what_a_deployment_would_cost_has_a_name_of_its_own() -> None:
    ppsgd = strategy(release=release(z=1.0), insecure_seed=1)
    ppsgd.start(grid(), w0(), num_rounds=2)
    cost = ppsgd.ledger.epsilon()
    assert ppsgd.privacy_data()["deployed_epsilon"] == pytest.approx(cost, rel=1e-9)
    assert f"A deployment would cost epsilon = {rounded_up(cost)}" in ppsgd.privacy_statement()


def test_the_statement_names_the_bound_and_delta_is_the_total() -> None:
    ppsgd = strategy(release=release(rate=0.5, z=2.0), delta=1e-13)
    ppsgd.start(grid(), w0(), num_rounds=20)
    data = ppsgd.privacy_data()
    assert str(data["epsilon_bound"]) in ppsgd.privacy_statement()
    assert data["epsilon_bound"] != "PLD"
    assert 0 < data["delta_taken_by_finite_precision"] < 1e-20  # type: ignore[operator]
