"""What TensorBoard is shown: the round and what was released, never anything about clients."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy import grid, release, strategy, w0

WRITTEN: list[tuple[str, float, int]] = []


class Writer:
    """Stands in for torch.utils.tensorboard.SummaryWriter."""

    def __init__(self, _: str) -> None:
        WRITTEN.clear()

    def add_scalar(self, name: str, value: float, round_: int) -> None:
        WRITTEN.append((name, value, round_))

    def flush(self) -> None:
        pass


def test_epsilon_by_round_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    result = strategy(release=release(z=2.0), tensorboard_dir=tmp_path).start(
        grid(), w0(), num_rounds=3
    )
    epsilons = [metrics["epsilon"] for metrics in result.train_metrics_clientapp.values()]
    assert [("ppsgd/epsilon", epsilon, n) for n, epsilon in enumerate(epsilons, start=1)] == WRITTEN


def test_without_tensorboard_training_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    strategy(tensorboard_dir=tmp_path).start(grid(), w0(), num_rounds=1)
    assert "TensorBoard is not installed" in caplog.text
