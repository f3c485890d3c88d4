"""Public data sets in LEAF's layout, as folders of pictures, and from the hub."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd.lab.data import Columns
from flwr_ppsgd.lab.data.by_name import load
from flwr_ppsgd.lab.data.public import is_hub_name


def leaf_files(folder: Path) -> Path:
    """Two users with two training rows each; the third has a test row only."""
    parts: dict[str, dict[str, dict[str, list[Any]]]] = {
        "train": {"a": {"x": [[1, 2], [3, 4]], "y": [0, 1]}, "b": {"x": [[5, 6]], "y": [1]}},
        "test": {"a": {"x": [[7, 8]], "y": [1]}, "c": {"x": [[9, 9]], "y": [0]}},
    }
    for part, users in parts.items():
        content = {
            "users": list(users),
            "num_samples": [len(rows["y"]) for rows in users.values()],
            "user_data": users,
        }
        (folder / "data" / part).mkdir(parents=True)
        (folder / "data" / part / "all_data_0.json").write_text(json.dumps(content))
    return folder


def test_leafs_files_keep_their_test_parts(tmp_path: Path) -> None:
    data = load(leaf_files(tmp_path))
    assert data.users == ("a", "b")
    assert (data.task, data.outputs) == ("classification", 2)
    np.testing.assert_array_equal(data.x[data.test], [[7, 8]])
    np.testing.assert_array_equal(data.x[data.trained], [[1, 2], [3, 4], [5, 6]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a file of LEAF"),
        ('{"users": ["a"]}', "not a file of LEAF"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": []}}}', "1 x and 0 y"),
        ('{"users": ["a"], "user_data": {"a": {"x": ["text"], "y": [1]}}}', "encode text"),
    ],
)
def test_files_that_are_not_leafs_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "part.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def pictures(folder: Path, sizes: tuple[int, ...] = (4, 4)) -> Path:
    image = pytest.importorskip("PIL.Image")
    for user in ("ann", "bob"):
        for place, kind in enumerate(("cat", "dog")):
            own = folder / user / kind
            own.mkdir(parents=True)
            for number, size in enumerate(sizes):
                pixels = np.full((size, size), 50 * place + number, dtype=np.uint8)
                image.fromarray(pixels).save(own / f"{number}.png")
    return folder


def test_folders_of_pictures_are_users_and_classes(tmp_path: Path) -> None:
    data = load(pictures(tmp_path))
    assert data.users == ("ann", "bob")
    assert data.target_names == ("cat", "dog")
    assert data.x.dtype == np.uint8
    assert data.shape == (4, 4)
    own = np.concatenate([data.rows(0, test=False), data.rows(0, test=True)])
    assert sorted(data.x[own, 0].tolist()) == [0, 1, 50, 51]


def test_pictures_of_two_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1.png: has \(5, 5\) pixels and the first .*\(4, 4\)"):
        load(pictures(tmp_path, (4, 5)))


def test_a_folder_of_the_hubs_files_is_partitioned_by_a_natural_id(tmp_path: Path) -> None:
    pytest.importorskip("flwr_datasets")
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path / "speech"
    folder.mkdir()
    table = pyarrow.table(
        {"speaker": ["p", "q", "p", "q"], "pitch": [1.0, 2, 3, 4], "word": list("yynn")}
    )
    parquet.write_table(table, folder / "train-00000-of-00001.parquet")
    data = load(folder, Columns(user="speaker", target="word"), cache_dir=tmp_path / "cache")
    assert data.users == ("p", "q")
    assert data.feature_names == ("pitch",)
    assert data.target_names == ("n", "y")
    again = load(folder, Columns(user="speaker", target="word"), cache_dir=tmp_path / "cache")
    np.testing.assert_array_equal(again.x, data.x)


def test_a_name_of_the_hub_is_no_path(tmp_path: Path) -> None:
    assert is_hub_name("flwrlabs/ucf101")
    assert not is_hub_name("data/ratings.csv")
    assert not is_hub_name("a/b/c")
    assert not is_hub_name(str(tmp_path))


def test_without_the_hub_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("flwr_datasets")

    class Offline:
        def __init__(self, **_: object) -> None: ...

        def load_split(self, _: str) -> None:
            raise ConnectionError("no route to host\nat all")

    monkeypatch.setattr(package, "FederatedDataset", Offline)
    with pytest.raises(ValueError, match="speech/commands: cannot be loaded") as caught:
        load("speech/commands", Columns(user="speaker_id", target="label"))
    assert "\n" not in str(caught.value)
    assert "put its parquet files into a folder" in str(caught.value)
