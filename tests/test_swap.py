"""``make swap``: what it compares, on fewer users and rounds."""

from pathlib import Path

import numpy as np
import pytest

from flwr_ppsgd import Ledger, Poisson, Release
from simulations import swap


def test_every_strategy_is_measured_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "swap.png"
    options = ["--users", "12", "--rounds", "2", "--epsilon", "8", "--picture", str(picture)]
    found = swap.main(options)
    labels = [outcome.label.split(",")[0] for outcome in found]
    wrapper = ["Flower's DP wrapper"] * len(swap.CLIP_NORMS)
    assert labels == ["local learning", "FedAvg", *wrapper, "PPSGD.auto"]
    assert found[0].alone is None
    assert all(np.isfinite(outcome.personal) for outcome in found)
    assert picture.stat().st_size > 0


def test_the_wrapper_gets_the_noise_of_the_same_epsilon() -> None:
    """Its own formula, z·C/N on the mean, priced as what it is: everyone in every round."""
    strategy = swap.wrapped(1.0, 0.3, users=40, rounds=7)
    z = strategy.noise_multiplier
    spent = Ledger(swap.DELTA).record(Release(Poisson(40, 1.0), 0.3, z), 7).epsilon()
    assert spent == pytest.approx(1.0, rel=1e-3)
    assert spent <= 1.0
    assert strategy.num_sampled_clients == 40


def test_both_parts_matter_here() -> None:
    """With the common part known, personal models beat both it alone and local learning."""
    v = swap._direction(np.random.default_rng(1), swap.COMMON)
    known = swap.measured("known", v, users=30)
    local = swap.measured("local", np.zeros(swap.FEATURES), users=30)
    assert known.alone is not None
    assert known.personal < 0.95 * min(known.alone, local.personal)
