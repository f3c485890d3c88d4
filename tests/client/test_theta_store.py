"""θ on disk: complete or as before, whose it is, and each round once."""

import errno
import math
import os
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp.strategy import FedAvg

from flwr_ppsgd import PPSGD, Order, client_app, database
from flwr_ppsgd.client.app import PPSGDClient
from flwr_ppsgd.client.policy import STATE_DIR, USER
from flwr_ppsgd.client.refusal import ClientError
from flwr_ppsgd.client.report import client_report
from flwr_ppsgd.client.theta import RUN, Theta
from flwr_ppsgd.client.theta_store import NAME, DiskStore, users_in
from flwr_ppsgd.simulation import InProcessGrid
from tests.client.test_policy import message
from tests.support.kept import all_kept_in, kept_by
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


def first_context(directory: Path | None) -> Context:
    """Of a node with a state directory, or without one."""
    bare = InProcessGrid(client_app(toy_learner), 1, {RUN: NAMED})
    return (Nodes(directory) if directory else bare).context(1_000_000)


def saves(directory: Path, user: int = 0, run: str = NAMED) -> list[Theta]:
    return all_kept_in(directory, str(user), run)


def theta(directory: Path, user: int = 0, run: str = NAMED) -> Floats:
    return saves(directory, user, run)[0].theta


def files(directory: Path, user: int = 0) -> list[Path]:
    return sorted((directory / str(user)).glob("*.theta"))


def notes(directory: Path, user: int = 0) -> list[dict[str, Any]]:
    store = DiskStore(directory, str(user), read_only=True)
    found = store.notes()
    store.close()
    return found


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
    assert (again.stamp.round, again.stamp.visit) == (3, 3)


def test_files_are_private_and_as_many_as_are_needed(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir(mode=0o755)
    new = tmp_path / "new" / "root"
    for root in (tmp_path, new):
        strategy().start(Nodes(root), w0(), num_rounds=9)
        assert len(files(root)) == 3
        for path in (root / "0").iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert stat.S_IMODE((root / "0").stat().st_mode) == 0o700
    assert stat.S_IMODE(new.stat().st_mode) == 0o700


def test_a_new_run_goes_on_with_theta_and_another_name_begins_anew(tmp_path: Path) -> None:
    strategy().start(Nodes(tmp_path), w0(), num_rounds=2)
    first = theta(tmp_path)
    strategy().start(Nodes(tmp_path, run_id=2), w0(), num_rounds=1)
    again = kept_by(Nodes(tmp_path).context(1_000_000))
    assert again is not None
    assert (again.stamp.round, again.stamp.visit, again.stamp.since) == (1, 3, 2)
    np.testing.assert_allclose(again.theta, first - STEP * (first - target(0)), atol=1e-15)
    strategy().start(Nodes(tmp_path, run="other"), w0(), num_rounds=1)
    np.testing.assert_allclose(theta(tmp_path, run="other"), STEP * target(0), atol=1e-15)


@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "missing"])
def test_a_damaged_file_is_set_aside_and_the_one_before_goes_on(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy().start(Nodes(tmp_path), w0(), num_rounds=2)
    before = saves(tmp_path)[1].theta
    _damage(files(tmp_path)[-1], how)
    kept = kept_by(Nodes(tmp_path).context(1_000_000))
    assert kept is not None
    np.testing.assert_array_equal(kept.theta, before)
    assert "θ goes on from the save before" in caplog.text
    assert client_report(tmp_path).count("damaged: θ of round 2") == 1


def _damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
        return
    flipped = bytearray(content)
    flipped[-5] ^= 1
    path.write_bytes({"cut": content[:-8], "empty": b"", "flipped": bytes(flipped)}[how])


def test_a_store_of_another_user_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ppsgd, on = strategy(), Nodes(tmp_path)
    ppsgd.start(on, w0(), num_rounds=2)
    on.restart()
    (tmp_path / "0").rename(tmp_path / "away")
    (tmp_path / "1").rename(tmp_path / "0")
    replies = one_round(ppsgd, on, 3)
    assert "theta-damaged: ValueError" in told(replies[0])
    assert "is damaged, or another user's" in caplog.text
    assert not any(reply.has_error() for reply in replies[2:])


CHANGES = {
    "fact": "UPDATE fact SET value = value || ' '",
    "agreement": "UPDATE fact SET value = value || ' ' WHERE name != 'account'",
    "array": "UPDATE array SET about = about || ' '",
    "sent": "UPDATE sent SET line = line || ' '",
}


@pytest.mark.parametrize("part", [*CHANGES, "page"])
def test_a_changed_row_is_refused_or_shown(tmp_path: Path, part: str) -> None:
    """What was agreed, what is kept and what it cost: nothing is answered on a damaged store."""
    on = Nodes(tmp_path, nodes=1)
    ppsgd = strategy(release=release(1))
    ppsgd.start(on, w0(), num_rounds=2)
    on.restart()
    path = tmp_path / "0" / NAME
    if part == "page":
        content = path.read_bytes()
        path.write_bytes(content[:4096] + bytes(4096) + content[8192:])
    else:
        with sqlite3.connect(path) as file:
            assert file.execute(CHANGES[part]).rowcount
        file.close()
    (reply,) = one_round(ppsgd, on, 3)
    assert reply.has_error() == (part != "sent")
    if part != "sent":
        assert "theta-damaged" in told(reply)
    assert "is damaged" in client_report(tmp_path)


@pytest.mark.parametrize("place", ["write_file", "fsync"])
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
    noted = len(notes(tmp_path))

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(database if place == "write_file" else os, place, fail)
        replies = one_round(ppsgd, on, 3)
    assert all("disk: ValueError" in told(reply) for reply in replies)
    assert "this round counts as zero" in caplog.text
    codes = [line["code"] for line in notes(tmp_path)]
    assert codes[noted:] == ["disk"], "the gradient that did not leave is not noted"
    np.testing.assert_array_equal(theta(tmp_path), before)
    assert on.context(1_000_000).state == state
    assert not list(tmp_path.rglob("*.partial"))
    assert not any(reply.has_error() for reply in one_round(ppsgd, on, 3))


def _raising(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    call_next(message, context)
    raise RuntimeError("a mod that fails")


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_mod_that_raises_after_the_step_leaves_theta_as_before(
    tmp_path: Path, on_disk: bool
) -> None:
    """As in a deployment, where Flower keeps the state of a client that raised."""
    context = first_context(tmp_path if on_disk else None)
    with pytest.raises(ClientError, match=r"^learner-failed: RuntimeError$"):
        client_app(toy_learner, mods=[_raising])(message(order(1)), context)
    assert not context.state
    assert not files(tmp_path)


def test_of_two_tasks_at_work_on_one_theta_the_second_drops_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def overtaken(asked: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(asked, context)
        client_app(toy_learner)(asked, Nodes(tmp_path).context(1_000_000))
        return reply

    context = Nodes(tmp_path).context(1_000_000)
    with pytest.raises(ClientError, match=r"^theta-busy: ValueError$"):
        client_app(toy_learner, mods=[overtaken])(message(order(1)), context)
    assert not context.state
    assert [save.stamp.visit for save in saves(tmp_path)] == [1]
    assert [line["code"] for line in notes(tmp_path)] == ["", "theta-busy"]
    assert "this step is dropped" in caplog.text


def test_a_stock_strategy_counts_visits_on_disk_and_leaves_theta(tmp_path: Path) -> None:
    on = Nodes(tmp_path, client_app(toy_learner, local_step=0.1))
    strategy().start(on, w0(), num_rounds=2)
    before = theta(tmp_path)
    on.restart()
    FedAvg().start(on, w0(), num_rounds=3)
    np.testing.assert_array_equal(theta(tmp_path), before)
    assert saves(tmp_path)[0].stamp.visit == 5
    assert "bytes of arrays" in client_report(tmp_path)


def legacy_fit(context: Context, round_: int, starts: tuple[int, ...] = (1,)) -> None:
    asked = order(round_, starts).to_flat()
    PPSGDClient(toy_learner(context), context).fit([np.zeros(SIZE)], asked)


def test_the_legacy_client_keeps_theta_on_disk_too(tmp_path: Path) -> None:
    on = Nodes(tmp_path)
    legacy_fit(on.context(1_000_000), 1)
    on.restart()
    legacy_fit(on.context(1_000_000), 2)
    after = theta(tmp_path)
    legacy_fit(on.context(1_000_000), 2, (1, 2))
    np.testing.assert_array_equal(theta(tmp_path), after)


@pytest.mark.parametrize("name", ["a", "..", "Ada L.", "x/../y", "ü%2F", "ü" * 30, "\x00\x1b[2J"])
def test_any_name_of_a_user_or_run_has_a_place_of_its_own(tmp_path: Path, name: str) -> None:
    def context(user: str) -> Context:
        node: dict[str, Any] = {"partition-id": 0, STATE_DIR: str(tmp_path / "s"), USER: user}
        return Context(1, 2, node, RecordDict(), {RUN: name})

    for user in (name, name + "x"):
        for round_ in (1, 2):
            answer(context(user), order(round_))
    users = users_in(tmp_path / "s")
    assert sorted(users) == sorted([name, name + "x"])
    assert DiskStore(tmp_path / "s", name, read_only=True).runs() == [name]
    kept = kept_by(context(name))
    assert kept is not None
    assert kept.stamp.visit == 2
    assert "\x1b" not in client_report(tmp_path / "s")
    assert {path.name for path in tmp_path.iterdir()} == {"s"}


@pytest.mark.parametrize("name", ["a\udc80", "ü" * 100])
def test_a_name_that_cannot_be_written_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    node: dict[str, Any] = {"partition-id": 0, STATE_DIR: str(tmp_path), USER: name}
    with pytest.raises(ClientError, match=r"^node-config: ValueError$"):
        answer(Context(1, 2, node, RecordDict(), {}), order(1))
    assert "choose another ppsgd-user" in caplog.text


def answer(context: Context, an_order: Order, kind: str = "train") -> Message:
    return client_app(toy_learner)(message(an_order, kind), context)


# --- the training's own θ


def test_a_node_without_a_directory_keeps_trainings_apart_too() -> None:
    on = InProcessGrid(client_app(toy_learner), 1)
    both = [strategy(release=release(1)) for _ in "ab"]
    for round_ in (1, 2, 3):
        for ppsgd in both:
            one_round(ppsgd, on, round_)
    kept = kept_by(on.context(1_000_000))
    assert kept is not None
    assert (kept.stamp.round, kept.stamp.visit) == (3, 3)


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_theta_of_another_model_is_refused_and_its_run_named(
    tmp_path: Path, on_disk: bool, caplog: pytest.LogCaptureFixture
) -> None:
    context = first_context(tmp_path if on_disk else None)
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
    assert "no whole one of training 0000000000000008 is left" in client_report(tmp_path)
    answer(on.context(1_000_000), order(3, training=7))


def test_only_the_saves_that_are_needed_are_kept(tmp_path: Path) -> None:
    """Of a user who takes part in every fifth round, far fewer than 2·checkpoint_every."""
    context = Nodes(tmp_path, nodes=1).context(1_000_000)
    for round_ in range(5, 101, 5):
        answer(context, replace(order(round_), back=20))
    assert [save.stamp.round for save in saves(tmp_path)] == [100, 95, 90, 85, 80]


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
        client_app(toy_learner)(message(None), context)
    lines = notes(tmp_path)
    assert [line["kind"] for line in lines] == ["train", "evaluate", *4 * ["train"]]
    refusals = ["too-late", "refused-order", "refused-order", "refused-policy"]
    assert [line["code"] for line in lines] == ["", "", *refusals]
    text = client_report(tmp_path)
    assert "evaluations answered: 1, outside the guarantee" in text
    assert "refused-order (2), refused-policy (1), too-late (1)" in text
    assert "6 replies in 1 Flower runs" in text
