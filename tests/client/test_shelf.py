"""θ on disk: complete or as before, whose it is, and each round once."""

import errno
import logging
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_ppsgd import PPSGD, Order, cli, client_app, disk
from flwr_ppsgd.client.legacy_api import PPSGDClient
from flwr_ppsgd.client.personal import Personal, choose, keep, recall, step_from
from flwr_ppsgd.client.sent import client_report
from flwr_ppsgd.client.shelf import RUN, STATE_DIR, UNNAMED, USER, Shelf
from flwr_ppsgd.simulation.grid import InProcessGrid
from tests.support.toy import SIZE, Floats, release, strategy, target, toy_learner, w0

STEP = 0.5  # s_θ of tests.support.toy.strategy


class Nodes(InProcessGrid):
    """Virtual nodes with a state directory each. ``restart`` forgets what they had in memory."""

    def __init__(
        self,
        directory: Path,
        app: ClientApp | None = None,
        nodes: int = 5,
        run: str = "",
        run_id: int = 1,
    ):
        super().__init__(app or client_app(toy_learner), nodes, {RUN: run} if run else {}, run_id)
        self._directory = directory

    def context(self, node_id: int) -> Context:
        context = super().context(node_id)
        context.node_config = {**context.node_config, STATE_DIR: str(self._directory)}
        return context

    def restart(self) -> None:
        self._contexts.clear()


def shelf(directory: Path, user: int = 0, run: str = UNNAMED) -> Shelf:
    return Shelf(directory, run, str(user))


def theta(directory: Path, user: int = 0, run: str = UNNAMED) -> Floats:
    return next(shelf(directory, user, run).saves()).vectors["theta"]


def files(directory: Path, user: int = 0) -> list[Path]:
    return sorted(shelf(directory, user).directory.glob("*.theta"))


def one_round(ppsgd: PPSGD, on: InProcessGrid, round_: int) -> list[Message]:
    return list(on.send_and_receive(ppsgd.configure_train(round_, w0(), ConfigRecord(), on)))


def order(round_: int, starts: tuple[int, ...] = (1,), training: int = 7) -> Order:
    return Order(round_, STEP, 1.0, "mean", True, training=training, starts=starts)


def test_theta_is_on_disk_as_it_is_in_the_node(tmp_path: Path) -> None:
    on = Nodes(tmp_path)
    strategy(checkpoint_dir=tmp_path / "server", average=True).start(on, w0(), num_rounds=3)
    kept = recall(on.context(on.get_node_ids()[2]))
    on.restart()
    again = recall(on.context(on.get_node_ids()[2]))
    assert kept is not None
    assert again is not None
    np.testing.assert_array_equal(again.theta, kept.theta)
    np.testing.assert_array_equal(np.asarray(again.stood), np.asarray(kept.stood))
    assert (again.round, again.visit) == (3, 3)


def test_files_are_private_and_as_many_as_are_needed(tmp_path: Path) -> None:
    strategy().start(Nodes(tmp_path), w0(), num_rounds=9)
    assert len(files(tmp_path)) == 3
    for path in shelf(tmp_path).directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(shelf(tmp_path).directory.stat().st_mode) == 0o700


def test_a_node_that_restarts_in_every_round_trains_as_one_that_never_does(tmp_path: Path) -> None:
    on = Nodes(tmp_path / "states")
    ppsgd = strategy(insecure_seed=5)
    ppsgd.start(on, w0(), num_rounds=6, on_round=lambda *_: on.restart())
    steady = InProcessGrid(client_app(toy_learner), 5)
    strategy(insecure_seed=5).start(steady, w0(), num_rounds=6)
    for user, node in enumerate(steady.get_node_ids()):
        kept = recall(steady.context(node))
        assert kept is not None
        np.testing.assert_array_equal(theta(tmp_path / "states", user), kept.theta)


def test_a_new_run_goes_on_with_theta_and_another_name_begins_anew(tmp_path: Path) -> None:
    strategy().start(Nodes(tmp_path), w0(), num_rounds=2)
    first = theta(tmp_path)
    strategy().start(Nodes(tmp_path, run_id=2), w0(), num_rounds=1)
    again = recall(Nodes(tmp_path).context(1_000_000))
    assert again is not None
    assert (again.round, again.visit, again.since) == (1, 3, 2)
    np.testing.assert_allclose(again.theta, first - STEP * (first - target(0)), atol=1e-15)
    strategy().start(Nodes(tmp_path, run="other"), w0(), num_rounds=1)
    np.testing.assert_allclose(theta(tmp_path, run="other"), STEP * target(0), atol=1e-15)


def test_a_round_sent_again_steps_theta_once(tmp_path: Path) -> None:
    """The server dies after the clients of round 3 have answered; the next one redoes it."""
    on = Nodes(tmp_path / "states")
    first = strategy(checkpoint_dir=tmp_path / "server")
    first.start(on, w0(), num_rounds=2)
    one_round(first, on, 3)
    after = theta(tmp_path / "states")
    first.close()
    on.restart()
    one_round(strategy(checkpoint_dir=tmp_path / "server"), on, 3)
    np.testing.assert_array_equal(theta(tmp_path / "states"), after)
    assert next(shelf(tmp_path / "states").saves()).stamp["visit"] == 3


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_theta_is_a_replay_of_the_rounds_that_completed(
    tmp_path: Path, seed: int, on_disk: bool
) -> None:
    """Servers die at random, in a round or after it; whom a lost round had drawn must not keep its
    step."""
    dice, steps, done = random.Random(seed), {user: [] for user in range(5)}, 0  # type: ignore[var-annotated]
    on = Nodes(tmp_path / "states") if on_disk else InProcessGrid(client_app(toy_learner), 5)
    while done < 25:
        ppsgd = strategy(release=release(rate=0.5), checkpoint_dir=tmp_path / "server")
        w = ppsgd._beginning(w0())
        for round_ in range(done + 1, done + 1 + dice.randrange(1, 4)):
            messages = ppsgd.configure_train(round_, w, ConfigRecord(), on)
            replies = list(on.send_and_receive(messages))
            if dice.random() < 0.4:
                break
            for message in messages:
                steps[message.metadata.dst_node_id - 1_000_000].append(w.to_numpy_ndarrays()[0])
            w, _ = ppsgd.aggregate_train(round_, replies)
            done = round_
        ppsgd.close()
        if isinstance(on, Nodes) and dice.random() < 0.5:
            on.restart()
    final = strategy(release=release(rate=0.5), checkpoint_dir=tmp_path / "server")
    for user, ws in steps.items():
        expected = np.zeros(SIZE)
        for before in ws:
            expected = expected - STEP * (before + expected - target(user))
        chosen = step_from(
            on.context(1_000_000 + user), _next_order(final, done + 1), lambda: np.zeros(SIZE)
        )
        np.testing.assert_array_equal(chosen.theta, expected)


def _next_order(ppsgd: PPSGD, round_: int) -> Order:
    return Order(
        round_,
        STEP,
        1.0,
        "mean",
        True,
        training=ppsgd._curator.training_id,
        starts=ppsgd._curator.starts(),
    )


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=12))
@settings(max_examples=50, deadline=None)
def test_the_choice_is_the_newest_that_the_server_still_has(visits: list[tuple[int, bool]]) -> None:
    """Each entry: rounds until the next visit, and whether the server then dies before it has
    finished that round."""
    starts, round_, kept = [1], 0, [Personal(np.zeros(1), 1, training=7, start=1)]
    lasting = kept[0]
    for ahead, dies in visits:
        round_ += ahead
        base = choose(reversed(kept), [], order(round_, tuple(starts)), below=round_)
        assert base is lasting
        stepped = Personal(np.ones(1), 1, round_, base.visit + 1, training=7, start=len(starts))
        kept = [*[p for p in kept if p.visit <= base.visit][-2:], stepped]
        if dies:
            starts.append(round_)
            round_ -= 1
        else:
            lasting = stepped


def test_orders_that_were_overtaken_are_refused(tmp_path: Path) -> None:
    context = Nodes(tmp_path).context(1_000_000)
    keep(context, Personal(np.ones(SIZE), 1, round=5, visit=3, training=7, start=2))
    for late in (order(4, (1, 5)), order(6, (1,))):
        with pytest.raises(ValueError, match="comes too late and θ stays as it is"):
            step_from(context, late, lambda: np.zeros(SIZE))


def rounds_kept(directory: Path, training: int) -> list[int]:
    """The rounds of a training's saves, newest first."""
    saves = shelf(directory).saves(lambda other: other == training)
    return [save.stamp["round"] for save in saves]


def test_two_trainings_under_one_name_do_not_step_each_others_theta(tmp_path: Path) -> None:
    on, both = Nodes(tmp_path), [strategy(), strategy()]
    for round_ in (1, 2, 3):
        for ppsgd in both:
            one_round(ppsgd, on, round_)
    lines = [rounds_kept(tmp_path, ppsgd._curator.training_id) for ppsgd in both]
    assert lines == [[3, 2, 1], [3, 2, 1]]


def test_a_server_that_went_back_further_than_is_kept_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = [Personal(np.ones(1), 1, round=r, visit=r, training=7, start=1) for r in (9, 8, 7)]
    chosen = choose(kept, [], order(3, (1, 3)), below=3)
    assert chosen is kept[-1]
    assert "gone back to round 3 and the oldest θ kept here is of round 7" in caplog.text


@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "another format"])
def test_a_damaged_file_is_set_aside_and_the_one_before_goes_on(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy().start(Nodes(tmp_path), w0(), num_rounds=2)
    before = next(iter(list(shelf(tmp_path).saves())[1:])).vectors["theta"]
    _damage(files(tmp_path)[-1], how)
    kept = recall(Nodes(tmp_path).context(1_000_000))
    assert kept is not None
    np.testing.assert_array_equal(kept.theta, before)
    assert "is damaged" in caplog.text
    assert len(shelf(tmp_path).damaged()) == 1
    assert "damaged, set aside" in client_report(tmp_path)


def _damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[-5] ^= 1
    other = b"".join(disk.seal({"format": "of tomorrow"}, []))
    path.write_bytes(
        {"cut": content[:-8], "empty": b"", "flipped": bytes(flipped), "another format": other}[how]
    )


def test_where_every_file_is_damaged_theta_never_becomes_zero(tmp_path: Path) -> None:
    ppsgd, on = strategy(), Nodes(tmp_path)
    ppsgd.start(on, w0(), num_rounds=3)
    on.restart()
    for path in files(tmp_path):
        _damage(path, "cut")
    for _ in range(2):
        replies = one_round(ppsgd, on, 4)
        assert [reply.has_error() for reply in replies] == [True, False, False, False, False]
        assert "restore one from a backup" in str(replies[0].error.reason)


def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    ppsgd, on = strategy(), Nodes(tmp_path)
    ppsgd.start(on, w0(), num_rounds=2)
    on.restart()
    own, stranger = files(tmp_path, 0)[-1], files(tmp_path, 1)[-1]
    own.write_bytes(stranger.read_bytes())
    replies = one_round(ppsgd, on, 3)
    assert "holds the θ of user '1' in run 'unnamed-run', not that of '0'" in str(
        replies[0].error.reason
    )
    assert not any(reply.has_error() for reply in replies[1:])


@pytest.mark.parametrize("place", ["write", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_costs_the_round_and_leaves_theta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, number: int
) -> None:
    ppsgd, on = strategy(), Nodes(tmp_path)
    ppsgd.start(on, w0(), num_rounds=2)
    before, state = theta(tmp_path), on.context(1_000_000).state.copy()
    with monkeypatch.context() as patch:
        _break_disk(patch, place, number)
        replies = one_round(ppsgd, on, 3)
    assert all("this round counts as zero" in str(reply.error.reason) for reply in replies)
    np.testing.assert_array_equal(theta(tmp_path), before)
    assert on.context(1_000_000).state == state
    assert not list(tmp_path.rglob("*.partial"))
    assert not any(reply.has_error() for reply in one_round(ppsgd, on, 3))


def _break_disk(patch: pytest.MonkeyPatch, place: str, number: int) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    if place == "write":
        patch.setattr(disk, "write", fail)
    else:
        patch.setattr(os, place, fail)


def _raising(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    call_next(message, context)
    raise RuntimeError("a mod that fails")


def test_a_mod_that_raises_after_the_step_leaves_theta_as_before(tmp_path: Path) -> None:
    """As in a deployment, where Flower keeps the state of a client that raised."""
    context = Nodes(tmp_path).context(1_000_000)
    message = Message(
        RecordDict({"arrays": w0(), "ppsgd-order": ConfigRecord(order(1).to_flat())}), 5, "train"
    )
    with pytest.raises(RuntimeError, match="a mod that fails"):
        client_app(toy_learner, mods=[_raising])(message, context)
    assert not context.state
    assert not files(tmp_path)


def test_of_two_tasks_at_work_on_one_theta_the_second_drops_its_step(tmp_path: Path) -> None:
    def overtaken(
        message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        reply = call_next(message, context)
        client_app(toy_learner)(message, Nodes(tmp_path).context(1_000_000))
        return reply

    context = Nodes(tmp_path).context(1_000_000)
    message = Message(
        RecordDict({"arrays": w0(), "ppsgd-order": ConfigRecord(order(1).to_flat())}), 5, "train"
    )
    with pytest.raises(
        ValueError, match="stepped by another task while this one was at work: this step is dropped"
    ):
        client_app(toy_learner, mods=[overtaken])(message, context)
    assert not context.state
    assert [save.stamp["visit"] for save in shelf(tmp_path).saves()] == [1]


def test_a_stock_strategy_counts_visits_on_disk_and_leaves_theta(tmp_path: Path) -> None:
    on = Nodes(tmp_path, client_app(toy_learner, local_step=0.1))
    strategy().start(on, w0(), num_rounds=2)
    before = theta(tmp_path)
    on.restart()
    FedAvg().start(on, w0(), num_rounds=3)
    np.testing.assert_array_equal(theta(tmp_path), before)
    assert next(shelf(tmp_path).saves()).stamp["visit"] == 5
    assert "bytes of arrays" in client_report(tmp_path)


def test_the_clock_may_go_back(tmp_path: Path) -> None:
    """Which save is newest is told by its number, not by when it was written."""
    on, ppsgd = Nodes(tmp_path), strategy()
    for round_ in (1, 2, 3):
        ppsgd.aggregate_train(round_, one_round(ppsgd, on, round_))
        for path in files(tmp_path):
            os.utime(path, (1e9 - 1e6 * round_, 1e9 - 1e6 * round_))
        on.restart()
    kept = recall(on.context(1_000_000))
    assert kept is not None
    assert (kept.round, kept.visit) == (3, 3)


def legacy_fit(context: Context, round_: int, starts: tuple[int, ...] = (1,)) -> None:
    PPSGDClient(toy_learner(context), context).fit(
        [np.zeros(SIZE)], order(round_, starts).to_flat()
    )


def test_the_legacy_client_keeps_theta_on_disk_too(tmp_path: Path) -> None:
    on = Nodes(tmp_path)
    legacy_fit(on.context(1_000_000), 1)
    on.restart()
    legacy_fit(on.context(1_000_000), 2)
    after = theta(tmp_path)
    legacy_fit(on.context(1_000_000), 2, (1, 2))
    np.testing.assert_array_equal(theta(tmp_path), after)
    assert shelf(tmp_path).shared().round == 2


def test_a_typing_error_in_the_node_config_is_named(tmp_path: Path) -> None:
    context = Context(1, 2, {"ppsgd-statedir": str(tmp_path)}, RecordDict(), {})
    with pytest.raises(
        ValueError, match="unknown key 'ppsgd-statedir': did you mean 'ppsgd-state-dir'"
    ):
        Shelf.of(context)
    with pytest.raises(ValueError, match=f"add {USER}, or partition-id"):
        Shelf.of(Context(1, 2, {STATE_DIR: str(tmp_path)}, RecordDict(), {}))


@pytest.mark.parametrize("name", ["a", "..", "Ada L.", "x/../y", "ü%2F", "."])
def test_any_name_is_a_folder_of_its_own_inside_the_directory(tmp_path: Path, name: str) -> None:
    strategy(release=release(1)).start(Nodes(tmp_path / "s", nodes=1, run=name), w0(), num_rounds=1)
    (found,) = Shelf.all_in(tmp_path / "s")
    assert (found.run, found.user) == (name, "0")
    assert {path.name for path in tmp_path.iterdir()} == {"s"}


def test_the_report_says_what_left_and_what_is_promised(tmp_path: Path) -> None:
    strategy(release=release(z=5.0), evaluate_every=0).start(Nodes(tmp_path), w0(), num_rounds=4)
    text = client_report(tmp_path)
    assert text.count("took part in 4 rounds; the last one was round 4") == 5
    assert (
        f"{4 * len(ArrayRecord([np.zeros(SIZE)])['0'].data):,} bytes of gradient; 4 replies in 1 "
        "Flower runs" in text
    )
    assert "nothing but the clipped gradient; its norm was" in text
    assert "1 at most, clipped to 1" in text
    assert (
        "-joint differential privacy over 4 planned rounds for each of 5 users; the server is "
        "trusted" in text
    )


def test_the_report_names_metrics_that_left(tmp_path: Path) -> None:
    strategy(evaluate_every=1).start(Nodes(tmp_path), w0(), num_rounds=1)
    assert "bytes of metrics" in client_report(tmp_path)
    assert "the clipped gradient, and more" in client_report(tmp_path)


def test_the_command_prints_the_report_and_its_exit_status_means_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy().start(Nodes(tmp_path / "states"), w0(), num_rounds=1)
    for directory, status in ((tmp_path / "states", 0), (tmp_path / "elsewhere", 2)):
        monkeypatch.setattr("sys.argv", ["ppsgd", "client-report", str(directory)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code or 0) == status
    captured = capsys.readouterr()
    assert "Run 'unnamed-run', user '4'" in captured.out
    assert "elsewhere holds no θ of any run" in captured.err
    logging.getLogger("flwr").setLevel(logging.DEBUG)
