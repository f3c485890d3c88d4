"""Own files: what is read, detected, split, noted and refused."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from flwr_ppsgd.lab.data import Columns
from flwr_ppsgd.lab.data.files import public_statistics, read
from flwr_ppsgd.lab.data.npz import mean_of_one_hots, write_npz
from flwr_ppsgd.lab.data.per_user import PerUser
from flwr_ppsgd.lab.data.raw import detect
from flwr_ppsgd.lab.data.split import Split
from tests.support.own_data import needs_real_data
from tests.support.paths import SHARED

SOURCE = np.random.default_rng(0)


def arrays(**changes: Any) -> dict[str, Any]:
    """Three users with 4 rows each, out of order; the last row of each is the test part; two
    classes."""
    user = np.tile([2, 0, 1], 4)
    whole = {
        "user": user,
        "x": np.arange(24.0).reshape(12, 2),
        "y": np.arange(12) % 2,
        "test": np.arange(12) >= 9,
    }
    return {key: value for key, value in {**whole, **changes}.items() if value is not None}


def npz(folder: Path, **changes: Any) -> Path:
    path = folder / "data.npz"
    np.savez(path, **arrays(**changes))
    return path


def csv(folder: Path, text: str) -> Path:
    path = folder / "data.csv"
    path.write_text(text, encoding="utf-8")
    return path


RATINGS = """reader,day,pages,genre,stars
ann,3,100,a,4.5
bob,1,200,b,2.0
ann,1,300,a,3.5
bob,2,400,b,1.5
ann,2,500,a,5.0
bob,3,600,b,2.5
"""


def refused(path: Path, *parts: str, **options: Any) -> str:
    """One line that begins with the file's name and has these parts."""
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        read(path, options.pop("columns", None), **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


def same(a: PerUser, b: PerUser) -> None:
    for name in (
        "users",
        "task",
        "outputs",
        "bias",
        "feature_names",
        "target_names",
        "notes",
        "features",
    ):
        assert getattr(a, name) == getattr(b, name), name
    np.testing.assert_array_equal(a.test, b.test)
    np.testing.assert_array_equal(a.offsets, b.offsets)
    for test in (False, True):
        for mine, other in zip(a.part(test=test), b.part(test=test), strict=True):
            assert sparse.issparse(mine) == sparse.issparse(other)
            np.testing.assert_array_equal(
                *(v.toarray() if sparse.issparse(v) else v for v in (mine, other))
            )


def test_rows_are_sorted_by_user_and_stay_together(tmp_path: Path) -> None:
    data = read(npz(tmp_path))
    assert data.users == (0, 1, 2)
    np.testing.assert_array_equal(data.offsets, [0, 4, 8, 12])
    np.testing.assert_array_equal(data.x[data.rows(1, test=False)], [[4, 5], [10, 11], [16, 17]])
    np.testing.assert_array_equal(data.x[data.rows(2, test=True)], [[18, 19]])
    np.testing.assert_array_equal(data.y[data.rows(0, test=False)], [1, 0, 1])


def test_a_csv_with_names_of_its_own_and_dates(tmp_path: Path) -> None:
    """The last third of each user by day is the test part; words are left out with a note; real
    targets."""
    columns = Columns(user="reader", target="stars", time="day")
    data = read(csv(tmp_path, RATINGS), columns, split=Split(1 / 3))
    assert data.users == ("ann", "bob")
    assert data.task == "regression"
    assert data.feature_names == ("pages",)
    np.testing.assert_array_equal(data.matrix(data.rows(0, test=True)), [[100.0]])
    np.testing.assert_array_equal(data.matrix(data.rows(1, test=True)), [[600.0]])
    np.testing.assert_array_equal(data.targets(data.rows(0, test=False)), [[3.5], [5.0]])
    assert (
        "left out, not numeric (use --categorical or --text to add them): 'genre' ('a' in line 2)"
        in data.describe()
    )
    assert "test part: the last 33% of each user's rows" in data.describe()
    dated = (
        RATINGS.replace(",3,", ",2024-03-01,")
        .replace(",1,", ",2023-12-31,")
        .replace(",2,", ",2024-01-05,")
    )
    same(data, read(csv(tmp_path, dated), columns, split=Split(1 / 3)))


def test_parquet_gives_what_csv_gives(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    path = tmp_path / "data.parquet"
    columns = Columns(user="reader", target="stars", time="day")
    pandas.read_csv(csv(tmp_path, RATINGS)).to_parquet(path)
    same(
        replace(read(csv(tmp_path, RATINGS), columns), notes=()),
        replace(read(path, columns), notes=()),
    )


def test_a_test_column_and_named_features(tmp_path: Path) -> None:
    text = "user,test,a,b,y\n7,0,1,2,0\n7,1,3,4,1\n9,False,5,6,1\n".replace("False", "0")
    data = read(csv(tmp_path, text), Columns(features=("b",)))
    assert data.users == (7, 9)
    np.testing.assert_array_equal(data.x, [[2], [4], [6]])
    np.testing.assert_array_equal(data.test, [False, True, False])
    assert "leave gaps (the first: 0)" in data.describe()
    assert "no test rows, so trained but not measured: 1 user: 9 (1)" in data.describe()


def test_users_that_differ_by_leading_zeros_stay_apart(tmp_path: Path) -> None:
    data = read(csv(tmp_path, "user,a,y\n007,1,.5\n7,1,.5\n007,2,.5\n7,1,.25\n"))
    assert data.users == ("007", "7")


def test_classes_may_be_words(tmp_path: Path) -> None:
    data = read(csv(tmp_path, "user,a,y\n1,1,walk\n1,2,run\n2,3,sit\n2,4,walk\n"))
    assert data.target_names == ("run", "sit", "walk")
    np.testing.assert_array_equal(data.y, [2, 0, 1, 2])


def test_several_target_columns_are_labels_or_outputs(tmp_path: Path) -> None:
    text = "user,a,s,t\n1,1,0,1\n1,2,1,1\n2,3,0,0\n2,4,1,0\n"
    labels = read(csv(tmp_path, text), Columns(target="s,t"))
    assert (labels.task, labels.outputs, labels.target_names) == ("multi-label", 2, ("s", "t"))
    np.testing.assert_array_equal(labels.y.toarray(), [[0, 1], [1, 1], [0, 0], [1, 0]])
    real = read(csv(tmp_path, text.replace("1,2,1,1", "1,2,1.5,1")), Columns(target="s,t"))
    assert (real.task, real.outputs) == ("regression", 2)


@pytest.mark.parametrize(
    ("n", "fraction", "expected"), [(1, 0.2, 0), (2, 0.2, 1), (10, 0.25, 2), (3, 0.9, 2)]
)
def test_a_split_never_takes_all(n: int, fraction: float, expected: int) -> None:
    offsets = np.array([0, n, 2 * n])
    test = Split(fraction, seed=1).mask(offsets, None)
    assert [test[:n].sum(), test[n:].sum()] == [expected, expected]


def test_a_random_split_is_decided_by_its_seed() -> None:
    offsets = np.array([0, 50, 100])
    first, again, other = (Split(0.3, seed).mask(offsets, None) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first[:50] != first[50:]).any()


@pytest.mark.parametrize(
    ("y", "task"),
    [
        ([0, 1, 2], "classification"),
        (range(62), "classification"),
        ([1, 2, 3, 4, 5], "classification"),  # refused later: labels must start at 0
        (range(101), "regression"),
        ([*range(0, 60, 2)], "regression"),
        (range(1, 71), "regression"),
        ([1.0, 2.0], "regression"),
        ([[0, 1], [1, 1]], "multi-label"),
        ([[0.5, 1], [1, 1]], "regression"),
    ],
)
def test_the_task_is_detected(y: Any, task: str) -> None:
    assert detect(np.array(y)) == task


def test_whole_numbers_stored_as_reals_raise_a_doubt(tmp_path: Path) -> None:
    path = npz(tmp_path, y=np.arange(12) % 2 * 1.0)
    assert (
        "real numbers, though all values are whole numbers: they may be classes"
        in read(path).describe()
    )
    assert read(path, task="classification").outputs == 2


@pytest.mark.parametrize("column", ["user", "y"])
@pytest.mark.parametrize("dtype", ["Int64", "string", "Float64"])
def test_gaps_of_every_kind_of_column_are_found(tmp_path: Path, column: str, dtype: str) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame({"user": [1, 1, 2, 2], "a": [0.5, 1, 2, 3], "y": [0, 1, 0, 1]})
    frame[column] = pandas.array(
        ["1", "0", None, "1"] if dtype == "string" else [1, 0, None, 1], dtype=dtype
    )
    frame.to_parquet(path := tmp_path / "gaps.parquet")
    refused(path, f"column {column!r}", "in row 2")


def test_the_task_can_be_given(tmp_path: Path) -> None:
    data = read(npz(tmp_path, y=np.arange(12) % 5 + 1), task="regression")
    assert (data.task, data.outputs) == ("regression", 1)
    assert "detected" not in data.describe()


def sparse_arrays(**changes: Any) -> dict[str, Any]:
    """Two users with two documents of five words; row 1 is {0: 2, 3: 1, 4: 1}."""
    whole = {
        "user": [0, 0, 1, 1],
        "indptr": [0, 1, 4, 4, 5],
        "indices": [1, 0, 3, 4, 2],
        "counts": np.array([3, 2, 1, 1, 4], dtype=np.uint8),
        "vocab": list("abcde"),
        "test": [0, 1, 0, 1],
        "tag_indptr": [0, 1, 3, 3, 4],
        "tag_indices": [0, 0, 2, 1],
        "tag_names": list("xyz"),
    }
    return {key: value for key, value in {**whole, **changes}.items() if value is not None}


def test_bags_of_words_are_means_of_one_hots(tmp_path: Path) -> None:
    np.savez(path := tmp_path / "bags.npz", **sparse_arrays())
    data = read(path)
    assert data.is_sparse
    assert (data.task, data.outputs, data.features) == ("multi-label", 3, 5)
    np.testing.assert_allclose(data.matrix(np.array([1, 2])), [[0.5, 0, 0, 0.25, 0.25], [0.0] * 5])
    np.testing.assert_array_equal(
        data.targets(np.array([1, 2]), shift=0.1) + 0.1, [[1, 0, 1], [0, 0, 0]]
    )


def test_words_out_of_the_vocabulary_count_in_the_length(tmp_path: Path) -> None:
    np.savez(path := tmp_path / "bags.npz", **sparse_arrays(length=[6, 8, 5, 4]))
    np.testing.assert_allclose(
        read(path).matrix(np.array([0, 1])), [[0, 0.5, 0, 0, 0], [0.25, 0, 0, 0.125, 0.125]]
    )


def test_plain_csr_with_classes(tmp_path: Path) -> None:
    changes = {
        "counts": None,
        "tag_indptr": None,
        "data": np.array([1.5, -2, 1, 1, 4]),
        "y": [0, 1, 1, 0],
    }
    np.savez(path := tmp_path / "csr.npz", **sparse_arrays(**changes))
    data = read(path)
    assert data.task == "classification"
    np.testing.assert_array_equal(data.matrix(np.array([1])), [[-2, 0, 0, 1, 1]])


def test_a_mean_of_one_hots_by_hand() -> None:
    counts = sparse.csr_array(np.array([[2.0, 0, 2], [0, 0, 0]]))
    np.testing.assert_array_equal(mean_of_one_hots(counts).toarray(), [[0.5, 0, 0.5], [0, 0, 0]])


@pytest.mark.parametrize("kind", ["dense", "sparse", "regression"])
def test_what_is_written_is_read_again(tmp_path: Path, kind: str) -> None:
    if kind == "sparse":
        np.savez(path := tmp_path / "bags.npz", **sparse_arrays())
    else:
        changes = (
            {"y": SOURCE.normal(size=12)}
            if kind == "regression"
            else {"x": np.ones((12, 4), dtype=np.uint8)}
        )
        path = npz(tmp_path, **changes)
    data = read(path).with_bias()
    write_npz(data, copy := tmp_path / "new" / "copy.npz")
    same(data, read(copy))
    assert [file.name for file in copy.parent.iterdir()] == ["copy.npz"]


def test_users_with_too_few_rows_are_named(tmp_path: Path) -> None:
    user = np.array([0] * 8 + [1] * 3 + [2])
    path = npz(tmp_path, user=user, test=np.arange(12) == 0)
    assert "fewer than 5 training rows, so smaller minibatches: 2 users: 1 (3), 2 (1)" in read(
        path
    ).describe(5)
    data = read(path, min_train=2)
    assert data.users == (0, 1)
    assert "left out 1 user: 2 (1) with fewer than 2 training rows" in data.describe()
    refused(path, "no user has 100 training rows: the most is 7", min_train=100)


def test_an_asked_for_split_passes_over_the_test_column(tmp_path: Path) -> None:
    data = read(npz(tmp_path), split=Split(0.5))
    assert "column 'test' left out" in data.describe()
    np.testing.assert_array_equal(data.test_sizes, [2, 2, 2])


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no x": ({"x": None}, ("no array 'x' among user, y, test", "did you mean")),
    "no user": ({"user": None}, ("no array 'user' among",)),
    "user with gaps": (
        {"user": np.array([0.0] * 5 + [np.nan] + [1.0] * 6)},
        ("'user' is empty in row 5",),
    ),
    "blank user": ({"user": np.array(["a"] * 11 + [" "])}, ("'user' is empty in row 11",)),
    "NaN feature": (
        {"x": np.where(np.arange(24) == 13, np.nan, 1.0).reshape(12, 2)},
        ("feature 1", "in row 6"),
    ),
    "infinite target": (
        {"y": np.where(np.arange(12) == 3, np.inf, 0.5)},
        ("'y' is not a finite number in row 3",),
    ),
    "lengths": ({"y": np.arange(11) % 2}, ("'y' has shape (11,) and 'user' has 12 rows",)),
    "test-only user": (
        {"test": np.tile([False, True, False], 4)},
        ("user 0 has test rows only", "in row 1"),
    ),
    "test values": ({"test": np.arange(12)}, ("'test' is neither 0 nor 1 in row 2",)),
    "empty": ({"user": [], "x": np.empty((0, 2)), "y": [], "test": []}, ("there are no rows",)),
    "one number": ({"user": 3}, ("'user' must have one value per row, got shape ()",)),
    "one target": ({"y": 3}, ("'y' has shape () and 'user' has 12",)),
    "words": ({"x": np.full((12, 2), "a")}, ("features must be real numbers",)),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_npz_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    changes, parts = BAD[case]
    refused(npz(tmp_path, **changes), *parts)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"indptr": [0, 1, 4, 4, 6]}, ("'indptr' must rise from 0 to the length of 'indices', 5",)),
        (
            {"indices": [1, 0, 3, 9, 2]},
            ("'indices' has column 9 in row 1 and there are 5 columns",),
        ),
        ({"counts": None}, ("no array 'data'",)),
        ({"tag_indices": None}, ("no array 'tag_indices'",)),
        ({"user": [0, 0, 1]}, ("'x' has shape (4, 5) and 'user' has 3 rows",)),
    ],
)
def test_bad_csr_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    np.savez(path := tmp_path / "bags.npz", **sparse_arrays(**changes))
    refused(path, *parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("person,a,y\n1,2,3\n", ("no column 'user' among person, a, y", "did you mean")),
        ("user,a,z\n1,2,3\n", ("no column 'y'",)),
        ("user,a,y\n1,2,0\n,3,1\n", ("'user' is empty in line 3",)),
        ("user,a,y\n1,2,0\n1,,1\n", ("column 'a' is not a finite number in line 3",)),
        ("user,a,y\n1,2,0.5\n1,3,\n", ("'y' is not a finite number in line 3",)),
        ("user,a,y\n1,2,\n1,3,b\n", ("'y' is empty in line 2",)),
        ("user,a,y\n1,x,0\n1,y,1\n", ("no numeric feature column",)),
        ("user,a,y,test\n1,2,0,1\n2,3,0,0\n", ("user 1 has test rows only, the first in line 2",)),
        ("user,a,y\n1,2,0\n1,2,3,4,5\n", ("cannot be read as csv",)),
        ("", ("cannot be read as csv",)),
    ],
)
def test_a_bad_csv_is_refused_in_one_line(
    tmp_path: Path, text: str, parts: tuple[str, ...]
) -> None:
    refused(csv(tmp_path, text), *parts)


def test_bad_columns_are_refused(tmp_path: Path) -> None:
    path = csv(tmp_path, RATINGS)
    named: dict[str, Any] = {"user": "reader", "target": "stars"}
    refused(
        path,
        "feature column 'genre' is not numeric, 'a' in line 2",
        columns=Columns(**named, features=("genre",)),
    )
    refused(path, "'genre' is not a time ('a') in line 2", columns=Columns(**named, time="genre"))
    refused(path, "no column 'page'", "'pages'", columns=Columns(**named, time="page"))
    refused(path, "no column 'held'", columns=Columns(**named, test="held"))
    refused(path, "both given", columns=Columns(**named, test="day"), split=Split())
    refused(
        npz(tmp_path), "feature columns are for .csv and .parquet", columns=Columns(features=("x",))
    )
    with pytest.raises(ValueError, match="not both"):
        Columns(test="a", time="b")
    with pytest.raises(ValueError, match="between 0 and 1"):
        Split(float("nan"))


def test_files_that_are_none(tmp_path: Path) -> None:
    refused(tmp_path / "absent.npz", "no such file")
    (tmp_path / "data.xlsx").touch()
    refused(tmp_path / "data.xlsx", ".npz, .csv, .parquet")
    whole = npz(tmp_path).read_bytes()
    for content in (b"", b"no zip", whole[: len(whole) // 2]):
        (tmp_path / "broken.npz").write_bytes(content)
        refused(tmp_path / "broken.npz", "cannot be read as npz")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    refused(tmp_path / "broken.parquet", "cannot be read as parquet")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    refused(csv(tmp_path, RATINGS), "'pyarrow'", "pip install 'flwr-ppsgd[data]'")


def test_public_statistics_by_name_and_by_place(tmp_path: Path) -> None:
    data = read(csv(tmp_path, RATINGS), Columns(user="reader", target="stars"))
    (path := tmp_path / "public.csv").write_text(
        "feature,mean,std\npages,300,100\nday,2,1\n", encoding="utf-8"
    )
    mean, std = public_statistics(path, data)
    np.testing.assert_array_equal([mean, std], [[2, 300], [1, 100]])
    seen = data.standardised(mean, std)
    np.testing.assert_array_equal(seen.matrix(np.array([0])), [[1, -2]])
    np.savez(path := tmp_path / "public.npz", mean=mean, std=std)
    np.testing.assert_array_equal(public_statistics(path, data), [mean, std])
    (path := tmp_path / "short.csv").write_text(
        "feature,mean,std\npages,300,100\n", encoding="utf-8"
    )
    with pytest.raises(ValueError, match="no feature 'day'"):
        public_statistics(path, data)


@needs_real_data
def test_the_writers_of_mnist_load() -> None:
    data = read(SHARED / "mnist_writer.npz")
    assert data.x.dtype == np.uint8
    assert (len(data), data.outputs, data.train_sizes.sum(), data.test_sizes.sum()) == (
        580,
        10,
        58_916,
        5_800,
    )
    assert data.matrix(data.rows(3, test=False)).max() == 1.0


@needs_real_data
def test_the_tags_of_zephyr_are_sparse_means() -> None:
    data = read(SHARED / "zephyr_tags.npz")
    assert (len(data), data.features, data.outputs, data.task) == (191, 5000, 80, "multi-label")
    totals = data.matrix(data.rows(5, test=True)).sum(axis=1)
    assert ((np.abs(totals - 1) < 1e-12) | (totals == 0)).all()
