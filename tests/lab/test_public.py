"""Public data sets: TensorFlow Federated's files, LEAF, folders of pictures, the hub."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from flwr_ppsgd.lab.public import is_hub_name
from tests.support import tff_files
from tests.support.own_data import load_file, needs_real_data
from tests.support.paths import SHARED
from tests.support.tff_files import Row, example


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where .lzma files are unpacked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refused(path: Path | str, *parts: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=Path(path).name) as caught:
        load_file(path, **options)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def pixels(level: int) -> list[float]:
    """Paper with a background of 1, as in EMNIST, and some ink."""
    return [float(np.float32(value / 255)) for value in [level, *[255] * 783]]


def emnist_rows(pixel: Any = pixels) -> list[Row]:
    """Writers b and a, with 3 and 2 digits to train on and one to test."""
    rows = []
    for client, trained in (("b", 3), ("a", 2)):
        for number in range(trained):
            drawn = example({"pixels": pixel(10 * number), "label": [number]})
            rows.append(("digits_only_train", client, drawn))
        rows.append(("digits_only_test", client, example({"pixels": pixel(99), "label": [9]})))
    return rows


@pytest.mark.parametrize("name", ["emnist_all.sqlite", "emnist_all.sqlite.lzma"])
def test_emnist_by_writer(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    data = load_file(tff_files.write(folder / name, emnist_rows()))
    assert (data.users, data.outputs, data.task) == (("a", "b"), 10, "classification")
    assert data.x.dtype == np.uint8
    np.testing.assert_array_equal(data.train_sizes, [2, 3])
    np.testing.assert_array_equal(data.test_sizes, [1, 1])
    seen = data.matrix(data.rows(1, test=False))
    np.testing.assert_allclose(seen[:, 0], np.array([0, 10, 20]) / 255)
    np.testing.assert_array_equal(seen[:, 1:], 1.0)
    np.testing.assert_array_equal(data.y[data.rows(1, test=True)], [9])
    assert load_file(folder / name, users=1).users == ("a",)
    assert [path.name for path in folder.iterdir()] == [name]  # nothing is written beside it


def test_pixels_between_bytes_stay_floats(tmp_path: Path) -> None:
    rows = emnist_rows(lambda level: [level / 1000] * 784)
    data = load_file(tff_files.write(tmp_path / "emnist.sqlite", rows))
    assert data.x.dtype == np.float32
    seen = data.matrix(data.rows(1, test=False))
    np.testing.assert_allclose(seen[:, 5], [0, 0.01, 0.02], rtol=1e-6)


@pytest.mark.parametrize("kind", ["emnist", "stackoverflow"])
def test_broken_files_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    refused(tmp_path / f"{kind}.sqlite", "no such file", ".sqlite.lzma there")
    whole = tff_files.write(tmp_path / "whole.sqlite", emnist_rows()).read_bytes()
    refused(tmp_path / "whole.sqlite", "emnist or stackoverflow in its name")
    path = tmp_path / f"{kind}.sqlite"
    for length in (0, 50, 5000, len(whole) - 1000):
        path.write_bytes(whole[:length])
        refused(path, "not a complete SQLite file", "download it again")
    path.write_bytes(whole[:100] + b"\xff" * (len(whole) - 100))
    refused(path, "not a complete SQLite file")
    packed = tmp_path / f"{kind}.sqlite.lzma"
    packed.write_bytes(b"no lzma")
    refused(packed, "not a complete SQLite file")


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    words = example({"tokens": [b"x"]})
    rows = [("train", "a", words), ("test", "a", words)]
    path = tff_files.write(tmp_path / "emnist.sqlite", rows)
    refused(path, "no split 'digits_only_train' among test, train")
    refused(path, "leave them out", user_column="writer")
    refused(path.rename(tmp_path / "stackoverflow.sqlite"), "example 0 of 'a' has no 'title'")
    short = example({"pixels": [0.5] * 10, "label": [1]})
    rows = [(f"digits_only_{part}", "a", short) for part in ("train", "test")]
    refused(tff_files.write(tmp_path / "emnist2.sqlite", rows), "no 784 'pixels'")
    damaged = [("digits_only_train", "a", b"\x0a\x05ab"), ("digits_only_test", "a", b"")]
    refused(tff_files.write(tmp_path / "emnist3.sqlite", damaged), "is damaged")


def question(tokens: str, title: str, tags: str) -> bytes:
    fields = {"tokens": tokens, "title": title, "tags": tags}
    return example({**{name: [text.encode()] for name, text in fields.items()}, "score": [1]})


def stackoverflow(folder: Path) -> Path:
    """u1 and u3 are in both parts, u2 only tests, u0 only trains."""
    rows = [
        ("train", "u0", question("never seen", "", "c")),
        ("train", "u1", question("how to sort a list", "sort list", "python|list")),
        ("train", "u1", question("a list", "", "python")),
        ("train", "u3", question("", "", "")),
        ("test", "u1", question("sort sort rare", "", "python|rare")),
        ("test", "u2", question("a", "", "python")),
        ("test", "u3", question("a", "", "list")),
    ]
    return tff_files.write(folder / "stackoverflow.sqlite", rows)


def test_stackoverflow_by_hand(tmp_path: Path) -> None:
    """ "how to sort a list sort list" is 7 words: list 2/7, sort 2/7, a 1/7; how and to count in
    the length only."""
    path = stackoverflow(tmp_path)
    (tmp_path / "stackoverflow.word_count").write_text("a 9\nsort 20\nlist 20\n")
    (tmp_path / "stackoverflow.tag_count").write_text(json.dumps({"list": 5, "python": 7}))
    data = load_file(path)
    assert data.is_sparse
    assert (data.users, data.task) == (("u1", "u3"), "multi-label")
    assert (data.feature_names, data.schema.classes) == (("list", "sort", "a"), ("python", "list"))
    expected = [[2 / 7, 2 / 7, 1 / 7], [1 / 2, 0, 1 / 2]]
    np.testing.assert_allclose(data.matrix(data.rows(0, test=False)), expected)
    np.testing.assert_allclose(data.matrix(data.rows(0, test=True)), [[0, 2 / 3, 0]])
    np.testing.assert_array_equal(data.targets(data.rows(0, test=False)), [[1, 1], [1, 0]])
    np.testing.assert_array_equal(data.matrix(data.rows(1, test=False)), [[0, 0, 0]])
    assert "no epsilon" not in data.describe()


def test_words_counted_in_private_documents_are_said_to_be(tmp_path: Path) -> None:
    data = load_file(stackoverflow(tmp_path), users=1)
    assert data.users == ("u1",)
    assert "words counted in users' training documents: no epsilon covers that" in data.notes
    assert "tags counted in users' training documents: no epsilon covers that" in data.notes


@pytest.mark.parametrize("content", ["a 9\nb nine\n", "{"])
def test_bad_count_files_are_refused(tmp_path: Path, content: str) -> None:
    path = stackoverflow(tmp_path)
    (tmp_path / "stackoverflow.word_count").write_text(content)
    with pytest.raises(ValueError, match=r"stackoverflow\.word_count: "):
        load_file(path)


def leaf_users(folder: Path, part: str, **users: dict[str, list[Any]]) -> None:
    folder = folder / "data" / part
    folder.mkdir(parents=True)
    content = {"users": list(users), "user_data": users}
    (folder / "all_data_0.json").write_text(json.dumps(content))


def test_leafs_files_keep_their_test_parts(tmp_path: Path) -> None:
    """The third user has a test row only."""
    own: dict[str, list[Any]] = {"x": [[1, 2], [3, 4]], "y": [0, 1]}
    leaf_users(tmp_path, "train", a=own, b={"x": [[5, 6]], "y": [1]})
    leaf_users(tmp_path, "test", a={"x": [[7, 8]], "y": [1]}, c={"x": [[9, 9]], "y": [0]})
    data = load_file(tmp_path)
    assert data.users == ("a", "b")
    assert (data.task, data.outputs) == ("classification", 2)
    np.testing.assert_array_equal(data.x[data.test], [[7, 8]])
    np.testing.assert_array_equal(data.x[data.train_rows], [[1, 2], [3, 4], [5, 6]])


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
        load_file(tmp_path)


def pictures(folder: Path, *sizes: int) -> Path:
    """Of each of two users and classes a picture of each size."""
    image = pytest.importorskip("PIL.Image")
    for user, (place, kind) in itertools.product(("ann", "bob"), enumerate(("cat", "dog"))):
        own = folder / user / kind
        own.mkdir(parents=True)
        for number, size in enumerate(sizes):
            grey = np.full((size, size), 50 * place + number, dtype=np.uint8)
            image.fromarray(grey).save(own / f"{number}.png")
    return folder


def test_folders_of_pictures_are_users_and_classes(tmp_path: Path) -> None:
    data = load_file(pictures(tmp_path, 4, 4))
    assert (data.users, data.schema.classes) == (("ann", "bob"), ("cat", "dog"))
    assert (data.x.dtype, data.shape) == (np.uint8, (4, 4))
    own = data.x[data.span(0), 0]
    assert sorted(own.tolist()) == [0, 1, 50, 51]


def test_folders_without_data_or_with_pictures_of_two_sizes_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "here are no .parquet files")
    with pytest.raises(ValueError, match=r"picture 1 has \(5, 5\) pixels and the first .*\(4, 4\)"):
        load_file(pictures(tmp_path, 4, 5))


def test_a_folder_of_parquet_files_is_one_table(tmp_path: Path) -> None:
    for part, speaker in enumerate("pq"):
        frame = pd.DataFrame({"speaker": [speaker] * 2, "pitch": [1.0, 2], "word": ["y", "n"]})
        frame.to_parquet(tmp_path / f"train-{part}.parquet")
    data = load_file(tmp_path, user_column="speaker", target_column="word")
    assert data.users == ("p", "q")
    assert data.feature_names == ("pitch",)
    assert data.schema.classes == ("n", "y")


@needs_real_data
def test_the_digits_of_forty_writers_are_pictures() -> None:
    data = load_file(SHARED / "femnist_like")
    assert (len(data), len(data.y), data.users[0], data.outputs) == (40, 4224, "f0000_00", 10)
    assert (data.x.dtype, data.shape) == (np.uint8, (28, 28))
    named = load_file(SHARED / "femnist_like", user_column="writer_id", target_column="character")
    np.testing.assert_array_equal(named.x, data.x)
    left_out = "left out, beside pictures (--set feature-columns= uses it instead): 'hsf_id'"
    assert left_out in named.notes


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
    parts = ("cannot be loaded", "put its parquet files into a folder")
    refused("speech/commands", *parts, user_column="speaker_id", target_column="label")
