"""The notebooks run in a plain kernel: their code cells, one after the other, in this process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from tests.support.paths import ROOT

FEWER_ROUNDS = ("DELTA = 60, 8, 10, 20,", "DELTA = 60, 8, 10, 8,")  # as good a test in less time
NOTEBOOKS = [ROOT / "simulations" / "notebooks" / "tour.ipynb"]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """The figures that a notebook has shown."""
    figures: list[int] = []

    def show() -> None:
        figures.extend(plt.get_fignums())
        plt.close("all")

    mpl.use("Agg")
    plt.close("all")  # what other tests have left open
    monkeypatch.setattr(plt, "show", show)
    monkeypatch.chdir(tmp_path)
    yield figures
    plt.close("all")


def code_cells(book: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_shows_pictures(
    path: Path, shown: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    book = json.loads(path.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(book), start=1):
        code = "".join(cell["source"]).replace(*FEWER_ROUNDS)
        exec(compile(code, f"{path.name}, cell {number}", "exec"), namespace)
    assert namespace["ROUNDS"] == 8
    assert len(shown) == 3
    assert "To each of the 60 enrolled users" in capsys.readouterr().out
    alone, both, one_for_all = (list(curve.values())[-1] for curve in namespace["curves"].values())
    assert both < min(alone, one_for_all)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_its_pictures_are_in_the_file(path: Path) -> None:
    book = json.loads(path.read_text(encoding="utf-8"))
    outputs = [output for cell in code_cells(book) for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert not [output for output in outputs if output["output_type"] == "error"]
