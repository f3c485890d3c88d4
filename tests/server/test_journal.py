"""What was released is on the disk before it is released, and is never forgotten."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays

from flwr_ppsgd import PPSGD, Poisson, Release, Steps
from flwr_ppsgd.arrays import bytes_of
from flwr_ppsgd.noise import GridSum
from flwr_ppsgd.server import record
from flwr_ppsgd.server.checkpoint import Checkpoint, load, save
from flwr_ppsgd.server.journal import NAME, Journal
from flwr_ppsgd.server.legacy_api import PPSGDStrategy
from tests.server.test_legacy_api import legacy, manager
from tests.support.paths import ROOT
from tests.support.toy import SIZE, flat, grid, release, strategy, w0

NOISY = release(z=3.0)


def training(directory: Path, **changes: Any) -> PPSGD:
    return strategy(**{"release": NOISY, "checkpoint_dir": directory, **changes})


def run(directory: Path, rounds: int, **changes: Any) -> tuple[PPSGD, ArrayRecord]:
    ppsgd = training(directory, **changes)
    arrays = ppsgd.start(grid(), w0(), num_rounds=rounds).arrays
    ppsgd.close()
    return ppsgd, arrays


def test_a_journal_restores_the_ledger(tmp_path: Path) -> None:
    journal = Journal(tmp_path, NOISY, 1e-4)
    for round_ in range(1, 8):
        journal.charge(round_, insecure=round_ == 3)
    journal.close()
    again = Journal(tmp_path, NOISY, 1e-4)
    assert again.ledger.releases == ((NOISY, 7),)
    assert again.ledger.insecure_rounds == 1


def test_two_trainings_cannot_spend_one_budget(tmp_path: Path) -> None:
    training(tmp_path)
    with pytest.raises(ValueError, match="in use by another training"):
        training(tmp_path)


def test_a_training_waits_for_the_one_before_to_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a SuperLink was killed, its ServerApp still holds the lock for some seconds."""
    monkeypatch.setattr("flwr_ppsgd.server.journal.PATIENCE", 20.0)
    before = training(tmp_path)
    timer = threading.Timer(0.3, before.close)
    timer.start()
    training(tmp_path).close()
    timer.join()


def damage(path: Path, how: str) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    changed = {
        "a line changed": [lines[0], lines[1].replace(b"a", b"b", 1), *lines[2:]],
        "a line lost": [*lines[:2], *lines[3:]],
        "lines swapped": [lines[0], lines[2], lines[1], *lines[3:]],
        "zeros at the end": [*lines, b"\0" * 20 + b"\n"],
        "the settings gone": lines[1:],
    }[how]
    path.write_bytes(b"".join(changed))


@pytest.mark.parametrize(
    "how",
    [
        "a line changed",
        "a line lost",
        "lines swapped",
        "zeros at the end",
        "the settings gone",
    ],
)
def test_a_damaged_journal_is_refused_and_left_as_it_is(tmp_path: Path, how: str) -> None:
    run(tmp_path, 4)
    damage(tmp_path / NAME, how)
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(ValueError, match=r"damaged at line \d.*ppsgd ledger .* --add N"):
        training(tmp_path)
    assert (tmp_path / NAME).read_bytes() == before


def test_charges_lost_at_the_end_of_the_journal_show_against_w(tmp_path: Path) -> None:
    run(tmp_path, 4)
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / NAME).write_bytes(b"".join(lines[:-2]))
    shutil.rmtree(record.home())
    with pytest.raises(ValueError, match=r"shows 2 rounds but w has had 4: .* --add 2"):
        training(tmp_path)


def test_a_training_goes_on_where_it_was(tmp_path: Path) -> None:
    """3 + 4 rounds are 7 rounds: the same w as without the interruption, absolute rounds, all
    charged."""
    run(tmp_path / "a", 3, insecure_seed=9)
    ppsgd = training(tmp_path / "a", insecure_seed=9)
    seen: list[int] = []
    nodes = grid()
    resumed = ppsgd.start(nodes, w0(), num_rounds=7, on_round=lambda round_, _: seen.append(round_))
    assert seen == [3, 4, 5, 6, 7]
    assert list(resumed.train_metrics_clientapp) == [4, 5, 6, 7]
    assert ppsgd.ledger.rounds == 7
    assert ppsgd.ledger.insecure_rounds == 7


def test_w_and_its_average_survive_to_the_last_bit(tmp_path: Path) -> None:
    """θ lives on the nodes, so the same grid is used before and after."""
    nodes, whole = grid(), grid()
    first = training(tmp_path, insecure_seed=9, average=True)
    first.start(nodes, w0(), num_rounds=3)
    first.close()
    second = training(tmp_path, insecure_seed=9, average=True)
    resumed = second.start(nodes, w0(), num_rounds=6)
    straight = strategy(release=NOISY, insecure_seed=9, average=True).start(
        whole, w0(), num_rounds=6
    )
    np.testing.assert_array_equal(flat(resumed.arrays), flat(straight.arrays))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"release": release(z=2.0)}, "noise_multiplier was 3.0 and is 2.0"),
        ({"release": release(z=3.0, clip_norm=2.0)}, "clip_norm was 1.0 and is 2.0"),
        ({"release": release(z=3.0, rate=0.5)}, "cohort was .*1.0.* and is .*0.5"),
        ({"delta": 1e-6}, "delta was 0.0001 and is 1e-06"),
    ],
)
def test_other_privacy_settings_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], names: str
) -> None:
    run(tmp_path, 2)
    with pytest.raises(ValueError, match=names):
        training(tmp_path, **changes)


def test_another_model_is_refused(tmp_path: Path) -> None:
    run(tmp_path, 2)
    with pytest.raises(ValueError, match="continue with the same model"):
        training(tmp_path).start(grid(), w0(np.zeros(3)), num_rounds=4)


def test_a_damaged_w_falls_back_and_the_ledger_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 5)
    newest = sorted(tmp_path.glob("*.checkpoint"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1] + b"\0")
    ppsgd = training(tmp_path)
    assert "w falls back to the one before, the ledger does not" in caplog.text
    assert (ppsgd.rounds_done, ppsgd.ledger.rounds) == (4, 5)
    ppsgd.start(grid(), w0(), num_rounds=5)
    assert ppsgd.ledger.rounds == 6, "round 5 was released twice and is charged twice"


def test_without_any_whole_w_the_training_is_not_continued(tmp_path: Path) -> None:
    run(tmp_path, 3)
    for path in tmp_path.glob("*.checkpoint"):
        path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"no checkpoint of w in .* is whole"):
        training(tmp_path)


def test_the_budget_counts_over_restarts(tmp_path: Path) -> None:
    budget = {"max_epsilon": 3.0}
    affordable = training(tmp_path / "x", **budget).affordable_rounds or 0
    assert affordable > 3
    run(tmp_path / "y", 3, **budget)
    ppsgd, _ = run(tmp_path / "y", 1000, **budget)
    assert ppsgd.ledger.rounds == ppsgd.rounds_done == affordable


def test_no_key_or_seed_and_nobodys_name_is_stored(tmp_path: Path) -> None:
    nodes = grid()
    ppsgd = training(tmp_path, insecure_seed=123456789)
    ppsgd.start(nodes, w0(), num_rounds=3)
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"123456789" not in content
    for node in nodes.get_node_ids():
        assert str(node).encode() not in content


def test_checkpoints_every_few_rounds_and_a_journal_in_each(tmp_path: Path) -> None:
    ppsgd = training(tmp_path, checkpoint_every=4)

    def stop(round_: int, _: object) -> None:
        if round_ == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ppsgd.start(grid(), w0(), num_rounds=50, on_round=stop)
    ppsgd.close()
    again = training(tmp_path)
    assert (again.rounds_done, again.ledger.rounds) == (8, 10)


def test_a_stop_by_looking_still_states_the_first_plan_after_a_restart(tmp_path: Path) -> None:
    first = training(tmp_path)

    def stop(round_: int, _: object) -> None:
        if round_ == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.start(grid(), w0(), num_rounds=40, on_round=stop)
    first.close()
    second, _ = run(tmp_path, 5)
    assert second.ledger.rounds == 5
    assert second.privacy_data()["rounds_stated"] == 40


def test_the_stated_epsilon_stays_within_the_budget_when_a_round_is_redone(tmp_path: Path) -> None:
    budget = {"max_epsilon": 3.0}
    first = training(tmp_path, **budget)
    planned = first._curator.plan(1000)
    first.configure_train(1, w0(), ConfigRecord(), grid())
    first._curator._charge(1)  # killed right after the charge
    first.close()
    again, _ = run(tmp_path, 1000, **budget)
    assert again.ledger.rounds == planned
    assert again.rounds_done == planned - 1
    assert again.privacy_data()["epsilon"] <= 3.0  # type: ignore[operator]


def test_evaluation_is_remembered_over_restarts(tmp_path: Path) -> None:
    run(tmp_path, 2, evaluate_every=1)
    again, _ = run(tmp_path, 3)
    assert again.privacy_data()["evaluation_on_client_data"] is True


def test_a_change_from_local_learning_is_not_taken_for_lost_charges(tmp_path: Path) -> None:
    run(tmp_path, 5, steps=Steps.from_ratio(0.5, 0.0))
    again, _ = run(tmp_path, 8)
    assert (again.rounds_done, again.ledger.rounds) == (8, 3)


def test_the_lock_is_given_up_where_a_training_cannot_be_continued(tmp_path: Path) -> None:
    run(tmp_path, 3)
    damaged = sorted(tmp_path.glob("*.checkpoint"))
    contents = [path.read_bytes() for path in damaged]
    for path in damaged:
        path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is whole"):
        training(tmp_path)
    for path, content in zip(damaged, contents, strict=True):
        path.write_bytes(content)
    assert training(tmp_path).rounds_done == 3


def test_a_full_disk_stops_before_anything_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ppsgd = training(tmp_path)
    ppsgd.start(grid(), w0(), num_rounds=2)
    monkeypatch.setattr(os, "write", lambda *_: 3)
    released: list[int] = []
    monkeypatch.setattr("flwr_ppsgd.optimizers.descend", lambda *_: released.append(1))
    with pytest.raises(OSError, match="nothing was released"):
        ppsgd.start(grid(), w0(), num_rounds=4)
    assert not released


def test_the_charge_is_on_disk_before_noise_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[int] = []

    def noisy(self: Any, coins: Any) -> Any:
        lines.append(len((tmp_path / NAME).read_text().splitlines()))
        return original(self, coins)

    original = GridSum.noisy
    monkeypatch.setattr(GridSum, "noisy", noisy)
    run(tmp_path, 3)
    assert lines == [4, 5, 6], "the settings, the plan, the start, then one line for each round"


def test_the_journal_is_synced_before_the_record_and_that_before_noise_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A charge in the page cache alone would be lost with the machine; the release would not."""
    events: list[str] = []
    ppsgd = training(tmp_path)
    journal, fsync, noisy, write = (
        ppsgd._curator._journal,
        os.fsync,
        GridSum.noisy,
        record.Record.write,
    )
    assert journal is not None

    def synced(descriptor: int) -> None:
        if descriptor == journal._chain._file:
            events.append("journal")
        fsync(descriptor)

    def recorded(self: Any, charges: int) -> None:
        write(self, charges)
        events.append(f"record {charges}")

    def released(self: Any, coins: Any) -> Any:
        events.append("release")
        return noisy(self, coins)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(record.Record, "write", recorded)
    monkeypatch.setattr(GridSum, "noisy", released)
    ppsgd.start(grid(), w0(), num_rounds=2)
    plan_and_start = ["journal", "journal"]
    first = ["journal", "record 1", "release"]
    second = ["journal", "record 2", "release"]
    assert events == plan_and_start + first + second


CHILD = """
import sys, pathlib
import numpy as np
from flwr.app import ArrayRecord
from flwr_ppsgd import client_app
from tests.support.toy import Toy, grid, strategy, release, w0
app = client_app(lambda _: Toy(np.ones(20_000)))
directory, released = pathlib.Path(sys.argv[1]), open(sys.argv[2], "a", buffering=1)
ppsgd = strategy(release=release(z=3.0), checkpoint_dir=directory)
aggregate = ppsgd.aggregate_train
def watched(round_, replies):
    arrays, metrics = aggregate(round_, replies)
    released.write(f"{round_}\\n")   # from here on the world knows this w
    return arrays, metrics
ppsgd.aggregate_train = watched
ppsgd.start(grid(5, app), w0(np.zeros(20_000)), num_rounds=100_000)
"""


def test_killed_at_any_moment_the_ledger_never_shows_less_than_was_released(tmp_path: Path) -> None:
    """kill -9, again and again; every restart continues, and every release was charged."""
    script, released = tmp_path / "child.py", tmp_path / "released"
    script.write_text(CHILD)
    released.touch()
    root = ROOT
    for attempt in range(6):
        command = [sys.executable, str(script), str(tmp_path / "run"), str(released)]
        child = subprocess.Popen(
            command,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            stderr=subprocess.DEVNULL,
        )
        already = len(released.read_text().splitlines())
        deadline = time.monotonic() + 60
        while len(released.read_text().splitlines()) < already + 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.Random(attempt).random() / 20)
        child.send_signal(signal.SIGKILL)
        child.wait()
        journal = Journal(tmp_path / "run", NOISY, 1e-4)
        rounds = [int(line) for line in released.read_text().splitlines()]
        assert len(rounds) >= already + 3
        assert len(rounds) <= journal.ledger.rounds <= len(rounds) + attempt + 1
        found = load(tmp_path / "run")
        assert found is not None
        assert found.round >= max(rounds) - 1, "no round is lost but the one in flight"
        journal.close()


def test_a_checkpoint_survives_its_bytes(tmp_path: Path) -> None:
    checkpoint = Checkpoint(7, {"a": b"\n\n\0bytes", "b": b""}, 9, np.arange(5.0))
    save(tmp_path, checkpoint)
    again = load(tmp_path)
    assert again is not None
    assert (again.round, again.arrays, again.charged) == (7, checkpoint.arrays, 9)
    np.testing.assert_array_equal(np.asarray(again.iterates), np.arange(5.0))
    content = b"".join(checkpoint.to_parts())
    for damaged in (
        content[:-1],
        b"",
        content.replace(b"bytes", b"bites"),
    ):
        with pytest.raises(ValueError, match="checksum"):
            Checkpoint.from_bytes(damaged)


def test_only_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    run(tmp_path, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        NAME,
        "reserve",
        "server-private.jsonl",
        "training.key",
        "w-00000005.checkpoint",
        "w-00000006.checkpoint",
    ]
    assert json.loads((tmp_path / NAME).read_text().splitlines()[0].split("\t")[0])["delta"] == 1e-4


def drive(ppsgd: PPSGDStrategy, rounds: int) -> Any:
    """The legacy loop, which always counts from 1."""
    clients, parameters = manager(), ppsgd.initialize_parameters(manager())
    for round_ in range(1, rounds + 1):
        ppsgd.configure_fit(round_, parameters, clients)
        parameters, _ = ppsgd.aggregate_fit(round_, [], [])
    return parameters_to_ndarrays(parameters)[0]


def test_the_legacy_api_goes_on_too(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"release": NOISY, "insecure_seed": 2}
    first = legacy(**settings, checkpoint_dir=tmp_path)
    drive(first, first.remaining_rounds(3))
    first.close()
    second = legacy(**settings, checkpoint_dir=tmp_path)
    assert second.remaining_rounds(7) == 4
    resumed = drive(second, 4)
    np.testing.assert_array_equal(resumed, drive(legacy(**settings), 7))
    assert second.ledger.rounds == 7


def test_the_legacy_api_refuses_another_model(tmp_path: Path) -> None:
    first = legacy(release=NOISY, checkpoint_dir=tmp_path)
    drive(first, 2)
    first.close()
    with pytest.raises(ValueError, match="continue with the same model"):
        legacy(
            release=NOISY,
            checkpoint_dir=tmp_path,
            initial_parameters=ndarrays_to_parameters([np.zeros(SIZE + 1)]),
        )


def test_a_capped_cohort_is_part_of_the_settings(tmp_path: Path) -> None:
    capped = Release(Poisson(5, 0.5, cap=3), 1.0, 3.0)
    run(tmp_path, 2, release=capped)
    with pytest.raises(ValueError, match="cohort was"):
        training(tmp_path, release=Release(Poisson(5, 0.5), 1.0, 3.0))
    assert training(tmp_path, release=capped, steps=Steps(0.5, 0.5)).ledger.rounds == 2


def test_start_gives_the_lock_up_when_it_ends(tmp_path: Path) -> None:
    """A second strategy in the same process does not wait; conftest allows no waiting at all."""
    first = training(tmp_path)
    first.start(grid(), w0(), num_rounds=2)
    second = training(tmp_path)
    second.start(grid(), w0(), num_rounds=3)
    result = first.start(grid(), w0(), num_rounds=4)
    assert list(result.train_metrics_clientapp) == [4], "it goes on after what the second has done"
    assert first.ledger.rounds == 4


def test_start_gives_the_lock_up_when_it_fails(tmp_path: Path) -> None:
    def stop(round_: int, _: object) -> None:
        if round_ == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training(tmp_path).start(grid(), w0(), num_rounds=5, on_round=stop)
    with pytest.raises(ValueError, match="continue with the same model"):
        training(tmp_path).start(grid(), w0(np.zeros(3)), num_rounds=5)
    assert training(tmp_path).ledger.rounds == 2


def test_a_second_start_goes_on_from_the_disk_as_a_restart_does(tmp_path: Path) -> None:
    """w of round 6 was not saved: the second call redoes rounds 5 and 6, and charges them again."""
    ppsgd = training(tmp_path, checkpoint_every=4, average=True, insecure_seed=3)

    def stop(round_: int, _: object) -> None:
        if round_ == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ppsgd.start(grid(), w0(), num_rounds=8, on_round=stop)
    assert ppsgd.rounds_done == 6
    saved = load(tmp_path)
    assert saved is not None
    seen: list[dict[str, bytes]] = []
    ppsgd.start(
        grid(), w0(), num_rounds=8, on_round=lambda _, result: seen.append(bytes_of(result.arrays))
    )
    assert (saved.round, saved.arrays) == (4, seen[0])
    assert (ppsgd.rounds_done, ppsgd.ledger.rounds) == (8, 10)
    assert ppsgd._curator.starts() == (1, 5)
    found = load(tmp_path)
    assert found is not None
    np.testing.assert_array_equal(np.asarray(found.iterates), ppsgd._curator._iterates)


def test_a_second_start_does_not_forget_what_the_first_has_released(tmp_path: Path) -> None:
    ppsgd = training(tmp_path)
    ppsgd.start(grid(), w0(), num_rounds=2)
    shutil.rmtree(tmp_path)
    with pytest.raises(ValueError, match="shows 0 rounds but this process has made 2"):
        ppsgd.start(grid(), w0(), num_rounds=4)
    assert ppsgd.ledger.rounds == 2


def test_a_journal_that_cannot_be_opened_again_is_one_line(tmp_path: Path) -> None:
    ppsgd = training(tmp_path / "run")
    ppsgd.start(grid(), w0(), num_rounds=1)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").touch()
    with pytest.raises(OSError, match=r"cannot be opened again.*nothing was sent") as caught:
        ppsgd.start(grid(), w0(), num_rounds=2)
    assert "\n" not in str(caught.value)


def test_the_legacy_strategy_gives_the_lock_up_after_the_last_round(tmp_path: Path) -> None:
    first = legacy(release=NOISY, checkpoint_dir=tmp_path)
    rounds = first.remaining_rounds(2)
    drive(first, rounds)
    first.configure_evaluate(rounds, first.initialize_parameters(manager()), manager())
    second = legacy(release=NOISY, checkpoint_dir=tmp_path)
    assert second.remaining_rounds(3) == 1
