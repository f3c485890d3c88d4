"""The page docs/own-data.md, typed as it stands."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from flwr_ppsgd import cli
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "own-data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|bash)\n(.*?)```", PAGE, re.DOTALL)


def typed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of a shell; ``head`` is the only command that is not ours."""
    words = shlex.split(line)
    if words[0] == "head":
        lines = Path(words[2]).read_text().splitlines(keepends=True)
        Path(words[4]).write_text("".join(lines[: abs(int(words[1]))]))
        return
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, line


def test_every_command_of_the_page_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, code in BLOCKS:
        if kind == "python":
            exec(compile(code, "own-data.md", "exec"), {})
            continue
        for line in code.replace("\\\n", " ").strip().splitlines():
            typed(line, monkeypatch)
    out = capsys.readouterr().out
    assert "chosen by looking at data: not covered" in out
    assert "of 80 users gain" in out
    assert "choosing among 8 settings costs" in out
    for name in (
        "exams/users.parquet",
        "predictions.csv",
        "sweep/methods.pdf",
        "sweep/report.html",
    ):
        assert Path(name).exists(), name
