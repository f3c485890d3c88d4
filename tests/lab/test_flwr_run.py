"""Through ``flwr run`` and Ray: the same w, and a failure that is one."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd.lab import flwr_run as flower
from flwr_ppsgd.lab.experiment import Experiment
from flwr_ppsgd.lab.run import run
from tests.support.paths import ROOT
from tests.support.toy import flat

FEW: dict[str, Any] = {"population": 6, "rounds": 3, "evaluate-every": 0}
EXPERIMENT = Experiment.load(overrides={**FEW, "insecure-seed": 11, "clip-norm": 200.0})


def test_a_secure_sum_through_ray_gives_the_plain_w(tmp_path: Path) -> None:
    """Keys and shares live in the nodes' state, which Ray carries from message to message."""
    silent = {**EXPERIMENT.to_flat(), "noise-multiplier": 0.0, "rounds": 2}
    secure = {**silent, "secure-honest": 5, "secure-colluding": 0}
    flower.run_with_flower(Experiment.read(secure, "secure"), tmp_path / "out")
    (by_ray,) = np.load(tmp_path / "out" / "model.npz").values()
    np.testing.assert_array_equal(by_ray.reshape(-1), flat(run(Experiment.read(silent, "plain")).w))


def test_a_run_that_failed_is_reported_as_failed_though_flower_exits_with_0(tmp_path: Path) -> None:
    """A file stands where the ServerApp should make its output directory."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(flower.FlowerRunError, match="finished:failed"):
        flower.run_with_flower(EXPERIMENT, tmp_path / "file" / "out")


def test_flwr_run_at_the_root(tmp_path: Path) -> None:
    """``flwr run .``, as a user types it in a checkout, with one setting changed."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("flwr_ppsgd", "simulations"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    flower.run_app(checkout, nodes=10, changes=f"rounds=2 out='{tmp_path / 'out'}'")
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 3
