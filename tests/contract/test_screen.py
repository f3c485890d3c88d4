"""What a run shows: a dozen lines, no condition left out, and no ε without its guarantee."""

import os
import pty
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.contract import files
from tests.contract.command import Ended, ppsgd
from tests.contract.files import BUDGET, SCRIPT, TOML, check_done, ppsgd_alone, privacy_of

MOST_LINES = 12


def write_inputs(directory: Path) -> None:
    files.write_csv(directory / "people.csv", files.people())
    (directory / "small.toml").write_text(TOML)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    return tmp_path


RUNS = {
    "own data": ("--data", "people.csv", *BUDGET),
    "the paper's method": ("--data", "people.csv", "--set", "step=.05", *BUDGET),
    "an experiment": ("small.toml",),
}


@pytest.fixture(scope="module", params=RUNS)
def default_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Ended, dict[str, Any]]:
    """What a run without options showed, and its privacy.json."""
    here = tmp_path_factory.mktemp("run")
    write_inputs(here)
    ended = check_done(ppsgd("run", *RUNS[request.param], "--out", "out", where=here))
    return ended, privacy_of(here / "out")


def test_a_default_run_is_a_dozen_lines_and_nothing_on_the_side(here: Path) -> None:
    """File, privacy, result and what to do next; the progress bar is for terminals alone."""
    ended = check_done(ppsgd_alone("run", "--data", "people.csv", *BUDGET, where=here))
    assert len(ended.out.splitlines()) <= MOST_LINES, ended.out
    assert ended.err == ""
    assert not re.search(r"[\x1b\r]", ended.out)
    assert "" not in ended.out.splitlines()
    assert len(re.findall(r"\d+/\d+ rounds", ended.out)) == 1
    for part in ("people.csv", "12 users", "regression", "ε = 8", "δ = 0.001", "personal"):
        assert part in ended.out
    assert "(not private)" in ended.out
    assert "ppsgd predict runs/people" in ended.out
    (picture,) = re.findall(r"\S+\.png", ended.out)
    assert (here / picture).exists()


def test_on_a_terminal_there_is_a_progress_bar(here: Path) -> None:
    shown = on_a_terminal("run", "small.toml", where=here)
    assert "━" in shown
    assert "2/2 rounds" in shown


def on_a_terminal(*arguments: str, where: Path) -> str:
    """All that a command writes to a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    process = subprocess.Popen(
        [SCRIPT, *arguments], cwd=where, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:  # Linux says so when the other end is closed
        pass
    os.close(ours)
    assert process.wait(timeout=600) == 0, shown
    return shown.decode()


def conditions(privacy: dict[str, Any]) -> list[str]:
    """What the promise depends on and what it does not cover, each in short: up to a colon."""
    found = [
        *privacy["caveats"],
        *privacy["conditional_on"],
        *privacy["outside_the_guarantee"],
    ]
    return [text.partition(":")[0] for text in found]


def test_every_condition_of_the_promise_is_on_the_screen(
    default_run: tuple[Ended, dict[str, Any]],
) -> None:
    ended, privacy = default_run
    shown = conditions(privacy)
    assert len(shown) >= 7
    for condition in shown:
        assert condition in ended.words
    assert privacy["guarantee"] in ended.words
    assert f"δ = {privacy['delta']:g}" in ended.words
    assert near(privacy["epsilon"], re.findall(r"ε = ([\d.]+)", ended.words))
    exchanged = re.findall(r"([\d.]+) if data are exchanged", ended.words)
    assert near(privacy["epsilon_replace_one"], exchanged)
    assert privacy["evaluation_on_client_data"]
    assert "(not private)" in ended.words


def near(number: float, shown: list[str]) -> bool:
    """Whether it is shown, rounded up and never down."""
    return any(number <= float(text) * (1 + 1e-9) <= number * 1.01 for text in shown)


def test_a_caveat_of_the_promise_is_on_the_screen(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of charges that cannot be written: a store put back would not show."""
    monkeypatch.setenv("PPSGD_STATE_HOME", "/dev/null/nowhere")
    kept = ("--set", "checkpoint-dir=kept")
    ended = check_done(ppsgd("run", "small.toml", *kept, "--out", "out", where=here))
    caveats = privacy_of(here / "out")["caveats"]
    assert caveats
    for caveat in caveats:
        assert caveat.partition(":")[0] in ended.words


def test_the_whole_statement_is_in_the_file_and_shown_on_request(here: Path) -> None:
    ended = check_done(ppsgd("run", "small.toml", "--verbose", "--out", "out", where=here))
    statement = privacy_of(here / "out")["statement"]
    assert "learns no more about your data than" in statement
    for line in statement.splitlines():
        assert " ".join(line.split()) in ended.words


def test_the_default_engine_gives_the_guarantee(
    default_run: tuple[Ended, dict[str, Any]],
) -> None:
    _, privacy = default_run
    assert privacy["guarantee"] == "user-level joint differential privacy"
    assert privacy["insecure_rounds"] == 0
    assert "noise" not in privacy  # that of a simulation is named there


@pytest.mark.parametrize(
    "arguments", [RUNS["own data"], (*RUNS["the paper's method"], "--verbose")]
)
def test_without_a_guarantee_every_line_with_an_epsilon_says_so(
    arguments: tuple[str, ...], here: Path
) -> None:
    """The cohort engine has to be asked for by name."""
    cohort = ("--engine", "cohort", "--out", "out")
    ended = check_done(ppsgd("run", *arguments, *cohort, where=here))
    privacy = privacy_of(here / "out")
    assert (privacy["guarantee"], privacy["epsilon"]) == ("none", "infinite")
    shown = [line for line in ended.out.splitlines() if re.search(r"(ε|epsilon) *[=≤]", line)]
    assert ended.err == ""
    assert shown
    for line in shown:
        assert "NO GUARANTEE" in line, line
    assert files.measured(here / "out")["epsilon"] == "infinite"


def test_a_run_that_learns_nothing_says_so_and_what_to_do(here: Path) -> None:
    """A step of a millionth leaves w at 0, far from amounts of about 50."""
    table = [{**row, "y": row["y"] / 100 + 50} for row in files.people()]
    files.write_csv(here / "far.csv", table)
    tiny = ("--set", "step=1e-6", "--set", "scale=none", "--rounds", "2")
    ended = check_done(ppsgd("run", "--data", "far.csv", *tiny, *BUDGET, where=here))
    assert "does not beat an answer without features" in ended.words
    assert "ppsgd look" in ended.words


def test_the_own_data_page_trains_with_the_guarantee() -> None:
    page = Path(__file__).parents[2] / "docs" / "own-data.md"
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^ppsgd run .*$", text, re.MULTILINE)
    assert commands
    for line in commands:
        assert "--engine" not in line
        assert "insecure-seed" not in line
