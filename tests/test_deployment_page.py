"""docs/deployment.md: its commands, in order, on a training that is lost and restored."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flwr_ppsgd import PPSGD
from tests.contract.command import ppsgd
from tests.contract.files import check_done
from tests.support.paths import ROOT
from tests.support.toy import grid, release, strategy, w0

PAGE = (ROOT / "docs" / "deployment.md").read_text("utf-8")
STATUS, BUDGET, BACKUP, RESTORE, ADD, NEW_KEY = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


def execute(block: str, place: Path, missing: int = 0) -> str:
    """A block of the page as an operator would paste it."""
    environment = {
        **os.environ,
        "DIR": str(place / "server"),
        "BACKUP": str(place / "backup"),
        "MISSING": str(missing),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = ["bash", "-euc", block]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=place
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(place: Path, rounds: int) -> PPSGD:
    training = strategy(release=release(z=1.0), checkpoint_dir=place / "server")
    training.start(grid(), w0(), num_rounds=rounds)
    return training


def test_a_training_that_is_lost_goes_on_from_its_backup_and_no_charge_is_forgotten(
    tmp_path: Path,
) -> None:
    """Backup after round 3, loss after round 5: rounds 4 and 5 are charged twice in the end."""
    train(tmp_path, 3)
    assert "rounds: 3 of 3 done" in execute(STATUS, tmp_path)
    execute(BACKUP, tmp_path)
    assert stat.S_IMODE((tmp_path / "backup").stat().st_mode) == 0o700
    train(tmp_path, 5)
    shutil.rmtree(tmp_path / "server")
    assert "MISSING: " in execute(RESTORE, tmp_path)
    with pytest.raises(ValueError, match=r"the record outside shows 5: charges were lost.*--add 2"):
        train(tmp_path, 6)
    assert "added by hand: 2 charges (restored the backup" in execute(ADD, tmp_path, missing=2)
    again = train(tmp_path, 6)
    assert again.rounds_done == 6
    assert again.ledger.rounds == 5 + 3


def test_a_budget_is_fixed_before_the_first_training(tmp_path: Path) -> None:
    execute(BUDGET, tmp_path)
    assert "epsilon = 4" in check_done(ppsgd("ledger", tmp_path / "server")).words


def test_a_new_key_of_the_training_is_made_and_shown(tmp_path: Path) -> None:
    train(tmp_path, 1)
    shutil.copytree(tmp_path / "server", tmp_path / "backup")
    before = key_of(tmp_path)
    execute(NEW_KEY, tmp_path)
    train(tmp_path, 2)
    assert key_of(tmp_path) != before


def key_of(place: Path) -> str:
    shown = check_done(ppsgd("ledger", place / "server")).words
    (key,) = re.findall(r"ppsgd-server-key = (\S+)", shown)
    return str(key)


def test_the_page_names_files_and_fields_that_exist(tmp_path: Path) -> None:
    for link in re.findall(r"\]\(\.\./([^)]+)\)", PAGE):
        assert (ROOT / link).exists(), link
    train(tmp_path, 1)
    shown = check_done(ppsgd("status", tmp_path / "server", "--json")).out
    watched = PAGE.partition("\n## Watch\n")[2].partition("\n## ")[0]
    for field in re.findall(r"^\| `([a-z_.]+)` \|", watched, re.MULTILINE):
        assert f'"{field.rpartition(".")[2]}"' in shown or field == "replies.zeros", field
