"""The ``ppsgd`` command: what it writes, what it prints, and how it refuses."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

from flwr_ppsgd import cli
from flwr_ppsgd.lab import commands
from flwr_ppsgd.lab.experiment import experiment_keys
from tests.support.loaded import loaded_by

TOML = """
population = 4
features = 6
rate = 1.0
clip-norm = 10.0
noise-multiplier = 10.0
delta = 1e-4
step = 0.5
alpha-q = 0.3
rounds = 2
evaluate-every = 1
"""


class Ended(NamedTuple):
    status: int
    out: str  # rich breaks lines at the width of the terminal: here they are one
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def ppsgd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """The command's own entry point, run in an empty directory with ``small.toml`` in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(TOML)
    level = logging.getLogger("flwr").level

    def call(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["ppsgd", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return Ended(int(exit_.value.code or 0), " ".join(captured.out.split()), captured.err)

    yield call
    logging.getLogger("flwr").setLevel(level)


def test_the_installed_command_shows_its_version() -> None:
    command = Path(sys.executable).with_name("ppsgd")
    shown = subprocess.run(
        [command, "--version"], capture_output=True, text=True, timeout=600, check=True
    )
    assert shown.stdout == f"flwr_ppsgd {version('flwr-ppsgd')}\n"


BAD_SETTINGS = [  # setting, the value as it is named, the rule or remedy
    ("alpha-q=nan", "nan", "0 is local learning, inf is global learning"),
    ("alpha-q=-1", "-1.0", "0 is local learning, inf is global learning"),
    ("alpha-q=much", "'much'", "of type float"),
    ("rate=0", "0.0", "the chance to be drawn in a round"),
    ("rate=1.5", "1.5", "the chance to be drawn in a round"),
    ("rate=nan", "nan", "the chance to be drawn in a round"),
    ("clip-norm=0", "0.0", "set the clip norm"),
    ("clip-norm=inf", "inf", "set the clip norm"),
    ("clip-norm=nan", "nan", "set the clip norm"),
    ("delta=0", "0.0", "well below 1/population"),
    ("delta=1", "1.0", "well below 1/population"),
    ("delta=nan", "nan", "well below 1/population"),
    ("noise-multiplier=-1", "-1.0", "0 adds no noise"),
    ("noise-multiplier=nan", "nan", "finite"),
    ("noise-multiplier=1e12", "1000000000000.0", "keep population + 14·z below 2^32"),
    ("population=0", "0", "set population"),
    ("step=nan", "nan", "set the step size"),
    ("rounds=0", "0", "at least 1"),
    ("max-epsilon=0", "0.0", "leave it out for no budget"),
    ("max-epsilon=inf", "inf", "leave it out for no budget"),
    ("evaluate-every=-1", "-1", "0 is never"),
    ("min-online=2", "2.0", "a share of the population"),
    ("clipnorm=1", "'clipnorm'", "did you mean 'clip-norm'?"),
    ("clip-norm", "clip-norm", "write it as KEY=VALUE"),
]


def check_refusal(ended: Ended, value: str, remedy: str) -> None:
    """Exit status 2, one line that names the value and what to change."""
    assert ended.status == 2
    assert ended.err.startswith("ppsgd: ")
    assert ended.err.endswith("\n")
    assert len(ended.err.splitlines()) == 1
    assert value in ended.err
    assert remedy in ended.err


@pytest.mark.parametrize(
    ("setting", "value", "remedy"), BAD_SETTINGS, ids=[setting for setting, _, _ in BAD_SETTINGS]
)
def test_a_bad_setting_is_one_line_and_nothing_is_written(
    ppsgd: Command, setting: str, value: str, remedy: str
) -> None:
    check_refusal(ppsgd("run", "small.toml", "--set", setting, "--out", "out"), value, remedy)
    assert [path.name for path in Path().iterdir()] == ["small.toml"]


BAD_FILES = [  # name, contents or None for no file, what is named, the rule or remedy
    ("missing.toml", None, "missing.toml", "No such file"),
    ("broken.toml", "population = \n", "broken.toml", "line 1"),
    ("table.toml", "[release]\nclip-norm = 1.0\n", "'release'", "did you mean"),
    (
        "cohort.toml",
        TOML.replace("rate = 1.0", "cohort-size = 5"),
        "5",
        "draw fewer or enrol more users",
    ),
    ("neither.toml", TOML.replace("rate = 1.0", ""), "rate or cohort-size", "neither is set"),
    (
        "without-delta.toml",
        TOML.replace("delta = 1e-4", ""),
        "delta must be given",
        "--set delta=1e-5",
    ),
    (
        "without-noise.toml",
        TOML.replace("noise-multiplier = 10.0", ""),
        "noise-multiplier",
        "neither is set",
    ),
]


@pytest.mark.parametrize(
    ("name", "text", "value", "remedy"), BAD_FILES, ids=[name for name, *_ in BAD_FILES]
)
def test_a_bad_file_is_one_line_and_nothing_is_written(
    ppsgd: Command, name: str, text: str | None, value: str, remedy: str
) -> None:
    if text is not None:
        Path(name).write_text(text)
    check_refusal(ppsgd("run", name, "--out", "out"), value, remedy)
    assert {path.name for path in Path().iterdir()} <= {"small.toml", name}


SWEEP = TOML.replace("step = 0.5", "step = [0.1, 0.5]").replace(
    "alpha-q = 0.3", "alpha-q = [0.0, 0.3]"
)


BAD_SWEEPS = [  # arguments, what is named, the rule or remedy
    (("--set", "step=[]"), "'step' is an empty list", "at least one value"),
    (("--set", "stepp=[1.0]"), "'stepp'", "did you mean 'step'?"),
    (("--memory", "lots"), "--memory lots", "8GB or 500MB"),
    (("--memory", "1KB"), "a single setting needs", "raise --memory"),
]


@pytest.mark.parametrize(
    ("arguments", "value", "remedy"), BAD_SWEEPS, ids=[" ".join(a) for a, *_ in BAD_SWEEPS]
)
def test_a_bad_sweep_is_one_line_and_nothing_is_written(
    ppsgd: Command, arguments: tuple[str, ...], value: str, remedy: str
) -> None:
    Path("grid.toml").write_text(SWEEP)
    check_refusal(
        ppsgd("sweep", "grid.toml", "--set", "insecure-seed=1", *arguments, "--out", "out"),
        value,
        remedy,
    )
    assert not Path("out").exists()


ROWS = [
    "reader,age,hours,score,when",
    *(f"r{u},{u % 3},{h},{u + 2 * h + 0.5},{h}" for u in range(4) for h in range(6)),
]
DATA = ("--data", "rows.csv", "--user", "reader", "--target", "score", "--exclude", "when")
SMALL_STEPS = ("--set", "rate=1.0", "--set", "step=.01", "--set", "evaluate-every=2")
QUICK = ("--rounds", "2", "--epsilon", "2", "--delta", "1e-3", *SMALL_STEPS)


def test_the_help_of_run_lists_every_key_of_set(ppsgd: Command) -> None:
    """The list is written down, so that help loads nothing."""
    listed = [key for keys in commands.SETTINGS.values() for key in keys.split()]
    assert sorted(listed) == sorted(set(experiment_keys()))
    shown = ppsgd("run", "--help").out
    for key in listed:
        assert key in shown
    assert "--epsilon" in shown
    assert "--delta" in shown


@pytest.mark.parametrize(
    ("command", "given", "missing"),
    [
        ("run", (), "--set epsilon=2.0 --set delta=1e-5"),
        ("run", ("--epsilon", "1"), "--set delta=1e-5"),
        ("run", ("--set", "delta=1e-3"), "--set epsilon=2.0"),
        ("sweep", (), "--set delta=1e-5"),
    ],
)
def test_epsilon_and_delta_have_no_default_and_the_error_shows_how_to_give_them(
    ppsgd: Command, command: str, given: tuple[str, ...], missing: str
) -> None:
    Path("rows.csv").write_text("\n".join(ROWS))
    check_refusal(ppsgd(command, *DATA[:6], *given), "no default", missing)
    assert {path.name for path in Path().iterdir()} == {"small.toml", "rows.csv"}


def test_an_extra_that_is_missing_is_one_line(
    ppsgd: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("flwr_ppsgd.lab.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    ended = ppsgd("report", "out")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err == "ppsgd: jinja2 is not installed: pip install 'flwr-ppsgd[lab]'\n"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["experiments"]])
def test_help_and_lists_load_nothing_heavy(arguments: list[str]) -> None:
    loaded = loaded_by(
        f"""
sys.argv = ["ppsgd", *{arguments!r}]
from flwr_ppsgd import cli
try:
    cli.main()
except SystemExit as ended:
    assert not ended.code
"""
    )
    assert not loaded & {"flwr", "numpy", "scipy", "torch", "matplotlib", "flwr_ppsgd.ledger"}


BAD_ROWS = [
    (
        {},
        ("--user", "readr"),
        "no column 'readr' among reader, age, hours, score, when: did you mean 'reader'?",
    ),
    ({2: "r0,0,nan,1.5,0"}, (), "column 'hours' is not a finite number in line 3"),
    ({2: ",0,1,1.5,0"}, (), "column 'reader' is empty in line 3"),
    ({2: "r0,0,1,,0"}, (), "column 'score' is not a finite number in line 3"),
    (
        {},
        ("--task", "classification"),
        "column 'score' does not hold class numbers: use --task regression",
    ),
    ({}, ("--set", "population=100"), "population is 100 and"),
    ({}, ("--set", "standardise=public.csv"), "public.csv"),
    ({}, ("--data", "flwrlabs"), "flwrlabs"),
]


@pytest.mark.parametrize(("lines", "options", "message"), BAD_ROWS)
def test_bad_rows_are_one_line_that_says_where(
    ppsgd: Command, lines: dict[int, str], options: tuple[str, ...], message: str
) -> None:
    Path("rows.csv").write_text(
        "\n".join(lines.get(number, row) for number, row in enumerate(ROWS))
    )
    ended = ppsgd("run", *DATA, *options, *QUICK, "--out", "out")
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert message in ended.err
    assert not Path("out").exists()


def test_stars_are_amounts_if_one_says_so(ppsgd: Command) -> None:
    """Whole numbers from 1 to 5 look like classes: a line says which option makes them amounts."""
    stars = ["user,x,stars", *(f"{u},{h},{1 + (u + h) % 5}" for u in range(4) for h in range(6))]
    Path("stars.csv").write_text("\n".join(stars))
    common = (
        "run",
        "--data",
        "stars.csv",
        "--target",
        "stars",
        *QUICK,
        "--set",
        "epsilon=2",
        "--out",
    )
    ended = ppsgd(*common, "out", "--verbose")
    assert ended.status == 0
    assert "since it has only 5 different whole numbers (--task changes it)" in ended.out
    assert "classes are 1, 2, 3, 4, 5" in ended.out
    assert (
        ppsgd(*common, "amounts", "--task", "regression", "--set", "target-shift=3.0").status == 0
    )


def test_look_says_what_a_file_holds(ppsgd: Command) -> None:
    rows = ["person;films;stars"]
    rows += [f"p{u};{1900 + 7 * h};{u + h / 3:.3f}" for u in range(5) for h in range(6)]
    Path("stars.csv").write_text("\n".join(rows))
    ended = ppsgd("look", "stars.csv", "--user", "person", "--target", "stars")
    assert ended.status == 0
    assert "features: 'films'" in ended.out
    assert "without features: rmse" in ended.out
    assert sorted(path.name for path in Path().iterdir()) == ["small.toml", "stars.csv"]


@pytest.mark.parametrize("kind", ["no test rows", "one row per user", "one user"])
def test_odd_populations_are_said_and_do_not_crash(ppsgd: Command, kind: str) -> None:
    marks = {"no test rows": ("user,a,y,test", ",0"), "one row per user": ("user,a,y", "")}
    header, mark = marks.get(kind, ("user,a,y", ""))
    users = {"one row per user": 40, "one user": 1}.get(kind, 5)
    rows = [f"{row % users},{row * 7 % 13},{row * 5 % 11 / 10}{mark}" for row in range(40)]
    Path("odd.csv").write_text("\n".join([header, *rows]))
    budget = ("--epsilon", "2", "--delta", "1e-3", "--rounds", "2")
    ended = ppsgd("run", "--data", "odd.csv", *budget, "--engine", "cohort", "--out", "out")
    assert ended.status == 0, ended.err
    said = "there is one user" if kind == "one user" else "there are no test rows"
    assert said in ended.out
    if kind != "one user":
        swept = ("--delta", "1e-3", "--set", "select-on=test", "--out", "swept")
        ended = ppsgd("sweep", "--data", "odd.csv", *swept)
        assert ended.status == 2
        assert "there are no test rows, so settings cannot be compared" in ended.err
