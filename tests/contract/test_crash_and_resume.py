"""Whatever happens to the server or its disk, the ledger never shows less than was published."""

import contextlib
import errno
import json
import logging
import math
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.client import Client
from flwr.clientapp import ClientApp

from flwr_ppsgd import Order, Poisson, Release, Steps, client_app
from flwr_ppsgd.legacy import PPSGDClient
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract import killed
from tests.contract.command import ppsgd
from tests.contract.hostile_clients import legacy_strategy, published_by
from tests.contract.targets import (
    NOISY,
    SIZE,
    USERS,
    Floats,
    Target,
    flat,
    learner_for,
    nodes,
    run_legacy,
    strategy,
    train,
    zeros,
)

ROOT = Path(__file__).parents[2]
Event = dict[str, Any]


def process(what: str, directory: Path, stdin: int | None = None) -> subprocess.Popen[bytes]:
    """A process of ``killed``, which says what happens."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.contract.killed", what, str(directory)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def events_of(what: str, directory: Path) -> list[Event]:
    """What it has said, to its end."""
    running = process(what, directory)
    said, _ = running.communicate()
    assert running.returncode == 0
    return [json.loads(line) for line in said.splitlines()]


# Crashes.


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """A training that was killed at random moments, and what each next server found."""
    return events_of("kills", tmp_path_factory.mktemp("killed"))


def test_killed_at_any_moment_the_ledger_has_every_published_w(crashes: list[Event]) -> None:
    """And at most one too many for each kill."""
    published = 0
    kills = 0
    for event in crashes:
        published += event["event"] == "published"
        kills += event["event"] == "killed"
        if event["event"] == "found":
            assert published <= event["ledger"] <= published + kills
    assert kills == killed.KILLS
    assert published >= kills / 2
    assert not [event for event in crashes if event["event"] == "error"]


def test_after_a_kill_no_more_than_the_round_in_flight_is_lost(crashes: list[Event]) -> None:
    last = 0
    for event in crashes:
        if event["event"] == "published":
            last = event["round"]
        if event["event"] == "found":
            assert last - 1 <= event["rounds_done"] <= last + 1
            last = event["rounds_done"]  # it may have died before it said so


def test_a_training_goes_on_with_the_w_that_was_published_last(crashes: list[Event]) -> None:
    seen: dict[int, str] = {}
    compared = 0
    for event in crashes:
        if event["event"] == "published":
            seen[event["round"]] = event["w"]
        if event["event"] == "resumed" and event["round"] in seen:
            assert event["w"] == seen[event["round"]]
            compared += 1
    assert compared > 0


def test_rounds_are_absolute_after_a_restart(tmp_path: Path) -> None:
    train(tmp_path, 3)
    again = strategy(checkpoint_dir=tmp_path)
    assert again.ledger.rounds == 3
    seen: list[int] = []
    evaluated: list[int] = []
    result = again.start(
        nodes(),
        zeros(),
        num_rounds=7,
        evaluate_fn=lambda round_, _: evaluated.append(round_),
        on_round=lambda round_, _: seen.append(round_),
    )
    assert seen == evaluated == [3, 4, 5, 6, 7]
    assert list(result.train_metrics_clientapp) == [4, 5, 6, 7]
    assert again.ledger.rounds == again.rounds_done == 7


def end_at_three(how: type[BaseException] | None) -> dict[str, Any]:
    """``should_stop`` or ``on_round`` that ends a training after its third round."""

    def fail(round_: int, _: object) -> None:
        if how is not None and round_ == 3:
            raise how

    if how is None:
        return {"should_stop": lambda round_, _: round_ == 3}
    return {"on_round": fail}


@pytest.mark.parametrize("how", [None, KeyboardInterrupt, RuntimeError])
def test_a_run_that_ends_between_two_checkpoints_loses_no_round(
    how: type[BaseException] | None, tmp_path: Path
) -> None:
    """Unless its process is killed: no round is charged again."""
    grid = nodes()
    settings: dict[str, Any] = {
        "checkpoint_dir": tmp_path,
        "checkpoint_every": 10,
        "insecure_seed": 9,
    }
    with contextlib.suppress(KeyboardInterrupt, RuntimeError):
        strategy(**settings).start(grid, zeros(), num_rounds=6, **end_at_three(how))
    again = strategy(**settings)
    assert again.rounds_done == again.ledger.rounds == 3
    w = flat(again.start(grid, zeros(), num_rounds=6).arrays)
    assert again.ledger.rounds == 6
    np.testing.assert_array_equal(w, train_seeded("message", nodes(), 6, None))


def legacy_client(context: Context) -> Client:
    return PPSGDClient(learner_for(context), context).to_client()


def train_seeded(api: str, grid: InProcessGrid, rounds: int, directory: Path | None) -> Floats:
    """w after this number of rounds in all, each of which is charged once."""
    settings: dict[str, Any] = {"checkpoint_dir": directory, "insecure_seed": 9}
    if api == "message":
        ppsgd = strategy(**settings)
        w = flat(ppsgd.start(grid, zeros(), num_rounds=rounds).arrays)
        assert ppsgd.ledger.rounds == rounds
        return w
    legacy = legacy_strategy(release=NOISY, **settings)
    published = published_by(legacy)
    run_legacy(legacy, grid, legacy.server_config(rounds))
    legacy.close()
    assert legacy.ledger.rounds == rounds
    return flat(ArrayRecord(published[-1:]))


@pytest.mark.parametrize("api", ["message", "legacy"])
def test_a_training_in_two_parts_has_the_w_of_one_in_one_part(api: str, tmp_path: Path) -> None:
    """θ lives on the nodes, so the same grid is used before and after."""
    app = client_app(learner_for) if api == "message" else ClientApp(client_fn=legacy_client)
    grid = InProcessGrid(app, USERS)
    train_seeded(api, grid, 3, tmp_path)
    w = train_seeded(api, grid, 6, tmp_path)
    np.testing.assert_array_equal(w, train_seeded(api, InProcessGrid(app, USERS), 6, None))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"release": Release(Poisson(USERS, 1.0), 1.0, 2.0)}, "noise_multiplier"),
        ({"release": Release(Poisson(USERS, 1.0), 2.0, 3.0)}, "clip_norm"),
        ({"release": Release(Poisson(USERS, 0.5), 1.0, 3.0)}, "cohort"),
        ({"delta": 1e-6}, "delta"),
    ],
)
def test_other_privacy_settings_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    train(tmp_path, 2)
    with pytest.raises(ValueError, match=name) as refused:
        strategy(**{"checkpoint_dir": tmp_path, **changes})
    assert "\n" not in str(refused.value)
    assert strategy(checkpoint_dir=tmp_path, steps=Steps(0.1, 0.1)).ledger.rounds == 2


def test_another_model_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 2)
    other = strategy(checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="model"):
        other.start(nodes(), ArrayRecord([np.zeros(SIZE + 1)]), num_rounds=4)
    assert other.ledger.rounds == 2


def test_insecure_rounds_are_marked_for_ever(tmp_path: Path) -> None:
    train(tmp_path, 1, insecure_seed=3)
    again = train(tmp_path, 2)
    assert again.privacy_data()["guarantee"] == "none"


# A backup that was restored.


def test_a_restored_backup_is_refused_until_its_charges_are_added(tmp_path: Path) -> None:
    """A whole directory as it was five published rounds ago."""
    place = tmp_path / "server"
    train(place, 3)
    shutil.copytree(place, tmp_path / "backup")
    train(place, 8)
    put_back(tmp_path / "backup", place)
    with pytest.raises(ValueError, match=rf"ppsgd ledger {place} --add 5") as refused:
        strategy(checkpoint_dir=place)
    assert "\n" not in str(refused.value)
    assert ppsgd("ledger", place).status == 0
    added = ppsgd("ledger", place, "--add", 5, "--reason", "a backup was restored")
    assert added.status == 0
    again = strategy(checkpoint_dir=place)
    assert again.ledger.rounds == 8
    again.start(nodes(), zeros(), num_rounds=4)
    assert (again.rounds_done, again.ledger.rounds) == (4, 9)


def elsewhere(place: Path) -> None:
    """The files of another training, in place of these."""
    train(place.with_name("other"), 9)
    put_back(place.with_name("other"), place)


def emptied(place: Path) -> None:
    for path in place.iterdir():
        path.write_bytes(b"")


@pytest.mark.parametrize("change", [shutil.rmtree, elsewhere, emptied])
def test_a_training_that_was_removed_or_replaced_is_not_begun_anew(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """The record outside knows its charges; the error says what to do, each time again."""
    place = tmp_path / "server"
    train(place, 4)
    change(place)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"4 charges.*use another directory") as refused:
            strategy(checkpoint_dir=place)
        assert "\n" not in str(refused.value)


class Counted(Target):
    """It counts how often anybody takes a gradient."""

    taken: ClassVar[int] = 0

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:
        Counted.taken += 1
        return super().gradients(w, theta, order)


def test_clients_refuse_a_server_whose_whole_machine_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot takes the record of charges back too; devices remember more, at every start."""
    machine = tmp_path / "machine"
    monkeypatch.setenv("PPSGD_STATE_HOME", str(machine / "record"))
    grid = InProcessGrid(client_app(lambda _: Counted(np.ones(SIZE))), USERS)

    def go_on(rounds: int) -> None:
        strategy(checkpoint_dir=machine / "server").start(grid, zeros(), num_rounds=rounds)

    go_on(3)
    shutil.copytree(machine, tmp_path / "snapshot")
    go_on(8)
    put_back(tmp_path / "snapshot", machine)
    Counted.taken = 0
    for _ in range(2):
        with pytest.raises(RuntimeError, match="each client that was asked gave an error"):
            go_on(8)
    assert Counted.taken == 0


def put_back(copy: Path, place: Path) -> None:
    shutil.rmtree(place)
    shutil.copytree(copy, place)


# Two processes.


def test_a_second_process_is_refused_and_may_read(tmp_path: Path) -> None:
    child = process("hold", tmp_path, stdin=subprocess.PIPE)
    assert child.stdout is not None
    try:
        said = [json.loads(child.stdout.readline())["event"] for _ in range(2)]
        assert said == ["resumed", "published"]
        with pytest.raises(ValueError, match="in use by another") as refused:
            strategy(checkpoint_dir=tmp_path / "server")
        assert "\n" not in str(refused.value)
        shown = ppsgd("ledger", tmp_path / "server")
        assert shown.status == 0
    finally:
        child.communicate(b"go on\n")
    assert child.returncode == 0
    assert strategy(checkpoint_dir=tmp_path / "server").ledger.rounds == 1


def test_a_second_training_in_one_process_is_refused_too(tmp_path: Path) -> None:
    first = strategy(checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="in use by another"):
        strategy(checkpoint_dir=tmp_path)
    first.close()
    strategy(checkpoint_dir=tmp_path).close()


def test_a_forked_child_charges_nothing_and_writes_nothing(tmp_path: Path) -> None:
    server = strategy(checkpoint_dir=tmp_path, checkpoint_every=10)
    grid = nodes()
    replies = []
    for round_ in (1, 2):
        messages = server.configure_train(round_, zeros(), ConfigRecord(), grid)
        replies = list(grid.send_and_receive(messages))
        if round_ == 1:
            server.aggregate_train(1, replies)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    child = os.fork()
    if not child:  # pragma: no cover - measured in the parent only
        refused = False
        try:
            server.aggregate_train(2, replies)
        except ValueError:
            refused = True
        with contextlib.suppress(ValueError):
            server.close()
        os._exit(not refused)
    assert os.waitpid(child, 0)[1] == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    server.aggregate_train(2, replies)
    server.close()
    assert strategy(checkpoint_dir=tmp_path).rounds_done == 2


@pytest.mark.parametrize("error", [None, OSError(errno.ENOLCK, "No locks available")])
def test_a_disk_where_locks_do_not_hold_is_refused(
    error: OSError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network disks grant every lock, others none."""

    def flock(*_: Any) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ValueError, match="use a directory on a local disk") as refused:
        strategy(checkpoint_dir=tmp_path)
    assert "\n" not in str(refused.value)


def test_a_directory_in_which_others_may_write_gets_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        strategy(checkpoint_dir=tmp_path)
    assert f"Others can write in {tmp_path}" in caplog.text


def test_a_link_in_the_directory_is_never_followed(tmp_path: Path) -> None:
    """Whoever may write there could have another file of the owner overwritten."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    place = tmp_path / "server"
    train(place, 2)
    names = [path.name for path in place.iterdir()]
    for name in names:
        for suffix in ("", ".partial"):
            shutil.rmtree(place)
            place.mkdir()
            (place / f"{name}{suffix}").symlink_to(victim)
            with contextlib.suppress(ValueError, OSError):
                train(place, 2)
            assert victim.read_bytes() == b"mine", name


# A full disk.


def test_where_files_cannot_grow_nothing_is_published_that_is_not_charged(tmp_path: Path) -> None:
    """Files of at most 0, 50, … bytes; afterwards there is room, and the training goes on."""
    published = 0
    errors = 0
    for event in events_of("limits", tmp_path):
        match event["event"]:
            case "limit":
                published = 0
            case "published":
                published += 1
            case "error":
                errors += 1
                assert "\n" not in event["text"]
            case "found":
                assert published <= event["ledger"] <= published + 1
    assert errors >= 3
    assert published == 6


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of so many KiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}k", "none", str(mounted)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here: that takes CAP_SYS_ADMIN")
    yield mounted
    subprocess.run(["umount", "--lazy", str(mounted)], check=True)  # whatever is still open


@pytest.mark.parametrize("small_disk", [40, 120, 260, 330, 420, 510, 800], indirect=True)
def test_a_round_is_sent_only_if_there_is_room_for_its_w(small_disk: Path) -> None:
    """On disks that hold none, one or two w of 160 kB, at every start: nothing is charged that is
    not kept."""
    place = small_disk / "server"
    grid = InProcessGrid(client_app(lambda _: Counted(np.ones(killed.LARGE))), USERS)
    for _ in range(2):
        Counted.taken = 0
        full = strategy()
        with contextlib.suppress(OSError, ValueError):
            full = strategy(checkpoint_dir=place)
            full.start(grid, ArrayRecord([np.zeros(killed.LARGE)]), num_rounds=4)
        assert full.ledger.rounds == full.rounds_done
        full.close()
    if full.rounds_done:
        again = strategy(checkpoint_dir=place)
        again.close()
        assert again.ledger.rounds == again.rounds_done == full.rounds_done


def test_a_w_whose_charge_cannot_be_written_is_nowhere_on_the_disk(tmp_path: Path) -> None:
    """The store is exchanged while clients answer, and SQLite then refuses to write."""
    place = tmp_path / "server"
    train(place, 2)
    names: list[set[str]] = []

    class Exchanging(Target):
        def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:
            (store,) = place.glob("*.sqlite")
            shutil.copyfile(store, tmp_path / "copy").replace(store)
            names.append({path.name for path in place.iterdir()})
            return super().gradients(w, theta, order)

    grid = InProcessGrid(client_app(lambda _: Exchanging(np.ones(SIZE))), USERS)
    ppsgd = strategy(checkpoint_dir=place)
    with pytest.raises(ValueError, match="cannot be used"):
        ppsgd.start(grid, zeros(), num_rounds=3)
    assert {path.name for path in place.iterdir()} <= names[0]
    assert ppsgd.ledger.rounds == 2


# Damage, whatever the files are.


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]


def damaged(content: bytes) -> Iterator[bytes]:
    """Cut at both ends and in the middle; a bit flipped here and there."""
    for kept in (0, 1, len(content) // 2, len(content) - 1):
        yield content[:kept]
    dice = random.Random(len(content))
    for _ in range(8):
        yield flipped(content, dice.randrange(len(content)))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A training of four rounds in ``server`` and its record outside; ``whole`` is a copy."""
    place = tmp_path / "machine"
    monkeypatch.setenv("PPSGD_STATE_HOME", str(place / "record"))
    train(place / "server", 4)
    shutil.copytree(place, tmp_path / "whole")
    return place


def files_of(machine: Path) -> list[Path]:
    whole = machine.with_name("whole")
    return [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]


def refusal(machine: Path) -> str:
    """Why the training is not continued; if it is, all its charges are there, and one more."""
    try:
        again = strategy(checkpoint_dir=machine / "server")
        found = again.ledger.rounds
        again.start(nodes(), zeros(), num_rounds=5)
    except (ValueError, OSError) as refused:
        return str(refused)
    assert found >= 4
    assert again.ledger.rounds > found
    return ""


def test_no_damaged_file_hides_a_charge(machine: Path) -> None:
    """One file after the other, of the record outside too: the training is refused in one line, or
    shows all its charges and goes on."""
    refusals = []
    for file in files_of(machine):
        content = (machine.with_name("whole") / file).read_bytes()
        for changed in damaged(content) if content else ():
            put_back(machine.with_name("whole"), machine)
            (machine / file).write_bytes(changed)
            refusals.append(refusal(machine))
    assert "" in refusals
    assert any(refusals)
    assert not [text for text in refusals if "\n" in text]


def test_no_lost_file_hides_a_charge(machine: Path) -> None:
    for file in files_of(machine):
        put_back(machine.with_name("whole"), machine)
        (machine / file).unlink()
        assert "\n" not in refusal(machine)


@pytest.fixture
def unsaved(machine: Path) -> Path:
    """A server that died after four charges, before its first checkpoint of w, and no record
    outside: nothing else helps."""
    whole = machine.with_name("whole")
    shutil.rmtree(machine)
    killed_later = strategy(checkpoint_dir=machine / "server", checkpoint_every=100)

    def die(round_: int, _: object) -> None:
        if round_ == 4:
            put_back(machine, whole)  # what is on the disk now is all that will be
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed_later.start(nodes(), zeros(), num_rounds=50, on_round=die)
    assert killed_later.ledger.rounds == 4
    shutil.rmtree(whole / "record")
    put_back(whole, machine)
    return machine


def charges_shown(machine: Path) -> float:
    """How many charges the next server finds; infinity if it refuses to go on."""
    try:
        again = strategy(checkpoint_dir=machine / "server")
    except (ValueError, OSError):
        return math.inf
    again.close()
    return again.ledger.rounds


def changed(content: bytes) -> Iterator[bytes]:
    """Bits flipped here and there; and each part but the last taken out, where there are lines."""
    dice = random.Random(len(content))
    for _ in range(30):
        yield flipped(content, dice.randrange(len(content)))
    lines = content.splitlines(keepends=True)
    for place in range(min(len(lines) - 1, 20)):
        yield b"".join(lines[:place] + lines[place + 1 :])


def test_no_change_hides_a_charge_even_if_nothing_outside_helps(unsaved: Path) -> None:
    for file in files_of(unsaved):
        content = (unsaved.with_name("whole") / file).read_bytes()
        for bytes_ in changed(content) if content else ():
            put_back(unsaved.with_name("whole"), unsaved)
            (unsaved / file).write_bytes(bytes_)
            assert charges_shown(unsaved) >= 4


def edited(file: Path) -> Iterator[bytes]:
    """The file after one row was removed, or a text in it was changed, by SQLite's own tools.

    That the last rows were cut off only the record outside can tell.
    """
    whole = file.read_bytes()
    with contextlib.closing(sqlite3.connect(file)) as rows:
        edits = []
        for (table,) in rows.execute("SELECT name FROM sqlite_master WHERE type = 'table'"):
            columns = [column for _, column, *_ in rows.execute(f"PRAGMA table_info({table})")]
            found = rows.execute(f"SELECT rowid, * FROM {table}").fetchall()
            edits += [(f"DELETE FROM {table} WHERE rowid = ?", each[:1]) for each in found[:-1]]
            for row, *values in found:
                for column, value in zip(columns, values, strict=True):
                    edit = f"UPDATE {table} SET {column} = ? WHERE rowid = ?"
                    if isinstance(value, str):
                        other_digits = value.translate(str.maketrans("0123456789", "9876543210"))
                        edits += [(edit, (text, row)) for text in (value.upper(), other_digits)]
    for edit, about in edits:
        file.write_bytes(whole)
        with contextlib.closing(sqlite3.connect(file)) as rows, rows:
            rows.execute(edit, about)
        yield file.read_bytes()


def test_no_edited_row_hides_a_charge_or_makes_it_cheaper(unsaved: Path) -> None:
    (file,) = (unsaved / "server").glob("*.sqlite")
    honest = strategy().ledger.record(NOISY, 4).epsilon()
    refused = 0
    for content in edited(unsaved.with_name("whole") / "server" / file.name):
        shutil.rmtree(unsaved)
        (unsaved / "server").mkdir(parents=True)
        file.write_bytes(content)
        try:
            again = strategy(checkpoint_dir=unsaved / "server")
        except ValueError:
            refused += 1
            continue
        again.close()
        assert again.ledger.rounds >= 4
        assert again.ledger.epsilon() >= honest
    assert refused >= 4


def test_the_directories_of_a_training_are_its_owners_alone(tmp_path: Path) -> None:
    train(tmp_path / "new" / "server", 2)
    for path in [tmp_path / "new", *(tmp_path / "new").rglob("*")]:
        assert not path.is_dir() or path.stat().st_mode & 0o077 == 0, path


def test_no_seed_and_nobodys_id_is_stored(tmp_path: Path) -> None:
    grid = nodes()
    seeded = strategy(checkpoint_dir=tmp_path, insecure_seed=123456789)
    seeded.start(grid, zeros(), num_rounds=3)
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"123456789" not in stored
    for node in grid.get_node_ids():
        assert str(node).encode() not in stored
