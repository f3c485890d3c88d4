"""θ on disk: complete or as before, whose it is, and each round once."""

import errno
import logging
import math
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import replace
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
from flwr_ppsgd.client.personal import Personal, choose, keep, step_from
from flwr_ppsgd.client.policy import STATE_DIR, USER
from flwr_ppsgd.client.refusal import ClientError
from flwr_ppsgd.client.sent import client_report
from flwr_ppsgd.client.shelf import RUN, Shelf
from flwr_ppsgd.simulation import InProcessGrid
from tests.support.kept import kept_by
from tests.support.toy import SIZE, Floats, Toy, release, strategy, target, toy_learner, w0

NAMED = "a run"
STEP = 0.5  # s_θ of tests.support.toy.strategy


class Nodes(InProcessGrid):
    """Virtual nodes with a state directory each. ``restart`` forgets what they had in memory."""

    def __init__(
        self,
        directory: Path,
        app: ClientApp | None = None,
        nodes: int = 5,
        run: str = NAMED,
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


def shelf(directory: Path, user: int = 0, run: str = NAMED) -> Shelf:
    return Shelf(directory, run, str(user))


def theta(directory: Path, user: int = 0, run: str = NAMED) -> Floats:
    return next(shelf(directory, user, run).saves()).vectors["theta"]


def files(directory: Path, user: int = 0) -> list[Path]:
    return sorted(shelf(directory, user).directory.glob("*.theta"))


def one_round(ppsgd: PPSGD, on: InProcessGrid, round_: int) -> list[Message]:
    return list(on.send_and_receive(ppsgd.configure_train(round_, w0(), ConfigRecord(), on)))


def order(round_: int, starts: tuple[int, ...] = (1,), training: int = 7) -> Order:
    return Order(round_, STEP, 1.0, "mean", True, training=training, starts=starts)


def told(message: Message) -> str:
    """What the server gets to know about an error."""
    return str(message.error.reason)


def test_theta_is_on_disk_as_it_is_in_the_node(tmp_path: Path) -> None:
    on = Nodes(tmp_path)
    strategy(checkpoint_dir=tmp_path / "server", average=True).start(on, w0(), num_rounds=3)
    kept = kept_by(on.context(on.get_node_ids()[2]))
    on.restart()
    again = kept_by(on.context(on.get_node_ids()[2]))
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
    directory = shelf(tmp_path).directory
    for folder in (directory, directory.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_folders_that_others_could_read_are_closed(tmp_path: Path) -> None:
    directory = shelf(tmp_path).directory
    directory.mkdir(mode=0o755, parents=True)
    new = tmp_path / "new" / "root"
    for root in (tmp_path, new):
        strategy().start(Nodes(root), w0(), num_rounds=1)
        for folder in (shelf(root).directory, shelf(root).directory.parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(new.stat().st_mode) == 0o700


def test_a_new_run_goes_on_with_theta_and_another_name_begins_anew(tmp_path: Path) -> None:
    strategy().start(Nodes(tmp_path), w0(), num_rounds=2)
    first = theta(tmp_path)
    strategy().start(Nodes(tmp_path, run_id=2), w0(), num_rounds=1)
    again = kept_by(Nodes(tmp_path).context(1_000_000))
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
    for late in (order(4, (1, 4)), order(6, (1,))):
        with pytest.raises(ValueError, match="comes too late and θ stays as it is"):
            step_from(context, late, lambda: np.zeros(SIZE))


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
    kept = kept_by(Nodes(tmp_path).context(1_000_000))
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


def test_where_every_file_is_damaged_theta_never_becomes_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ppsgd, on = strategy(), Nodes(tmp_path)
    ppsgd.start(on, w0(), num_rounds=3)
    on.restart()
    for path in files(tmp_path):
        _damage(path, "cut")
    for _ in range(2):
        replies = one_round(ppsgd, on, 4)
        assert [reply.has_error() for reply in replies] == [True, False, False, False, False]
        assert "theta-damaged: ValueError" in told(replies[0])
    assert caplog.text.count("restore one from a backup") == 2


def test_a_file_of_another_user_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ppsgd, on = strategy(), Nodes(tmp_path)
    ppsgd.start(on, w0(), num_rounds=2)
    on.restart()
    own, stranger = files(tmp_path, 0)[-1], files(tmp_path, 1)[-1]
    own.write_bytes(stranger.read_bytes())
    replies = one_round(ppsgd, on, 3)
    assert "theta-foreign: ValueError" in told(replies[0])
    assert "holds the θ of user '1' in run 'a run', not that of '0'" in caplog.text
    assert not any(reply.has_error() for reply in replies[1:])


@pytest.mark.parametrize("place", ["write", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_costs_the_round_and_leaves_theta(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
    number: int,
) -> None:
    ppsgd, on = strategy(), Nodes(tmp_path)
    ppsgd.start(on, w0(), num_rounds=2)
    before, state = theta(tmp_path), on.context(1_000_000).state.copy()
    noted = len(list(shelf(tmp_path).notes()))
    with monkeypatch.context() as patch:
        _break_disk(patch, place, number)
        replies = one_round(ppsgd, on, 3)
    assert all("disk: OSError" in told(reply) for reply in replies)
    assert "this round counts as zero" in caplog.text
    codes = [line["code"] for line in shelf(tmp_path).notes()]
    assert codes[noted:] == ["disk"], "the gradient that did not leave is not noted"
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
    with pytest.raises(ClientError, match=r"^learner-failed: RuntimeError$"):
        client_app(toy_learner, mods=[_raising])(message, context)
    assert not context.state
    assert not files(tmp_path)


def test_of_two_tasks_at_work_on_one_theta_the_second_drops_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    with pytest.raises(ClientError, match=r"^theta-busy: ValueError$"):
        client_app(toy_learner, mods=[overtaken])(message, context)
    assert not context.state
    assert [save.stamp["visit"] for save in shelf(tmp_path).saves()] == [1]
    assert [line["code"] for line in shelf(tmp_path).notes()] == ["", "theta-busy"]
    assert "this step is dropped" in caplog.text


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
    kept = kept_by(on.context(1_000_000))
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


def test_a_directory_needs_the_name_of_its_user(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"add {USER}, or partition-id"):
        Shelf.of(Context(1, 2, {STATE_DIR: str(tmp_path)}, RecordDict(), {}), 7)


@pytest.mark.parametrize("name", ["a", "..", "Ada L.", "x/../y", "ü%2F", ".", "+"])
def test_any_name_is_a_folder_of_its_own_inside_the_directory(tmp_path: Path, name: str) -> None:
    strategy(release=release(1)).start(Nodes(tmp_path / "s", nodes=1, run=name), w0(), num_rounds=1)
    (found,) = Shelf.all_in(tmp_path / "s")
    assert (found.run, found.user) == (name, "0")
    assert {path.name for path in tmp_path.iterdir()} == {"s"}


@pytest.mark.parametrize("name", ["ü" * 100, "x" * 5000, "a/b" * 99, "\x00\n\x1b[2J"])
def test_long_and_odd_names_of_users_are_folders_of_their_own(tmp_path: Path, name: str) -> None:
    def context(user: str) -> Context:
        node: dict[str, Any] = {"partition-id": 0, STATE_DIR: str(tmp_path), USER: user}
        return Context(1, 2, node, RecordDict(), {})

    for user in (name, name + "x"):
        for round_ in (1, 2):
            answer(context(user), order(round_))
    found = Shelf.all_in(tmp_path)
    assert sorted(shelf.user for shelf in found) == sorted([name, name + "x"])
    kept = kept_by(context(name))
    assert kept is not None
    assert kept.visit == 2
    assert "\x1b" not in client_report(tmp_path)


def test_a_name_that_cannot_be_written_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node: dict[str, Any] = {"partition-id": 0, STATE_DIR: str(tmp_path), USER: "a\udc80"}
    with pytest.raises(ClientError, match=r"^node-config: ValueError$"):
        answer(Context(1, 2, node, RecordDict(), {}), order(1))
    assert "choose another ppsgd-user" in caplog.text


def message(an_order: Order, kind: str = "train", w: ArrayRecord | None = None) -> Message:
    content = {"arrays": w or w0(), "ppsgd-order": ConfigRecord(an_order.to_flat())}
    return Message(RecordDict(content), 5, kind)  # type: ignore[arg-type]


def answer(context: Context, an_order: Order, kind: str = "train") -> Message:
    return client_app(toy_learner)(message(an_order, kind), context)


# --- the training's own θ


def test_a_node_without_a_directory_keeps_trainings_apart_too() -> None:
    on, both = (
        InProcessGrid(client_app(toy_learner), 1),
        [strategy(release=release(1)) for _ in "ab"],
    )
    for round_ in (1, 2, 3):
        for ppsgd in both:
            one_round(ppsgd, on, round_)
    kept = kept_by(on.context(1_000_000))
    assert kept is not None
    assert (kept.round, kept.visit) == (3, 3)


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_theta_of_another_model_is_refused_and_its_run_named(
    tmp_path: Path, on_disk: bool, caplog: pytest.LogCaptureFixture
) -> None:
    on = Nodes(tmp_path) if on_disk else InProcessGrid(client_app(toy_learner), 1, {RUN: NAMED})
    context = on.context(1_000_000)
    answer(context, order(1))
    for kind in ("train", "evaluate"):
        with pytest.raises(ClientError, match=r"^theta-foreign: ValueError$"):
            client_app(small_learner)(message(order(2), kind, w0(np.zeros(2))), context)
    assert "has 6 numbers and this learner's has 2: it belongs to another model" in caplog.text
    assert (f"run {NAMED!r} in {tmp_path}" if on_disk else "this node's state") in caplog.text


def small_learner(context: Context) -> Toy:
    return Toy(target(int(context.node_config["partition-id"]))[:2])


# --- damage


def test_damaged_saves_never_fall_back_to_the_theta_of_another_training(tmp_path: Path) -> None:
    on = Nodes(tmp_path, nodes=1)
    for training in (7, 8):
        for round_ in (1, 2):
            answer(on.context(1_000_000), order(round_, training=training))
    on.restart()
    for path in files(tmp_path)[2:]:
        _damage(path, "flipped")
    for training in (8, 9):
        for kind in ("train", "evaluate"):
            with pytest.raises(ClientError, match=r"^theta-damaged: ValueError$"):
                answer(on.context(1_000_000), order(3, training=training), kind)
    with pytest.raises(ValueError, match="no whole one of training 0000000000000008 is left"):
        kept_by(on.context(1_000_000))
    assert "no whole one of training 0000000000000008 is left" in client_report(tmp_path)
    answer(on.context(1_000_000), order(3, training=7))


@pytest.mark.fuzz
@given(st.integers(0, 10**6), st.binary(max_size=3), st.booleans())
@settings(max_examples=150, deadline=None)
def test_whatever_the_bytes_of_a_save_are_it_is_whole_or_set_aside(
    place: int, put: bytes, cut: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        own = Shelf(Path(directory), NAMED, "0")
        with own.writing():
            own.put(7, Personal(np.ones(3), 1).stamp(), {"theta": np.ones(3)}, seen=0, base=0)
        (path,) = own.directory.glob("*.theta")
        content = path.read_bytes()
        place %= len(content)
        rest = b"" if cut else content[place + len(put) :]
        changed = content[:place] + put + rest
        path.write_bytes(changed)
        saves = list(own.saves())
        assert len(saves) == (changed == content)
        assert len(own.damaged()) == (changed != content)


# --- rounds that come again


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("rate", [1, 2])
def test_redone_rounds_step_theta_once_for_every_number_that_checkpoints_allow(
    tmp_path: Path, every: int, on_disk: bool, rate: int
) -> None:
    """The server goes back k rounds, for every k up to 2·checkpoint_every; the user takes part in
    every round, or in every second one."""
    back, last = 2 * every, 20
    for k in range(1, back + 1):
        on = (
            Nodes(tmp_path / str(k), nodes=1)
            if on_disk
            else InProcessGrid(client_app(toy_learner), 1)
        )
        context = on.context(1_000_000)
        before = take_part(context, range(rate, last + 1, rate), (1,), back)
        again = take_part(context, range(last - k + 1, last + 1), (1, last - k + 1), back)
        kept = kept_by(context)
        assert kept is not None
        expected = [r for r in before if r <= last - k] + again
        assert kept.visit == len(expected)
        np.testing.assert_array_equal(kept.theta, replayed(expected))


def take_part(context: Context, rounds: range, starts: tuple[int, ...], back: int) -> list[int]:
    for round_ in rounds:
        answer(context, replace(order(round_, starts), back=back))
    return list(rounds)


def replayed(rounds: list[int]) -> Floats:
    """θ after these rounds, all at w = 0."""
    kept = np.zeros(SIZE)
    for _ in rounds:
        kept = kept - STEP * (kept - target(0))
    return kept


def test_only_the_saves_that_are_needed_are_kept(tmp_path: Path) -> None:
    """Of a user who takes part in every fifth round, far fewer than 2·checkpoint_every."""
    context = Nodes(tmp_path, nodes=1).context(1_000_000)
    take_part(context, range(5, 101, 5), (1,), back=20)
    assert [save.stamp["round"] for save in shelf(tmp_path).saves()] == [100, 95, 90, 85, 80]


# --- charges


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_server_that_forgot_charges_is_refused(
    tmp_path: Path, on_disk: bool, caplog: pytest.LogCaptureFixture
) -> None:
    on = Nodes(tmp_path, nodes=1) if on_disk else InProcessGrid(client_app(toy_learner), 1)
    context = on.context(1_000_000)
    answer(context, replace(order(5), charges=4))
    for kind in ("train", "evaluate"):
        with pytest.raises(ClientError, match=r"^refused-charges: ValueError$"):
            answer(context, replace(order(6), charges=3), kind)
    assert "charged 3 rounds of a training that had charged 4 before" in caplog.text
    answer(context, replace(order(4, (1, 4)), charges=6))  # w went back, the ledger did not
    with pytest.raises(ClientError, match=r"^refused-charges"):
        answer(context, replace(order(5, (1, 4)), charges=5))
    answer(context, replace(order(1, training=8), charges=0))


# --- two tasks on one θ


# --- what has left


def test_every_reply_is_noted_and_refusals_are_counted_by_code(tmp_path: Path) -> None:
    context = Nodes(tmp_path, nodes=1).context(1_000_000)
    answer(context, order(1))
    answer(context, order(1), "evaluate")
    with pytest.raises(ClientError):
        answer(context, order(0))
    for _ in range(2):
        with pytest.raises(ClientError):
            answer(context, replace(order(2), clip_norm=math.inf))
    with pytest.raises(ClientError):
        client_app(toy_learner)(Message(RecordDict({"arrays": w0()}), 5, "train"), context)
    lines = list(shelf(tmp_path).notes())
    assert [(line["kind"], line["code"]) for line in lines] == [
        ("train", ""),
        ("evaluate", ""),
        ("train", "too-late"),
        ("train", "refused-order"),
        ("train", "refused-order"),
        ("train", "refused-policy"),
    ]
    text = client_report(tmp_path)
    assert "evaluations answered: 1, outside the guarantee" in text
    assert "refused-order (2), refused-policy (1), too-late (1)" in text
    assert "6 replies in 1 Flower runs" in text


def test_a_torn_line_is_ended_before_the_next_one(tmp_path: Path) -> None:
    own = shelf(tmp_path)
    with own.writing():
        own.note({"bytes": {"a": 1}})
        path = own.directory / "sent.jsonl"
        path.write_bytes(path.read_bytes() + b'{"bytes": {"b"')
        own.note({"bytes": {"c": 1}})
    assert [line["bytes"] for line in own.notes()] == [{"a": 1}, {"c": 1}]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_control_characters_never_reach_the_report(tmp_path: Path) -> None:
    """Neither from a promise nor from the names of records."""
    own = shelf(tmp_path)
    with own.writing():
        own.note({"bytes": {"a\x1b[2Jb": 1}, "code": "\x07", "kind": "train"})
        own.put_shared({}, 1, "all is \x1b[32mwell\x1b[0m\r\nand safe")
    text = client_report(tmp_path)
    assert all(line.isprintable() for line in text.split("\n"))
    assert "all is �[32mwell" in text


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
    assert "Run 'a run', user '4'" in captured.out
    assert "elsewhere holds no θ of any run" in captured.err
    logging.getLogger("flwr").setLevel(logging.DEBUG)
