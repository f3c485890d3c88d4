"""Loaders by visit: which rows, how much of a loader is read, what is refused."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

from flwr_ppsgd.models.torch_data import LoaderBatches

ROWS = 10
ONE = torch.ones(1)
NAMED = {"pixels": torch.ones(2, 1), "digit": torch.tensor([0, 1]), "writer": ["ada"] * 2}
PAIRS = [(torch.ones(2, 1), torch.tensor([0, 1])), (torch.ones(2, 1), torch.tensor([2, 3]))]


class Counted(Dataset[dict[str, Tensor]]):
    """Ten rows, and how many of them were fetched."""

    def __init__(self) -> None:
        self.fetched = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        self.fetched += 1
        return {"img": torch.full((2,), float(row)), "label": torch.tensor(row)}


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        for row in range(3):
            yield torch.full((2,), float(row)), row


def targets(source: LoaderBatches, visit: int) -> list[int]:
    return [int(y) for y in source(visit)[1]]


def test_a_visit_fetches_its_own_rows_alone() -> None:
    data = Counted()
    source = LoaderBatches(DataLoader(data, batch_size=3))
    x, y = source(1)
    assert data.fetched == 3
    assert x["img"][:, 0].tolist() == y.tolist()
    assert source.num_examples == ROWS


def test_an_epoch_of_visits_has_every_row_once_and_users_differ() -> None:
    seen = []
    for user in (0, 1):
        source = LoaderBatches(DataLoader(Counted(), batch_size=5, shuffle=True), user=user)
        seen.append([*targets(source, 1), *targets(source, 2)])
        assert sorted(seen[-1]) == list(range(ROWS))
    assert seen[0] != seen[1]
    again = LoaderBatches(DataLoader(Counted(), batch_size=5, shuffle=True), user=0)
    assert targets(again, 1) == seen[0][:5]


def test_rows_that_a_sampler_leaves_out_are_never_seen() -> None:
    loader = DataLoader(Counted(), batch_size=2, sampler=SubsetRandomSampler([1, 3, 5]))
    source = LoaderBatches(loader)
    found = {row for visit in range(1, 9) for row in targets(source, visit)}
    assert found == {1, 3, 5}
    assert source.num_examples == 3


class Listed(list[Any]):
    """A list that knows how often it was read."""

    reads = 0

    def __iter__(self) -> Iterator[Any]:
        self.reads += 1
        return super().__iter__()


def test_a_small_iterable_is_read_once() -> None:
    pairs = Listed(PAIRS)
    source = LoaderBatches(pairs)
    before = pairs.reads
    assert {row for visit in (1, 2) for row in targets(source, visit)} == {0, 1, 2, 3}
    assert pairs.reads == before


def test_what_is_large_or_has_no_length_is_read_batch_by_batch_and_begun_again() -> None:
    source = LoaderBatches(PAIRS, most_bytes=40)
    assert [targets(source, visit) for visit in (1, 2, 3)] == [[0, 1], [2, 3], [0, 1]]
    assert source.num_examples == 4
    source = LoaderBatches(DataLoader(Stream(), batch_size=2))
    assert [targets(source, visit) for visit in (1, 2, 3)] == [[0, 1], [2], [0, 1]]
    assert len(list(source)) == 2


def test_several_inputs_are_held_together() -> None:
    ids = torch.arange(8).reshape(4, 2)
    pairs = [((ids[at], ids[at] + 1), torch.tensor(at)) for at in ([0, 1], [2, 3])]
    (one, other), y = LoaderBatches(pairs)(1)
    np.testing.assert_array_equal(one + 1, other)
    np.testing.assert_array_equal(one[:, 0], 2 * y)


@pytest.mark.parametrize(
    ("batch", "parts", "words"),
    [
        ((ONE, ONE, ONE), {}, r"3 parts where .* inputs=\[0, 1\], targ"),
        ({"img": ONE, "y": ONE, "label": ONE}, {}, r"add target="),
        (torch.ones(3), {}, "a batch is a Tensor, not"),
        ((torch.tensor([1.0, float("nan")]), torch.ones(2)), {}, "part 'x' .* NaN or infinity"),
        ({"img": ONE, "y": torch.tensor([float("inf")])}, {}, "part 'target' .* NaN"),
        (NAMED, {}, r"parts \['pixels', 'digit', 'writer'\].*target="),
        (NAMED, {"inputs": "picture", "target": "digit"}, r"\['picture'\] were asked for: name"),
        (NAMED, {"target": "digit"}, r"part 'writer' of a batch is not a tensor.*inputs="),
        ((ONE, ONE, ONE), {"inputs": [0, 1], "target": 3}, r"\[0, 1, 2\], and \[3\] were asked"),
    ],
)
def test_a_batch_that_does_not_fit_says_what_to_change(
    batch: Any, parts: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        LoaderBatches([batch], **parts)


@pytest.mark.parametrize(
    ("loader", "name", "words"),
    [
        ([], "train", "no batch: a user needs at least one row.*enrolled"),
        (DataLoader(TensorDataset(torch.ones(0))), "train", "no batch: a user needs at least one"),
        ([], "test", r"the test loader has no batch: return \(train, None\)"),
        (iter([]), "train", "train loader is a list_iterator, which can be read only once"),
    ],
)
def test_a_loader_without_rows_for_every_visit_is_refused(
    loader: Any, name: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        LoaderBatches(loader, name=name)


@pytest.mark.parametrize("name", ["label", "labels", "target", "targets", "y"])
def test_a_target_is_known_by_its_usual_names_in_any_order(name: str) -> None:
    parts = {name: torch.tensor([7]), "img": torch.ones(1, 2)}
    for ordered in (parts, dict(reversed(parts.items()))):
        x, y = LoaderBatches([ordered])(1)
        assert y.tolist() == [7]
        assert list(x) == ["img"]


def test_other_names_and_places_are_given() -> None:
    x, _ = LoaderBatches([NAMED], inputs="pixels", target="digit")(1)
    assert list(x) == ["pixels"]
    x, y = LoaderBatches([(torch.tensor([7]), torch.ones(1, 2))], target=0)(1)
    assert y.tolist() == [7]
    assert x.shape == (1, 2)


def test_rows_that_are_held_are_the_same_and_are_read_once() -> None:
    """For several epochs in one visit."""
    data = Counted()
    loader = DataLoader(data, batch_size=3, shuffle=True)
    expected = [targets(LoaderBatches(loader), visit) for visit in (1, 2, 5)]
    source = LoaderBatches(loader)
    source.keep_in_memory()
    data.fetched = 0
    assert [targets(source, visit) for visit in (1, 2, 5)] == expected
    assert data.fetched == 0
    large = LoaderBatches(loader, most_bytes=8)
    large.keep_in_memory()
    assert targets(large, 1) == expected[0]
    assert data.fetched > 0


def test_batches_of_different_widths_stay_apart() -> None:
    """Texts that are padded to the longest in their batch."""
    pairs = [(torch.ones(2, width), torch.tensor([width, width])) for width in (3, 5)]
    source = LoaderBatches(pairs)
    assert [targets(source, visit) for visit in (1, 2)] == [[3, 3], [5, 5]]
    assert source.num_examples == 4
