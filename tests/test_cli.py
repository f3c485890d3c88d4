"""The ``ppsgd`` command: what each wrong value, file and row brings, and what help loads."""

import sys
from pathlib import Path

import pytest

from flwr_ppsgd.lab import commands
from flwr_ppsgd.lab.experiment import experiment_keys
from tests.contract.command import ppsgd
from tests.contract.files import BUDGET, TOML, check_done, check_refused
from tests.support.loaded import loaded_by

BAD_SETTINGS = [  # setting, the value as it is named, the rule or remedy
    ("alpha-q=nan", "nan", "0 is local learning, inf is global learning"),
    ("alpha-q=much", "'much'", "of type float"),
    ("rate=1.5", "1.5", "the chance to be drawn in a round"),
    ("rate=nan", "nan", "the chance to be drawn in a round"),
    ("clip-norm=inf", "inf", "set the clip norm"),
    ("clip-norm=nan", "nan", "set the clip norm"),
    ("delta=0", "0.0", "well below 1/population"),
    ("delta=nan", "nan", "well below 1/population"),
    ("noise-multiplier=-1", "-1.0", "0 adds no noise"),
    ("noise-multiplier=1e12", "1000000000000.0", "keep population + 14·z below 2^32"),
    ("population=0", "0", "set population"),
    ("step=nan", "nan", "set the step size"),
    ("max-epsilon=inf", "inf", "leave it out for no budget"),
    ("evaluate-every=-1", "-1", "0 is never"),
    ("min-online=2", "2.0", "a share of the population"),
    ("clipnorm=1", "'clipnorm'", "did you mean 'clip-norm'?"),
]


@pytest.mark.parametrize(
    ("setting", "value", "remedy"), BAD_SETTINGS, ids=[setting for setting, _, _ in BAD_SETTINGS]
)
def test_a_bad_setting_is_one_line_and_nothing_is_written(
    setting: str, value: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / "small.toml").write_text(TOML)
    ended = ppsgd("run", "small.toml", "--set", setting, "--out", "out", where=tmp_path)
    check_refused(ended, value, remedy)
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]


BAD_FILES = [  # contents, what is named, the rule or remedy
    ("population = \n", "bad.toml", "line 1"),
    ("[release]\nclip-norm = 1.0\n", "'release'", "did you mean"),
    (TOML.replace("rate = 1.0", "cohort-size = 7"), "7", "draw fewer or enrol more users"),
    (TOML.replace("rate = 1.0", ""), "rate or cohort-size", "neither is set"),
    (TOML.replace("delta = 1e-4", ""), "delta must be given", "--delta 1e-5"),
    (TOML.replace("noise-multiplier = 10.0", ""), "noise-multiplier", "neither is set"),
]


@pytest.mark.parametrize(("text", "value", "remedy"), BAD_FILES)
def test_a_bad_file_is_one_line_and_nothing_is_written(
    text: str, value: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.toml").write_text(text)
    check_refused(ppsgd("run", "bad.toml", "--out", "out", where=tmp_path), value, remedy)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]


BAD_SWEEPS = [  # arguments, what is named, the rule or remedy
    (("--set", "step=[]"), "'step' is an empty list", "at least one value"),
    (("--set", "stepp=[1.0]"), "'stepp'", "did you mean 'step'?"),
    (("--memory", "lots"), "--memory lots", "8GB or 500MB"),
    (("--memory", "1KB"), "a single setting needs", "raise --memory"),
]


@pytest.mark.parametrize(("arguments", "value", "remedy"), BAD_SWEEPS)
def test_a_bad_sweep_is_one_line_and_nothing_is_written(
    arguments: tuple[str, ...], value: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / "grid.toml").write_text(TOML.replace("step = 0.5", "step = [0.1, 0.5]"))
    sweep = ("sweep", "grid.toml", "--set", "insecure-seed=1", *arguments, "--out", "out")
    check_refused(ppsgd(*sweep, where=tmp_path), value, remedy)
    assert not (tmp_path / "out").exists()


ROWS = [
    "reader,age,hours,score,when",
    *(f"r{u},{u % 3},{h},{u + 2 * h + 0.5},{h}" for u in range(4) for h in range(6)),
]
DATA = ("--data", "rows.csv", "--user", "reader", "--target", "score", "--exclude", "when")
BAD_ROWS = [  # line 3, options, what is named
    ("r0,0,nan,1.5,0", (), "column 'hours' is not a finite number in line 3"),
    (",0,1,1.5,0", (), "column 'reader' is empty in line 3"),
    ("r0,0,1,,0", (), "column 'score' is not a finite number in line 3"),
    (ROWS[2], ("--task", "classification"), "does not hold class numbers: use --task regression"),
    (ROWS[2], ("--set", "population=100"), "population is 100 and"),
    (ROWS[2], ("--data", "flwrlabs"), "flwrlabs"),
]


@pytest.mark.parametrize(("line", "options", "message"), BAD_ROWS)
def test_bad_rows_are_one_line_that_says_where(
    line: str, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("\n".join([*ROWS[:2], line, *ROWS[3:]]))
    check_refused(ppsgd("run", *DATA, *options, *BUDGET, "--out", "out", where=tmp_path), message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "given", "missing"),
    [
        ("run", (), "--epsilon 2 --delta 1e-5"),
        ("run", ("--epsilon", "1"), "--delta 1e-5"),
        ("run", ("--set", "delta=1e-3"), "--epsilon 2"),
        ("sweep", (), "--delta 1e-5"),
    ],
)
def test_epsilon_and_delta_have_no_default_and_the_error_shows_the_command(
    command: str, given: tuple[str, ...], missing: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("\n".join(ROWS))
    typed = (command, *DATA[:6], *given)
    check_refused(ppsgd(*typed, where=tmp_path), "no default", f"ppsgd … {missing}")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


def test_the_help_of_run_lists_every_key_of_set() -> None:
    """The list is written down, so that help loads nothing."""
    listed = [key for keys in commands.SETTINGS.values() for key in keys.split()]
    assert sorted(listed) == sorted(set(experiment_keys()))
    shown = check_done(ppsgd("run", "--help")).words
    for key in [*listed, "--epsilon", "--delta"]:
        assert key in shown


def test_an_extra_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("flwr_ppsgd.lab.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    ended = ppsgd("report", "out")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err == "ppsgd: jinja2 is not installed: pip install 'flwr-ppsgd[lab]'\n"


@pytest.mark.parametrize("arguments", [["run", "--help"], ["experiments"]])
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


def test_stars_are_amounts_if_one_says_so(tmp_path: Path) -> None:
    """Whole numbers from 1 to 5 look like classes: a line says which option makes them amounts."""
    stars = ["user,x,stars", *(f"{u},{h},{1 + (u + h) % 5}" for u in range(4) for h in range(6))]
    (tmp_path / "stars.csv").write_text("\n".join(stars))
    run = ("run", "--data", "stars.csv", "--target", "stars", *BUDGET)
    shown = check_done(ppsgd(*run, "--verbose", where=tmp_path)).words
    assert "since it has only 5 different whole numbers (--task changes it)" in shown
    assert "classes are 1, 2, 3, 4, 5" in shown
    amounts = ("--task", "regression", "--set", "target-shift=3.0", "--out", "amounts")
    check_done(ppsgd(*run, *amounts, where=tmp_path))


ODD = {  # the header, what ends each row, and the number of users
    "no test rows": ("user,a,y,test", ",0", 5),
    "one row per user": ("user,a,y", "", 40),
    "one user": ("user,a,y", "", 1),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_populations_are_said_and_do_not_crash(kind: str, tmp_path: Path) -> None:
    header, mark, users = ODD[kind]
    rows = [f"{row % users},{row * 7 % 13},{row * 5 % 11 / 10}{mark}" for row in range(40)]
    (tmp_path / "odd.csv").write_text("\n".join([header, *rows]))
    run = ("run", "--data", "odd.csv", *BUDGET, "--rounds", "2", "--engine", "cohort")
    shown = check_done(ppsgd(*run, where=tmp_path)).words
    if kind == "one user":
        assert "there is one user" in shown
        return
    assert "there are no test rows" in shown
    sweep = ("sweep", "--data", "odd.csv", "--delta", "1e-3", "--set", "select-on=test")
    ended = ppsgd(*sweep, where=tmp_path)
    check_refused(ended, "there are no test rows, so settings cannot be compared")
