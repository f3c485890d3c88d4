"""TensorFlow Federated's files: messages, federated EMNIST, Stack Overflow tags."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd.lab.data import Columns, load
from flwr_ppsgd.lab.data import tff as tff_module
from flwr_ppsgd.lab.data.emnist import femnist, tff_emnist
from flwr_ppsgd.lab.data.stackoverflow import stackoverflow_tags
from flwr_ppsgd.lab.data.tff import parse_example
from tests.support import tff_files
from tests.support.own_data import needs_real_data
from tests.support.paths import SHARED
from tests.support.tff_files import Row, example

SOURCE = np.random.default_rng(0)


@pytest.mark.parametrize("packed", [True, False])
def test_messages_are_read_as_protobuf_wrote_them(packed: bool) -> None:
    floats = [0.0, -1.5, 3.25e-20, 1e30]
    whole = [0, 1, -1, 127, 128, 300, 2**62, -(2**63)]
    found = parse_example(
        example({"f": floats, "i": whole, "b": [b"", "äö".encode(), b"x" * 300], "0": []}, packed)
    )
    np.testing.assert_array_equal(np.asarray(found["f"]), np.array(floats, dtype=np.float32))
    np.testing.assert_array_equal(np.asarray(found["i"]), np.array(whole, dtype=np.int64))
    assert found["b"] == [b"", "äö".encode(), b"x" * 300]
    assert list(found["0"]) == []


def test_a_message_cut_short_is_refused() -> None:
    whole = example({"pixels": [0.5] * 20, "label": [3]})
    for length in (1, 5, len(whole) // 2, len(whole) - 1):
        with pytest.raises(ValueError, match=r"tf\.train\.Example"):
            parse_example(whole[:length])


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
    data = tff_emnist(tff_files.write(tmp_path / name, emnist_rows()))
    assert (data.users, data.outputs, data.task) == (("a", "b"), 10, "classification")
    assert data.x.dtype == np.uint8
    np.testing.assert_array_equal(data.train_sizes, [2, 3])
    np.testing.assert_array_equal(data.test_sizes, [1, 1])
    seen = data.matrix(data.rows(1, test=False))
    np.testing.assert_allclose(seen[:, 0], np.array([0, 10, 20]) / 255)
    np.testing.assert_array_equal(seen[:, 1:], 1.0)
    np.testing.assert_array_equal(data.y[data.rows(1, test=True)], [9])


def test_pixels_between_bytes_stay_floats(tmp_path: Path) -> None:
    rows = emnist_rows(lambda level: [level / 1000] * 784)
    data = tff_emnist(tff_files.write(tmp_path / "e.sqlite", rows))
    assert data.x.dtype == np.float32
    np.testing.assert_allclose(
        data.matrix(data.rows(1, test=False))[:, 5], [0, 0.01, 0.02], rtol=1e-6
    )


def test_the_first_load_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time no message is parsed; a change of the file or of the options is a first
    time."""
    path, kept = tff_files.write(tmp_path / "e.sqlite", emnist_rows()), tmp_path / "kept"
    first = tff_emnist(path, cache_dir=kept)
    with monkeypatch.context() as patched:
        patched.setattr(tff_module, "parse_example", None)
        again = tff_emnist(path, cache_dir=kept)
    np.testing.assert_array_equal(first.x, again.x)
    assert first.describe() == again.describe()
    assert (first.x.dtype, first.outputs) == (again.x.dtype, again.outputs)
    assert tff_emnist(path, users=1, cache_dir=kept).users == ("a",)
    assert len(list(kept.iterdir())) == 2
    for file in kept.iterdir():
        file.write_bytes(b"broken")
    assert tff_emnist(path, cache_dir=kept).users == ("a", "b")
    path.unlink()
    tff_files.write(path, emnist_rows()[:4])
    assert tff_emnist(path, cache_dir=kept).users == ("b",)


def test_the_cache_is_next_to_the_source_unless_told(tmp_path: Path) -> None:
    tff_emnist(tff_files.write(tmp_path / "e.sqlite", emnist_rows()))
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".npz", ".sqlite"]


def refused(path: Path, *parts: str, by: Any = tff_emnist) -> None:
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        by(path)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("by", [tff_emnist, stackoverflow_tags])
def test_broken_files_are_refused_in_one_line(tmp_path: Path, by: Any) -> None:
    refused(tmp_path / "absent.sqlite", "no such file", ".sqlite.lzma there", by=by)
    whole = tff_files.write(tmp_path / "e.sqlite", emnist_rows()).read_bytes()
    for length in (0, 50, 5000, len(whole) - 1000):
        (tmp_path / "cut.sqlite").write_bytes(whole[:length])
        refused(tmp_path / "cut.sqlite", "not a complete SQLite file", "download it again", by=by)
    (tmp_path / "scrambled.sqlite").write_bytes(whole[:100] + b"\xff" * (len(whole) - 100))
    refused(tmp_path / "scrambled.sqlite", "not a complete SQLite file", by=by)
    packed = tff_files.write(tmp_path / "p.sqlite.lzma", emnist_rows()).read_bytes()
    for content in (packed[: len(packed) // 2], b"no lzma"):
        (tmp_path / "cut.sqlite.lzma").unlink(missing_ok=True)
        (tmp_path / "cut.sqlite").unlink(missing_ok=True)
        (tmp_path / "cut.sqlite.lzma").write_bytes(content)
        refused(tmp_path / "cut.sqlite.lzma", "not a complete SQLite file", by=by)
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    rows = [("train", "a", example({"tokens": [b"x"]})), ("test", "a", example({"tokens": [b"x"]}))]
    path = tff_files.write(tmp_path / "so.sqlite", rows)
    refused(path, "no split 'digits_only_train' among test, train")
    refused(path, "example 0 of 'a' has no 'title'", by=stackoverflow_tags)
    wrong = [
        (f"digits_only_{part}", "a", example({"pixels": [0.5] * 10, "label": [1]}))
        for part in ("train", "test")
    ]
    refused(
        tff_files.write(tmp_path / "short.sqlite", wrong),
        "example 0 of client 'a' has no 784 'pixels'",
    )
    damaged = [("digits_only_train", "a", b"\x0a\x05ab"), ("digits_only_test", "a", b"")]
    refused(
        tff_files.write(tmp_path / "bad.sqlite", damaged), "example 0 of client 'a'", "is damaged"
    )


def question(tokens: str, title: str, tags: str) -> bytes:
    fields = {
        "tokens": tokens,
        "title": title,
        "tags": tags,
        "creation_date": "2017",
        "type": "question",
    }
    return example({**{name: [text.encode()] for name, text in fields.items()}, "score": [1]})


def stackoverflow_rows() -> list[Row]:
    """u1 and u3 are in both parts, u2 only tests, u0 only trains."""
    return [
        ("train", "u0", question("never seen", "", "c")),
        ("train", "u1", question("how to sort a list", "sort list", "python|list")),
        ("train", "u1", question("a list", "", "python")),
        ("train", "u1", question("a third document", "", "c")),
        ("train", "u3", question("", "", "")),
        ("test", "u1", question("sort sort rare", "", "python|rare")),
        ("test", "u2", question("a", "", "python")),
        ("test", "u3", question("a", "", "list")),
        ("heldout", "u4", question("a", "", "list")),
    ]


def counts(folder: Path) -> dict[str, Any]:
    """Public counts, one file as lines and one as JSON; the third most frequent is one too many."""
    (words := folder / "words.txt").write_text("a 9\nsort 20\nlist 20\nrare 1\n", encoding="utf-8")
    (tags := folder / "tags.json").write_text(
        json.dumps({"list": 5, "python": 7, "c": 1}), encoding="utf-8"
    )
    return {"word_counts": words, "tag_counts": tags}


def test_stackoverflow_by_hand(tmp_path: Path) -> None:
    """ "how to sort a list sort list" is 7 words: list 2/7, sort 2/7, a 1/7; how and to count in
    the length only."""
    path = tff_files.write(tmp_path / "stackoverflow.sqlite", stackoverflow_rows())
    data = stackoverflow_tags(path, **counts(tmp_path), words=3, tags=2, max_train=2)
    assert data.is_sparse
    assert (data.users, data.task) == (("u1", "u3"), "multi-label")
    assert (data.feature_names, data.target_names) == (("list", "sort", "a"), ("python", "list"))
    np.testing.assert_array_equal(data.train_sizes, [2, 1])
    np.testing.assert_allclose(
        data.matrix(data.rows(0, test=False)), [[2 / 7, 2 / 7, 1 / 7], [1 / 2, 0, 1 / 2]]
    )
    np.testing.assert_allclose(data.matrix(data.rows(0, test=True)), [[0, 2 / 3, 0]])
    np.testing.assert_array_equal(data.targets(data.rows(0, test=False)), [[1, 1], [1, 0]])
    np.testing.assert_array_equal(data.targets(data.rows(0, test=True)), [[1, 0]])
    np.testing.assert_array_equal(data.matrix(data.rows(1, test=False)), [[0, 0, 0]])
    assert "passed over 1 client ids" in data.describe()
    assert "ε" not in data.describe()
    again = stackoverflow_tags(path, **counts(tmp_path), words=3, tags=2, max_train=2)
    assert again.describe() == data.describe()
    assert (again.x != data.x).nnz == 0


def test_words_counted_in_private_documents_are_said_to_be(tmp_path: Path) -> None:
    path = tff_files.write(tmp_path / "stackoverflow.sqlite.lzma", stackoverflow_rows())
    data = stackoverflow_tags(path, users=1, words=2, tags=1, cache_dir=tmp_path / "kept")
    assert data.users == ("u1",)
    assert (data.feature_names, data.target_names) == (("a", "list"), ("python",))
    assert (
        "vocabulary and tags counted in users' training documents: ε does not account for that"
        in data.describe()
    )


def test_bad_count_files_are_refused(tmp_path: Path) -> None:
    path = tff_files.write(tmp_path / "stackoverflow.sqlite", stackoverflow_rows())
    (words := tmp_path / "words.txt").write_text("a 9\nb nine\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"words\.txt: line 2 is not 'word count': 'b nine'"):
        stackoverflow_tags(path, word_counts=words)
    words.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"words\.txt: cannot be read as JSON"):
        stackoverflow_tags(path, word_counts=words)
    with pytest.raises(ValueError, match=r"absent: cannot be read as text"):
        stackoverflow_tags(path, tag_counts=tmp_path / "absent")


def test_a_data_set_is_known_by_its_name(tmp_path: Path) -> None:
    emnist = tff_files.write(tmp_path / "emnist_all.sqlite", emnist_rows())
    assert load(emnist).outputs == 10
    questions = tff_files.write(tmp_path / "stackoverflow.sqlite.lzma", stackoverflow_rows())
    assert "counted in users' training documents" in load(questions).describe()
    (tmp_path / "stackoverflow.word_count").write_text("a 9\nsort 20\n", encoding="utf-8")
    (tmp_path / "stackoverflow.tag_count").write_text("c 9\n", encoding="utf-8")
    data = load(questions)
    assert (data.feature_names, data.target_names) == (("sort", "a"), ("c",))
    assert load(questions, min_train=2).users == ("u1",)
    (other := tmp_path / "other.sqlite").write_bytes(emnist.read_bytes())
    refused(other, "emnist or stackoverflow in its name", by=load)
    refused(emnist, "leave them out", by=lambda path: load(path, Columns()))
    refused(tmp_path / "absent.csv", "no such file", by=load)


def test_a_cache_that_cannot_be_written_is_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tff_files.write(tmp_path / "emnist.sqlite", emnist_rows())
    (tmp_path / "file").touch()
    assert len(tff_emnist(path, cache_dir=tmp_path / "file" / "below")) == 2
    assert "could not be kept" in caplog.text


def hub_folder(folder: Path, **changes: Any) -> Path:
    """Two writers with 10 digits and 2 letters each, in the columns of the hub's data set."""
    datasets = pytest.importorskip("datasets", reason="flwr-datasets is not installed")
    image = pytest.importorskip("PIL.Image", reason="flwr-datasets is not installed")
    drawn = [image.fromarray(np.full((28, 28), 10 * (i % 12), dtype=np.uint8)) for i in range(24)]
    columns = {
        "image": drawn,
        "writer_id": ["w1"] * 12 + ["w0"] * 12,
        "character": [*range(12)] * 2,
        **changes,
    }
    (folder / "data").mkdir(parents=True)
    table = datasets.Dataset.from_dict(
        {name: column for name, column in columns.items() if column is not None}
    )
    table.cast_column("image", datasets.Image()).to_parquet(
        folder / "data" / "train-00000-of-00001.parquet"
    )
    return folder


@pytest.mark.filterwarnings("ignore")  # other packages' own, on import
def test_the_hubs_columns_in_a_folder(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "femnist")
    data = femnist(folder, cache_dir=tmp_path / "kept")
    assert (data.users, data.outputs) == (("w0", "w1"), 10)
    np.testing.assert_array_equal(data.train_sizes, [9, 9])
    np.testing.assert_array_equal(data.test_sizes, [1, 1])
    assert data.x.dtype == np.uint8
    np.testing.assert_array_equal(data.x[:, 400], 10 * data.y)
    again = femnist(folder, cache_dir=tmp_path / "kept")
    np.testing.assert_array_equal(data.test, again.test)
    assert femnist(folder, digits=False, cache_dir=tmp_path / "kept").outputs == 62
    with pytest.raises(ValueError, match="no column 'writer_id' among image, character"):
        femnist(hub_folder(tmp_path / "other", writer_id=None), cache_dir=tmp_path / "kept")
    with pytest.raises(ValueError, match="'character' has no digit"):
        femnist(hub_folder(tmp_path / "letters", character=[11] * 24), cache_dir=tmp_path / "kept")


@pytest.mark.filterwarnings("ignore")
@needs_real_data
def test_forty_writers(tmp_path: Path) -> None:
    pytest.importorskip("flwr_datasets", reason="flwr-datasets is not installed")
    data = femnist(SHARED / "femnist_like", cache_dir=tmp_path)
    assert (len(data), len(data.y), data.users[0]) == (40, 4224, "f0000_00")
    assert data.test_sizes.min() > 0


@pytest.mark.filterwarnings("ignore")
def test_without_a_network_one_line_says_what_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = pytest.importorskip("flwr_datasets", reason="flwr-datasets is not installed")

    def unreachable(**_: Any) -> None:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(package, "FederatedDataset", unreachable)
    with pytest.raises(ValueError, match="flwrlabs/femnist: cannot be loaded") as caught:
        femnist(cache_dir=tmp_path)
    assert str(tmp_path / "flwrlabs-femnist.") in str(caught.value)
    assert "put its parquet files into a folder" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="absent: there is no such folder"):
        femnist(tmp_path / "absent")
