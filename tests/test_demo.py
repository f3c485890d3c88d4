"""``make demo``: what it claims is so."""

import re
from pathlib import Path

import numpy as np
import pytest

from simulations import demo


@pytest.fixture
def smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two levels of ε and a third of the people: the same story in seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "USERS", 160)
    monkeypatch.setattr(demo, "OTHERS", (4.0,))
    monkeypatch.setattr("sys.argv", ["demo.py"])


def test_people_have_the_stated_rows() -> None:
    made = demo.people()
    assert len(np.unique(made["user"])) == demo.USERS
    training = np.bincount(made["user"][~made["test"]])
    assert (training.min(), training.max()) == demo.ROWS
    assert made["x"].shape == (len(made["y"]), demo.FEATURES)


@pytest.mark.usefixtures("smaller")
def test_personal_models_are_better_than_both_and_the_demo_ends_with_picture_and_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.main()
    shown = capsys.readouterr().out
    assert "(1, 0.0001)-joint differential privacy" in shown  # a guarantee, not a simulation
    found = re.search(
        r"accuracy (\S+) \(own rows alone (\S+), shared model alone ([0-9.]+)\)", shown
    )
    assert found is not None
    personal, alone, shared = map(float, found.groups())
    assert personal > max(alone, shared) + 0.01
    assert shown.splitlines()[-1].split() == ["Picture:", "runs/demo/demo.png", "epsilon", "=", "1"]
    assert (tmp_path / "runs" / "demo" / "demo.png").stat().st_size > 10_000
    assert (tmp_path / "runs" / "demo" / "epsilon-1" / "users.png").exists()
