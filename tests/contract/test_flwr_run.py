"""Flower's own simulation, with Ray, gives the w of this process to the last bit."""

from pathlib import Path

import numpy as np
import pytest

from tests.contract.command import ppsgd
from tests.contract.files import TOML, check_done, ppsgd_alone, privacy_of

pytest.importorskip("ray", reason="needs the simulation extra")


def test_the_flower_engine_gives_the_same_w(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(TOML)
    seeded = ("run", "small.toml", "--set", "insecure-seed=3")
    check_done(ppsgd_alone(*seeded, "--engine", "flower", "--out", "flower", where=tmp_path))
    check_done(ppsgd(*seeded, "--out", "here", where=tmp_path))
    with (
        np.load(tmp_path / "flower" / "model.npz") as by_flower,
        np.load(tmp_path / "here" / "model.npz") as by_process,
    ):
        assert by_flower.files == by_process.files
        for name in by_flower.files:
            np.testing.assert_array_equal(by_flower[name], by_process[name])
    assert privacy_of(tmp_path / "flower") == privacy_of(tmp_path / "here")
