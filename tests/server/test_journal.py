"""What was released is on the disk before it is released, and is never forgotten."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays

from flwr_ppsgd import PPSGD, Poisson, Release, Steps
from flwr_ppsgd.server import record
from flwr_ppsgd.server.checkpoint import Checkpoint, load, save
from flwr_ppsgd.server.journal import NAME, Journal
from flwr_ppsgd.server.legacy_api import PPSGDStrategy
from tests.server.test_legacy_api import legacy, manager
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
