"""docs/simulate.md: its code and its command, as printed."""

import re
import shlex
from typing import Any

import pytest

from simulations.apps import compare
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "simulate.md").read_text("utf-8")


def test_the_pages_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """FedAvg over 200 of 2,000 nodes pulls w by half towards the mean in each round."""
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "simulate.md", "exec"), names)
    (w,) = names["result"].arrays.to_numpy_ndarrays()
    assert abs(w - 999.5 * (1 - 0.5**5)).max() < 5 * 577 / 200**0.5  # standard errors
    assert "array" in capsys.readouterr().out


def test_the_pages_command_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (command,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    program, script, app, *options = shlex.split(command)
    assert program == "python"
    assert ROOT / script == ROOT / "simulations" / "apps" / "compare.py"
    monkeypatch.chdir(tmp_path)
    compare.main([str(ROOT / app), *options])
    assert (tmp_path / "runs" / "compare.png").stat().st_size > 0
