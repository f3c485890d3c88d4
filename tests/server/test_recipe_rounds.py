"""Votes, optimizers, normalised gradients and solved θ, on the server and over a whole training."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.common import ndarrays_to_parameters
from flwr.serverapp.exception import PrivacyBudgetExhausted

from flwr_ppsgd import PPSGD, Order, Poisson, Release, Solution, Steps, client_app
from flwr_ppsgd.legacy import PPSGDClient, PPSGDStrategy
from flwr_ppsgd.optimizers import SGD, Adam, Momentum, Schedule
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.server.journal import read_story
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.tuning import AdaptiveClip, SizeVote
from flwr_ppsgd.wire import GRADIENT, ORDER, VOTE
from tests.support.toy import SIZE, Floats, Toy, flat, strategy, target, w0

USERS = 8
EVERYONE = Poisson(USERS, 1.0)


@dataclass
class Solver(Toy):
    """A toy that can solve: θ = target − w, of size 2⁻³."""

    begins_at_zero = True

    def solve(self, w: Floats) -> Solution:
        return Solution(self.target - w, {"beta": 0.0})

    def own_size(self) -> float:
        return 0.17

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:
        gradient = w + theta - self.target
        return gradient * (2.0 if order.full_batch else 1.0), gradient


def solver(context: Context) -> Solver:
    return Solver(target(int(context.node_config["partition-id"])))


def grid(app: Any = None) -> InProcessGrid:
    return InProcessGrid(app or client_app(solver), USERS)


def on(answer: Callable[[Message, Context], Message]) -> InProcessGrid:
    """Nodes that answer by a function."""
    return InProcessGrid(answer, USERS)  # type: ignore[arg-type]  # any callable will do


def noisy(z: float = 2.0, **changes: Any) -> Release:
    return Release(EVERYONE, 1.0, z, **changes)


def vote(z: float = 0.0) -> SizeVote:
    return SizeVote(Release(EVERYONE, 1.0, z))


# --- normalised gradients


def test_normalised_gradients_enter_with_norm_c() -> None:
    """Σ_i g_i/‖g_i‖ over D, whatever the clients' lengths."""
    ppsgd = strategy(release=noisy(z=0.0, normalise=True), steps=Steps(shared=1.0, personal=0.0))
    result = ppsgd.start(grid(), w0(), num_rounds=1)
    directions = [-target(user) / np.linalg.norm(target(user)) for user in range(USERS)]
    expected = -np.sum(directions, axis=0) / USERS
    np.testing.assert_allclose(flat(result.arrays), expected, atol=1e-7)


def long_and_short(scale: float) -> Any:
    def learner(context: Context) -> Toy:
        return Toy(scale * target(int(context.node_config["partition-id"])))

    return learner


@pytest.mark.parametrize("scale", [1e-200, 1e-3, 1e6, 1e200])
def test_the_length_of_a_gradient_does_not_matter(scale: float) -> None:
    def trained(by: float) -> Floats:
        ppsgd = strategy(
            release=noisy(z=0.0, normalise=True), steps=Steps(shared=1e-9, personal=0.0)
        )
        users = grid(client_app(long_and_short(by)))
        return flat(ppsgd.start(users, w0(), num_rounds=1).arrays)

    np.testing.assert_allclose(trained(scale), trained(1.0), rtol=1e-6)


@pytest.mark.parametrize("value", [1e-290, 1e290, 0.0, math.nan, math.inf])
def test_a_vector_without_a_direction_counts_as_zero(value: float) -> None:
    """The server decides before it scales: no hostile length turns into NaN or too much weight."""
    from flwr_ppsgd.noise import Coins, GridSum

    total = GridSum(3, noisy(z=0.0, normalise=True))
    try:
        total.add(np.full(3, value))
    except FloatingPointError:
        assert not math.isfinite(value)
    assert not np.any(total.noisy(Coins.insecure(0)))


@pytest.mark.parametrize("exponent", [-279, -100, 0, 100, 279])
def test_no_length_gets_more_than_norm_c_into_the_sum(exponent: int) -> None:
    from flwr_ppsgd.noise import Coins, GridSum

    for clip_norm in (1e-100, 1.0, 1e100):
        release = Release(EVERYONE, clip_norm, 0.0, normalise=True)
        total = GridSum(4, release)
        total.add(np.array([3.0, -4.0, 1e-20, 0.5]) * 10.0**exponent)
        assert np.linalg.norm(total.noisy(Coins.insecure(0))) <= clip_norm


# --- optimizers


@pytest.mark.parametrize("optimizer", [Momentum(0.5), Adam(), SGD(Schedule("cosine", rounds=6))])
def test_a_restart_goes_on_with_the_optimizers_state(tmp_path: Path, optimizer: Any) -> None:
    """The same w as without a restart: motion, squares and schedule are in the checkpoint."""

    def run(directory: Path, stops: list[int]) -> Floats:
        for rounds in stops:
            ppsgd = strategy(
                release=noisy(),
                steps=Steps(shared=0.1, personal=0.0),
                optimizer=optimizer,
                checkpoint_dir=directory,
                insecure_seed=3,
            )
            arrays = ppsgd.start(grid(), w0(), num_rounds=rounds).arrays
        return flat(arrays)

    whole = run(tmp_path / "whole", [6])
    np.testing.assert_array_equal(run(tmp_path / "parts", [2, 3, 6]), whole)


def test_another_optimizer_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"release": noisy(), "checkpoint_dir": tmp_path}
    strategy(**settings, optimizer=Adam()).start(grid(), w0(), num_rounds=2)
    again = strategy(**settings, optimizer=Momentum())
    with pytest.raises(ValueError, match="same optimizer"):
        again.start(grid(), w0(), num_rounds=3)
    assert again.ledger.rounds == 2


def test_the_average_is_that_of_the_iterates_whatever_moved_them() -> None:
    """(1/n)·Σ_{t<n} w_t: w before each round, under Adam as under plain steps."""
    iterates: list[Floats] = []
    ppsgd = strategy(
        release=noisy(z=0.0),
        steps=Steps(shared=0.1, personal=0.0),
        optimizer=Adam(),
        average=True,
    )
    result = ppsgd.start(
        grid(),
        w0(),
        num_rounds=4,
        on_round=lambda _, result: iterates.append(flat(result.arrays)),
    )
    np.testing.assert_allclose(flat(result.arrays), np.mean(iterates[:4], axis=0), atol=1e-12)


# --- the vote


def test_a_vote_is_charged_beside_the_rounds_and_is_no_round() -> None:
    ppsgd = strategy(release=noisy(), vote=vote(z=3.0))
    result = ppsgd.start(grid(), w0(), num_rounds=2)
    assert ppsgd.ledger.rounds == 3
    assert dict(ppsgd.ledger.releases) == {vote(z=3.0).release: 1, noisy(): 2}
    assert ppsgd.rounds_done == 2
    assert list(result.train_metrics_clientapp) == [1, 2]
    assert "asked once for the size" in ppsgd.privacy_statement()


def test_epsilon_is_stated_for_the_vote_too_before_it_is_held() -> None:
    seen: list[float] = []

    def watch(message: Message, context: Context) -> Message:
        seen.append(float(str(message.content.config_records[ORDER]["epsilon"])))
        return client_app(solver)(message, context)

    # δ below 1/population, or nothing is promised
    ppsgd = strategy(release=noisy(), vote=vote(z=3.0), delta=1e-3)
    ppsgd.start(on(watch), w0(), num_rounds=2)
    both = Ledger(1e-3).record(vote(z=3.0).release).record(noisy(), 2)
    assert set(seen) == {both.epsilon()}


def test_steps_are_in_units_of_what_the_vote_found() -> None:
    """All users say .17, which is in the bin of 2⁻³: its middle is 2⁻²·⁵."""

    def moved(**changes: Any) -> Floats:
        ppsgd = strategy(release=noisy(z=0.0), steps=Steps(shared=1.0, personal=0.0), **changes)
        return flat(ppsgd.start(grid(), w0(), num_rounds=1).arrays)

    np.testing.assert_allclose(moved(vote=vote()), 2**-2.5 * moved(), rtol=1e-12)


def test_a_vote_that_finds_nothing_leaves_the_default(caplog: pytest.LogCaptureFixture) -> None:
    from tests.support.toy import toy_learner  # it has no size to tell

    ppsgd = strategy(
        release=noisy(z=0.0),
        steps=Steps(shared=1.0, personal=0.0),
        vote=vote(),
        default_size=0.25,
    )
    found = flat(ppsgd.start(grid(client_app(toy_learner)), w0(), num_rounds=1).arrays)
    plain = strategy(release=noisy(z=0.0), steps=Steps(shared=0.25, personal=0.0))
    expected = flat(plain.start(grid(client_app(toy_learner)), w0(), num_rounds=1).arrays)
    np.testing.assert_array_equal(found, expected)
    assert "the default, 0.25, is taken" in caplog.text


def test_a_restart_replays_the_vote_and_does_not_vote_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "release": noisy(),
        "vote": vote(z=1.0),
        "checkpoint_dir": tmp_path,
    }
    first = strategy(**settings)
    first.start(grid(), w0(), num_rounds=1)
    size = first._curator.voted_size
    again = strategy(**settings)
    again.start(grid(), w0(), num_rounds=3)
    assert again._curator.voted_size == size
    assert read_story(tmp_path).counts == {noisy(): 3, vote(z=1.0).release: 1}


def test_a_crash_between_charge_and_vote_votes_and_charges_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "release": noisy(),
        "vote": vote(z=1.0),
        "checkpoint_dir": tmp_path,
    }
    with monkeypatch.context() as patch:

        def dies(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr("flwr_ppsgd.server.journal.Journal.note_vote", dies)
        with pytest.raises(KeyboardInterrupt):
            strategy(**settings).start(grid(), w0(), num_rounds=1)
    strategy(**settings).start(grid(), w0(), num_rounds=1)
    assert read_story(tmp_path).counts == {noisy(): 1, vote(z=1.0).release: 2}


def test_a_torn_line_counts_as_the_dearest_release(tmp_path: Path) -> None:
    """It may have been the vote, which had less noise than a round."""
    ppsgd = strategy(release=noisy(), vote=vote(z=1.0), checkpoint_dir=tmp_path)
    ppsgd.start(grid(), w0(), num_rounds=2)
    journal = tmp_path / "journal.jsonl"
    with journal.open("ab") as file:
        file.write(b'{"round": 3, "ki')
    assert read_story(tmp_path).counts == {noisy(): 2, vote(z=1.0).release: 2}


def test_a_budget_that_has_no_room_for_the_vote_stops_before_it_is_held() -> None:
    asked: list[str] = []

    def watch(message: Message, context: Context) -> Message:
        asked.append(message.metadata.message_type)
        return client_app(solver)(message, context)

    ppsgd = strategy(release=noisy(z=60.0), vote=vote(z=0.5), max_epsilon=1.0, delta=1e-3)
    result = ppsgd.start(on(watch), w0(), num_rounds=2)
    assert not result.train_metrics_clientapp
    assert ppsgd.ledger.rounds == 0
    assert not asked
    with pytest.raises(PrivacyBudgetExhausted, match="the vote before round 1"):
        ppsgd._curator.check_vote()


def test_rounds_are_counted_beside_what_the_vote_takes_from_the_budget() -> None:
    from flwr_ppsgd import affordable_rounds

    limit = 3.0
    alone = affordable_rounds(max_epsilon=limit, delta=1e-3, release=noisy(z=8.0))
    ppsgd = strategy(release=noisy(z=8.0), vote=vote(z=4.0), max_epsilon=limit, delta=1e-3)
    result = ppsgd.start(grid(), w0(), num_rounds=1000)
    done = max(result.train_metrics_clientapp)
    assert done < alone
    assert ppsgd.ledger.epsilon() <= limit
    assert ppsgd.ledger.record(noisy(z=8.0)).epsilon() > limit


def test_a_vote_reply_holds_the_vote_and_nothing_else() -> None:
    replies: list[Message] = []

    def watch(message: Message, context: Context) -> Message:
        reply = client_app(solver)(message, context)
        if message.content.config_records[ORDER]["asks"] == "size":
            replies.append(reply)
            assert not context.state  # θ is left alone
        return reply

    strategy(release=noisy(), vote=vote(z=1.0)).start(on(watch), w0(), num_rounds=1)
    trained = [reply for reply in replies if reply.metadata.message_type == "train"]
    assert len(trained) == USERS
    for reply in trained:
        assert list(reply.content) == [GRADIENT]
        assert list(reply.content.array_records[GRADIENT]) == [VOTE]


def test_the_counts_of_a_vote_get_the_noise_that_is_charged() -> None:
    """Nobody can answer here, so what is published is the noise alone: standard deviation z·C."""
    from tests.support.toy import toy_learner

    drawn = []
    for seed in range(40):
        ppsgd = strategy(release=noisy(), vote=vote(z=3.0), insecure_seed=seed)
        ppsgd.start(grid(client_app(toy_learner)), w0(), num_rounds=1)
        assert ppsgd._curator.votes is not None
        drawn.append(ppsgd._curator.votes / 3.0)
    normals = np.concatenate(drawn)
    assert abs(normals.mean()) < 5 / math.sqrt(normals.size)
    assert abs(normals.var() - 1) < 5 * math.sqrt(2 / normals.size)


def test_a_hostile_vote_counts_once_and_at_most_with_norm_c() -> None:
    """Whatever a client sends is clipped to one vote."""
    from flwr_ppsgd.arrays import vector_record

    wanted = vote()

    def hostile(message: Message, context: Context) -> Message:
        reply = client_app(solver)(message, context)
        asks = message.content.config_records[ORDER]["asks"]
        if asks == "size" and message.metadata.message_type == "train":
            reply.content[GRADIENT] = vector_record({VOTE: np.full(wanted.powers, 1e9)})
        return reply

    ppsgd = strategy(release=noisy(z=0.0), vote=wanted)
    ppsgd.start(on(hostile), w0(), num_rounds=1)
    assert ppsgd._curator.votes is not None
    assert np.linalg.norm(ppsgd._curator.votes) <= USERS


# --- both APIs, and what is solved


def legacy_run(**changes: Any) -> tuple[PPSGDStrategy, Floats]:
    """A legacy ServerApp, for as many rounds as ``server_config`` says."""
    from flwr.clientapp import ClientApp

    from tests.server.test_legacy_api import legacy, run_legacy

    app = ClientApp(client_fn=lambda context: PPSGDClient(solver(context), context).to_client())
    found: list[Floats] = []
    ppsgd = legacy(
        **changes,
        evaluate_fn=lambda _, arrays, __: found.append(arrays[0]),
    )
    run_legacy(ppsgd, ppsgd.server_config(3).num_rounds, InProcessGrid(app, USERS))
    return ppsgd, found[-1]


def test_both_apis_hold_the_same_vote_and_give_the_same_w() -> None:
    settings: dict[str, Any] = {
        "release": noisy(normalise=True),
        "steps": Steps(shared=0.15, personal=0.0),
        "optimizer": Adam(),
        "vote": vote(z=1.0),
        "personal": "solve",
        "full_batch": True,
        "insecure_seed": 5,
    }
    message = strategy(**settings)
    expected = flat(message.start(grid(), w0(), num_rounds=3).arrays)
    legacy, found = legacy_run(**settings)
    np.testing.assert_array_equal(found, expected)
    assert legacy.ledger == message.ledger


def test_solving_takes_gradients_at_theta_zero_and_evaluates_at_the_solution() -> None:
    ppsgd = strategy(
        release=noisy(z=0.0),
        steps=Steps(shared=0.1, personal=0.0),
        personal="solve",
        evaluate_every=1,
    )
    result = ppsgd.start(grid(), w0(), num_rounds=2)
    last = result.evaluate_metrics_clientapp[2]
    assert last["distance"] == pytest.approx(0.0, abs=1e-20)
    assert last["local_distance"] == pytest.approx(0.0, abs=1e-20)
    assert float(last["shared_distance"]) > 1.0  # type: ignore[arg-type]
    plain = strategy(release=noisy(z=0.0), steps=Steps(shared=0.1, personal=0.0))
    expected = plain.start(grid(), w0(), num_rounds=2).arrays
    np.testing.assert_array_equal(flat(result.arrays), flat(expected))


def test_at_the_solved_theta_the_gradient_of_w_vanishes() -> None:
    ppsgd = strategy(
        release=noisy(z=0.0),
        steps=Steps(shared=0.1, personal=0.0),
        personal="solve",
        solve_in_training=True,
    )
    result = ppsgd.start(grid(), w0(), num_rounds=2)
    np.testing.assert_allclose(flat(result.arrays), 0.0, atol=1e-12)


def test_a_full_batch_is_asked_for() -> None:
    def moved(full_batch: bool) -> Floats:
        ppsgd = strategy(
            release=Release(EVERYONE, 100.0, 0.0),
            steps=Steps(shared=0.1, personal=0.0),
            full_batch=full_batch,
        )
        return flat(ppsgd.start(grid(), w0(), num_rounds=1).arrays)

    np.testing.assert_allclose(moved(True), 2 * moved(False), rtol=1e-7)


# --- adaptive clipping


def test_the_clip_norm_finds_the_median_of_the_norms() -> None:
    norms = sorted(float(np.linalg.norm(target(user))) for user in range(USERS))
    ppsgd = strategy(
        release=Release(EVERYONE, 0.01, 0.0),
        steps=Steps(shared=1e-9, personal=0.0),
        adaptive_clip=AdaptiveClip(quantile=0.5, rate=0.5),
    )
    ppsgd.start(grid(), w0(), num_rounds=60)
    assert norms[2] < ppsgd._curator.clip_norm < norms[5]


def test_an_adapted_clip_norm_costs_what_a_fixed_one_does_and_is_resumed(tmp_path: Path) -> None:
    def run(directory: Path, stops: list[int]) -> tuple[PPSGD, Floats]:
        for rounds in stops:
            ppsgd = strategy(
                release=noisy(z=1.0),
                steps=Steps(shared=0.1, personal=0.0),
                adaptive_clip=AdaptiveClip(),
                checkpoint_dir=directory,
                insecure_seed=2,
            )
            arrays = ppsgd.start(grid(), w0(), num_rounds=rounds).arrays
        return ppsgd, flat(arrays)

    whole, w = run(tmp_path / "whole", [6])
    parts, same = run(tmp_path / "parts", [3, 6])
    np.testing.assert_array_equal(w, same)
    assert whole._curator.clip_norm == parts._curator.clip_norm != 1.0
    assert whole.ledger.releases == ((noisy(z=1.0), 6),)


def test_an_adapted_clip_norm_bounds_the_sum_in_its_own_units() -> None:
    """At C_t = 4·C a client's vector of norm 4·C enters as norm C, and comes out again as 4·C."""
    ppsgd = strategy(
        release=Release(EVERYONE, 0.5, 0.0),
        steps=Steps(shared=1.0, personal=0.0),
        adaptive_clip=AdaptiveClip(share=0.1),
    )
    ppsgd._curator.clip_norm = 2.0
    total = ppsgd._curator.open_sum(SIZE)
    vector = ppsgd._curator.encoded(np.full(SIZE, 1e3), {})
    total.add(vector)
    w, _ = ppsgd._curator.publish(1, np.zeros(SIZE), total)
    assert np.linalg.norm(w) * USERS == pytest.approx(2.0 * math.sqrt(0.9), rel=1e-6)


def test_an_adapted_clip_norm_leaves_shorter_vectors_as_they_are() -> None:
    ppsgd = strategy(
        release=Release(EVERYONE, 0.5, 0.0),
        steps=Steps(shared=1.0, personal=0.0),
        adaptive_clip=AdaptiveClip(share=0.1),
    )
    ppsgd._curator.clip_norm = 2.0
    total = ppsgd._curator.open_sum(SIZE)
    vector = np.linspace(-0.5, 0.5, SIZE)  # longer than C, shorter than C_t
    total.add(ppsgd._curator.encoded(vector, {}))
    w, _ = ppsgd._curator.publish(1, np.zeros(SIZE), total)
    np.testing.assert_allclose(-w * USERS, vector, atol=1e-6)


# --- one call


def test_auto_needs_nothing_but_population_epsilon_and_delta() -> None:
    ppsgd = PPSGD.auto(population=USERS, epsilon=4.0, delta=1e-2)
    result = ppsgd.start(grid(), w0())
    assert max(result.train_metrics_clientapp) == 50
    assert 3.9 < ppsgd.ledger.epsilon() <= 4.0
    data = ppsgd.privacy_data()
    assert data["personal"] == "solve"
    assert data["epsilon"] == ppsgd.ledger.epsilon()


def test_auto_of_the_legacy_api_plans_the_same() -> None:
    initial = ndarrays_to_parameters([np.zeros(SIZE)])
    legacy = PPSGDStrategy.auto(
        initial_parameters=initial, population=2000, epsilon=4.0, delta=1e-5
    )
    message = PPSGD.auto(population=2000, epsilon=4.0, delta=1e-5)
    assert legacy.training == message.training
    assert legacy.server_config().num_rounds == 51  # the vote takes one of Flower's rounds
