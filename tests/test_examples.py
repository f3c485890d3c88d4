"""The examples learn, through the doors that users have."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import simulations.apps.adapters.__main__ as adapters
import simulations.apps.text.__main__ as text
from flwr_ppsgd import shared_arrays
from simulations.apps.adapters.task import FEATURES, adapted, whole
from simulations.apps.text.task import LONGEST, TagNet, read, synthetic
from tests.support.own_data import needs_real_data
from tests.support.paths import SHARED

REAL = SHARED / "zephyr_tags.npz"


pytestmark = pytest.mark.usefixtures("one_thread")


def test_shared_word_weights_help_and_every_run_draws_a_picture(tmp_path: Path) -> None:
    """At an ε that hardly limits 24 users; the example's own is 4 for 150."""
    picture = tmp_path / "new" / "text.png"
    options = ["--users", "24", "--rounds", "8", "--epsilon", "100", "--picture", str(picture)]
    accuracy = text.main(options)
    assert accuracy["shared word weights"] > accuracy["head alone"] + 0.02
    assert picture.stat().st_size > 0


def test_the_adapters_example_runs(tmp_path: Path) -> None:
    picture = tmp_path / "adapters.png"
    accuracy = adapters.main(["--users", "4", "--rounds", "1", "--picture", str(picture)])
    assert set(accuracy) == {"head alone", "shared adapter", "shared adapter and backbone"}
    assert picture.stat().st_size > 0


def sizes(network: Callable[[], torch.nn.Module]) -> dict[str, int]:
    arrays = shared_arrays(network(), "head.*")
    return {name: array.numpy().size for name, array in arrays.items()}


def test_what_is_shared() -> None:
    """Word weights, or factors on features; a frozen backbone and word vectors are not."""
    assert list(sizes(TagNet)) == ["adapter.weight"]
    assert sizes(adapted) == {"adapter": FEATURES}
    assert sum(sizes(whole).values()) == FEATURES + 5056


def test_the_backbone_is_the_same_on_every_machine_that_makes_it() -> None:
    first = adapted().state_dict()
    again = adapted().state_dict()
    for name, value in first.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=0)


def test_synthetic_texts_are_public_and_repeatable() -> None:
    one = synthetic(users=3)
    again = synthetic(users=3)
    np.testing.assert_array_equal(one.words, again.words)
    assert one.users == 3
    assert one.test.mean() == 0.25


def test_a_file_of_bags_of_words_is_read(tmp_path: Path) -> None:
    """Two texts: words 5 and 4999 with the tags 7 and 3, and no word with the tag 2."""
    path = tmp_path / "bags.npz"
    np.savez(
        path,
        indptr=[0, 2, 2],
        indices=[5, 4999],
        tag_indptr=[0, 2, 3],
        tag_indices=[7, 3, 2],
        user=[0, 1],
        test=[False, True],
    )
    found = read(path)
    np.testing.assert_array_equal(found.words, [[6] + [0] * (LONGEST - 1), [0] * LONGEST])
    assert found.tags.tolist() == [7, 2]
    assert torch.isfinite(TagNet()(torch.from_numpy(found.words))).all()


@needs_real_data
def test_real_texts_are_read() -> None:
    found = read(REAL)
    assert found.users == 191
    assert (found.words > 0).any(axis=1).mean() > 0.95
