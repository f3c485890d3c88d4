"""Each command of ``ppsgd``: what it shows, and status 0 only if the work was done."""

import json
import os
import re
import secrets
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message

from flwr_ppsgd import (
    PPSGD,
    AdditiveLinear,
    Minibatches,
    Poisson,
    Release,
    Steps,
    calibrate_noise,
    client_app,
)
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract.command import heed_ctrl_c, ppsgd
from tests.contract.files import SCRIPT, TOML, check_done, check_refused, privacy_of

COMMANDS = (
    *("experiments", "look", "run", "sweep", "plot", "predict", "report", "audit", "plan"),
    *("ledger", "status", "budget", "client-report", "check-node"),
)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(TOML)
    return tmp_path


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_is_shown_without_any_work(command: tuple[str, ...], tmp_path: Path) -> None:
    ended = check_done(ppsgd(*command, "--help", where=tmp_path))
    assert ended.words.startswith("Usage: ")
    if not command:
        assert all(name in ended.out for name in COMMANDS)
    assert not list(tmp_path.iterdir())


def test_the_experiments_that_ship_are_listed_by_name(tmp_path: Path) -> None:
    lines = check_done(ppsgd("experiments", where=tmp_path)).out.splitlines()
    names = {line.split()[0] for line in lines}
    assert names >= {"synthetic", "sweep", "figure-1a", "figure-1b", "figure-1c", "figure-1d"}
    assert "figure-2" in names
    for line in lines:
        assert re.search(r"(Takes|Estimated:) about \d+ (s|minutes|hours) of CPU", line), line


def test_a_plan_costs_what_it_says(tmp_path: Path) -> None:
    """N, ε, δ and d are enough: noise and rounds that meet ε, in words or for a program."""
    asked = ("--population", "500", "--epsilon", "2", "--delta", "1e-5", "--dimension", "20")
    planned = json.loads(check_done(ppsgd("plan", *asked, "--json", where=tmp_path)).out)
    assert planned["epsilon"] <= 2
    assert planned["epsilon"] == pytest.approx(2, rel=1e-3)
    rounds = planned["rounds"]
    least = calibrate_noise(epsilon=2.0, delta=1e-5, cohort=Poisson(500, 1.0), rounds=rounds)
    assert planned["noise_multiplier"] >= least * (1 - 1e-6)
    words = check_done(ppsgd("plan", *asked, where=tmp_path)).words
    assert f"{rounds} rounds" in words
    assert "500" in words


def test_a_plan_asks_for_what_it_needs(tmp_path: Path) -> None:
    ended = ppsgd("plan", "--population", "500", where=tmp_path)
    assert ended.status == 2
    assert "--epsilon" in ended.err
    assert "--delta" in ended.err


AUDIT = ("audit", "small.toml", "--set", "population=100", "--set", "noise-multiplier=1.0")


def test_the_audit_finds_that_the_mechanism_keeps_its_word(here: Path) -> None:
    ended = check_done(ppsgd(*AUDIT, where=here))
    assert "Verdict: conforms" in ended.words


def test_the_audit_convicts_noise_that_repeats_itself(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose source of secret bytes is broken, and gives the same ones for ever."""
    monkeypatch.setattr(os, "urandom", lambda count: b"x" * count)
    monkeypatch.setattr(secrets, "token_bytes", lambda count=32: b"x" * count)
    ended = ppsgd(*AUDIT, where=here)
    assert ended.status == 1
    assert "Verdict: convicted" in ended.words
    assert "noise repeats itself" in ended.words
    assert len(ended.err.splitlines()) == 1


def test_there_is_nothing_to_audit_without_noise(here: Path) -> None:
    check_refused(ppsgd("audit", "small.toml", "--set", "noise-multiplier=0", where=here), "noise")


def test_ledger_and_status_show_what_a_training_has_charged(here: Path) -> None:
    run = ("run", "small.toml", "--set", "checkpoint-dir=kept", "--out", "out")
    check_done(ppsgd(*run, where=here))
    shown = check_done(ppsgd("ledger", "kept", where=here)).words
    spent = privacy_of(here / "out")["epsilon"]
    assert float(epsilon_in(shown)) == pytest.approx(spent, rel=1e-3)
    assert "2" in shown
    status = json.loads(check_done(ppsgd("status", "kept", "--json", where=here)).out)
    assert status["rounds"] == {"done": 2, "planned": 2}
    assert status["charges"] == {"made": 2, "missing": 0}
    assert status["epsilon"]["spent"] == pytest.approx(spent)
    assert "2 of 2" in check_done(ppsgd("status", "kept", where=here)).words


def test_the_ledger_is_a_line_for_each_charge_and_can_be_backed_up(here: Path) -> None:
    """Also while the training runs: the copy is a training of its own."""
    run = ("run", "small.toml", "--set", "checkpoint-dir=kept", "--out", "out")
    check_done(ppsgd(*run, where=here))
    copied = check_done(ppsgd("ledger", "kept", "--backup", "copy/training.sqlite", where=here))
    for shown in (copied.out, check_done(ppsgd("ledger", "copy", where=here)).out):
        lines = [line.strip() for line in shown.splitlines()]
        charges = [line for line in lines if line.startswith("charge ")]
        assert [line.split(",")[0] for line in charges] == [
            "charge 1: round 1",
            "charge 2: round 2",
        ]
    again = ppsgd("ledger", "kept", "--backup", "copy/training.sqlite", where=here)
    check_refused(again, "copy/training.sqlite", "exists")


def epsilon_in(shown: str) -> str:
    found = re.search(r"spent: epsilon = ([\d.]+) \(zero-out\)", shown)
    assert found, shown
    return found[1]


def test_a_budget_is_fixed_once_and_shown(tmp_path: Path) -> None:
    budget = ("budget", "all", "--epsilon", "2", "--delta", "1e-5")
    assert "epsilon = 2" in check_done(ppsgd(*budget, where=tmp_path)).words
    assert "epsilon = 2" in check_done(ppsgd("ledger", "all", where=tmp_path)).words
    check_refused(ppsgd(*budget[:3], "8", *budget[4:], where=tmp_path), "all")


def test_a_report_is_one_page_that_needs_no_other_file(here: Path) -> None:
    check_done(ppsgd("run", "small.toml", "--out", "out", where=here))
    ended = check_done(ppsgd("report", "out", where=here))
    (name,) = re.findall(r"\S+\.html", ended.out)
    page = (here / name).read_text(encoding="utf-8")
    assert "joint differential privacy" in page
    assert all(source.startswith("data:") for source in re.findall(r'src="([^"]+)"', page))
    assert "<link" not in page


def learner_of(context: Context) -> AdditiveLinear:
    user = int(context.node_config["partition-id"])
    draw = np.random.default_rng(user)
    x = draw.normal(size=(8, 3))
    return AdditiveLinear(Minibatches(x, x @ np.ones(3), 4, seed=0, user=user), 3)


def test_a_client_sees_what_left_its_machine(tmp_path: Path) -> None:
    """The strategy is asked for 3 rounds: 3 vectors left, under the ε that was promised."""
    app = client_app(learner_of)

    def with_state(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 0:
            context.node_config["ppsgd-state-dir"] = str(tmp_path / "state")
        return app(message, context)

    release = Release(Poisson(4, 1.0), clip_norm=1.0, noise_multiplier=5.0)
    strategy = PPSGD(release=release, steps=Steps(0.1, 0.1), delta=1e-3)
    grid = InProcessGrid(with_state, 4)  # type: ignore[arg-type]
    strategy.start(grid, ArrayRecord([np.zeros(3)]), num_rounds=3)
    shown = check_done(ppsgd("client-report", "state", where=tmp_path)).words
    assert f"{strategy.ledger.epsilon():.3f}"[:4] in shown
    assert "3" in shown


def test_a_run_that_a_budget_does_not_pay_for_has_not_succeeded(here: Path) -> None:
    ended = ppsgd("run", "small.toml", "--set", "max-epsilon=.001", "--out", "out", where=here)
    assert ended.status == 1
    assert len(ended.err.splitlines()) == 1
    assert "max-epsilon" in ended.err


def test_a_run_that_is_interrupted_is_kept_and_costs_what_was_planned(here: Path) -> None:
    """The charge is for all planned rounds: that somebody stops may depend on what they saw."""
    many = ("--rounds", "100000", "--set", "evaluate-every=0", "--set", "checkpoint-dir=kept")
    process = subprocess.Popen(
        [SCRIPT, "run", "small.toml", *many, "--set", "noise-multiplier=1000.0", "--out", "out"],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=heed_ctrl_c,  # noqa: PLW1509
    )
    while not rounds_done(here) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    privacy = privacy_of(here / "out")
    assert privacy["rounds_trained"] < privacy["rounds_stated"] == 100_000
    assert "100000" in shown


def rounds_done(here: Path) -> int:
    """As ``ppsgd status`` sees it from outside."""
    ended = ppsgd("status", "kept", "--json", where=here)
    return int(json.loads(ended.out)["rounds"]["done"]) if ended.status == 0 else 0


MISTAKES = [
    (("tran",), ("tran",)),
    (("run", "--colour"), ("--colour",)),
    (("run", "small.toml", "--rounds", "many"), ("--rounds", "many")),
    (("run", "small.toml", "--rounds", "0"), ("rounds", "0")),
    (("run", "small.toml", "--set", "clip-norm"), ("clip-norm", "KEY=VALUE")),
    (("run", "no-such-experiment"), ("no-such-experiment",)),
    (("run", "small.toml", "--engine", "ray"), ("--engine", "ray", "process")),
    (("run", "small.toml", "--set", "clip-norm=-1"), ("clip-norm", "-1")),
    (("run", "small.toml", "--set", "noise-multiplier=nan"), ("noise-multiplier", "nan")),
    (("plot",), ("DIRECTORY",)),
    (("report", "missing"), ("missing",)),
    (("ledger", "missing"), ("missing",)),
    (("status", "missing"), ("missing",)),
    (("client-report", "missing"), ("missing",)),
    (("predict", "missing", "--data", "small.toml"), ("missing",)),
    (("audit", "missing.toml"), ("missing.toml",)),
    (("plan", "--populaton", "3"), ("--populaton", "--population")),
]


@pytest.mark.parametrize(
    ("typed", "named"), MISTAKES, ids=[" ".join(typed) for typed, _ in MISTAKES]
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    typed: tuple[str, ...], named: tuple[str, ...], here: Path
) -> None:
    check_refused(ppsgd(*typed, where=here), *named)
    assert [path.name for path in here.iterdir()] == ["small.toml"]
