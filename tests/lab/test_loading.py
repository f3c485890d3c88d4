"""Own files as people have them: what is read, found, split, noted and refused."""

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from flwr_ppsgd.lab.features import bucket_of
from flwr_ppsgd.lab.find_schema import MOST_ONE_HOT
from flwr_ppsgd.lab.per_user import PerUser, held_out_rows
from flwr_ppsgd.lab.problem import Problem
from flwr_ppsgd.lab.schema import BUCKETS
from tests.support.own_data import load_file, needs_real_data
from tests.support.paths import SHARED


def npz(folder: Path, **changes: Any) -> Path:
    """Three users with 4 rows each, out of order; the last row of each is the test part; two
    classes."""
    whole: dict[str, Any] = {
        "user": np.tile([2, 0, 1], 4),
        "x": np.arange(24.0).reshape(12, 2),
        "y": np.arange(12) % 2,
        "test": np.arange(12) >= 9,
    }
    arrays = {key: value for key, value in {**whole, **changes}.items() if value is not None}
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


def csv(folder: Path, content: str | bytes) -> Path:
    path = folder / "data.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read_csv(folder: Path, content: str | bytes, **options: Any) -> PerUser:
    return load_file(csv(folder, content), **options)


def refused(path: Path, *parts: str, **options: Any) -> None:
    """One line that begins with the file's name and has these parts."""
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        load_file(path, **options)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def parquet(folder: Path, **columns: Any) -> Path:
    pd.DataFrame(columns).to_parquet(path := folder / "data.parquet")
    return path


RATINGS = """reader,day,pages,genre,stars
ann,3,100,a,4.5
bob,1,200,b,2.0
ann,1,300,a,3.5
bob,2,400,b,1.5
ann,2,500,a,5.0
bob,3,600,b,2.5
"""


NAMED: dict[str, Any] = {"user_column": "reader", "target_column": "stars"}


def test_rows_are_sorted_by_user_and_stay_together(tmp_path: Path) -> None:
    data = load_file(npz(tmp_path))
    assert data.users == ("0", "1", "2")
    np.testing.assert_array_equal(data.offsets, [0, 4, 8, 12])
    np.testing.assert_array_equal(data.x[data.rows(1, test=False)], [[4, 5], [10, 11], [16, 17]])
    np.testing.assert_array_equal(data.x[data.rows(2, test=True)], [[18, 19]])
    np.testing.assert_array_equal(data.y[data.rows(0, test=False)], [1, 0, 1])


@pytest.mark.parametrize("kind", ["csv", "dates", "parquet"])
def test_names_of_its_own_times_and_categories(tmp_path: Path, kind: str) -> None:
    """The last third of each user by day is the test part; few words are categories."""
    text = RATINGS
    if kind == "dates":
        for day, date in ((3, "2024-03-01"), (1, "2023-12-31"), (2, "2024-01-05")):
            text = text.replace(f",{day},", f",{date},")
    path = csv(tmp_path, text)
    if kind == "parquet":
        path = parquet(tmp_path, **pd.read_csv(path))
    data = load_file(path, **NAMED, time_column="day", test_fraction=1 / 3)
    assert data.users == ("ann", "bob")
    assert data.task == "regression"
    assert data.feature_names == ("pages", "genre=a", "genre=b")
    np.testing.assert_array_equal(data.matrix(data.rows(0, test=True)), [[100, 1, 0]])
    np.testing.assert_array_equal(data.matrix(data.rows(1, test=True)), [[600, 0, 1]])
    np.testing.assert_array_equal(data.targets(data.rows(0, test=False)), [[3.5], [5.0]])
    assert "taken as categories: 'genre' (2 words) (--exclude leaves them out)" in data.notes
    assert "test part: the last 33% of each user's rows" in data.notes


def test_users_are_text(tmp_path: Path) -> None:
    text = "user,a,y\n007,1,.5\n7,1,.5\nNA,2,.5\n7.0,1,.25\n nan,3,.5\n"
    data = read_csv(tmp_path, text)
    assert data.users == ("007", "7", "7.0", "NA", "nan")
    assert "users are text: '007' and '7' and '7.0' are not the same" in data.notes


@pytest.mark.parametrize("dtype", ["int64", "Int64", "float64", "category", "string"])
def test_users_of_a_parquet_file_are_called_as_in_text(tmp_path: Path, dtype: str) -> None:
    user = pd.Series([7, 7, 10, 10])
    user = (user.astype(str) if dtype in ("category", "string") else user).astype(dtype)
    path = parquet(tmp_path, user=user, a=[0.5, 1, 2, 3], y=[0.5, 1, 0, 1])
    assert load_file(path).users == ("7", "10")


def test_a_test_column_and_named_features(tmp_path: Path) -> None:
    text = "user,test,a,b,y\n7,0,1,2,0\n7,1,3,4,1\n9,train,5,6,1\n"
    data = read_csv(tmp_path, text, feature_columns="b")
    np.testing.assert_array_equal(data.x, [[2], [4], [6]])
    np.testing.assert_array_equal(data.test, [False, True, False])
    assert "no test rows, so trained but not measured: 1 user: '9' (1)" in data.describe()


def test_several_target_columns_are_labels_or_outputs(tmp_path: Path) -> None:
    text = "user,a,s,t\n1,1,0,1\n1,2,1,1\n2,3,0,0\n2,5,1,0\n"
    labels = read_csv(tmp_path, text, target_column="s,t")
    assert (labels.task, labels.outputs, labels.schema.classes) == ("multi-label", 2, ("s", "t"))
    np.testing.assert_array_equal(labels.y.toarray(), [[0, 1], [1, 1], [0, 0], [1, 0]])
    real = read_csv(tmp_path, text.replace("1,2,1,1", "1,2,1.5,1"), target_column="s,t")
    assert (real.task, real.outputs) == ("regression", 2)


@pytest.mark.parametrize(
    ("n", "fraction", "expected"), [(1, 0.2, 0), (2, 0.2, 1), (10, 0.25, 2), (3, 0.9, 2)]
)
def test_a_split_never_takes_all(n: int, fraction: float, expected: int) -> None:
    test = held_out_rows(np.array([0, n, 2 * n]), fraction, seed=1)
    assert [test[:n].sum(), test[n:].sum()] == [expected, expected]


def test_a_random_split_is_decided_by_its_seed() -> None:
    offsets = np.array([0, 50, 100])
    first, again, other = (held_out_rows(offsets, 0.3, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first[:50] != first[50:]).any()


@pytest.mark.parametrize(
    ("y", "task", "classes"),
    [
        ([0, 1, 2], "classification", ("0", "1", "2")),
        ([0, 2, 5], "classification", ("0", "1", "2", "3", "4", "5")),
        (range(62), "classification", tuple(map(str, range(62)))),
        ([3, 1, 5], "classification", ("1", "3", "5")),
        (["walk", "run", "sit"], "classification", ("run", "sit", "walk")),
        ([True, False], "classification", ("False", "True")),
        (range(101), "regression", ()),
        ([*range(0, 60, 2)], "regression", ()),
        ([1.0, 2.0], "regression", ()),
        ([[0, 1], [1, 1]], "multi-label", ("0", "1")),
        ([[0.5, 1], [1, 1]], "regression", ("0", "1")),
    ],
)
def test_the_task_is_detected(tmp_path: Path, y: Any, task: str, classes: Any) -> None:
    targets = np.array(y)
    rows = len(targets)
    path = npz(tmp_path, user=np.zeros(rows), x=np.eye(rows), y=targets, test=None)
    data = load_file(path)
    assert (data.task, data.schema.classes) == (task, classes)
    assert any(note.startswith("detected from 'y'") for note in data.notes)


def test_the_task_can_be_given(tmp_path: Path) -> None:
    path = npz(tmp_path, y=np.arange(12) % 2 * 1.0)
    assert "whole numbers: they may be classes" in load_file(path).describe()
    given = load_file(path, task="classification")
    assert (given.task, given.outputs) == ("classification", 2)
    assert "detected" not in given.describe()


def bags(folder: Path, **changes: Any) -> Path:
    """Two users with two documents of five words; row 1 is {0: 2, 3: 1, 4: 1}."""
    words = {"indptr": [0, 1, 4, 4, 5], "indices": [1, 0, 3, 4, 2], "vocab": list("abcde")}
    words["counts"] = np.array([3, 2, 1, 1, 4], dtype=np.uint8)
    tags = {"tag_indptr": [0, 1, 3, 3, 4], "tag_indices": [0, 0, 2, 1], "tag_names": list("xyz")}
    whole = {"user": [0, 0, 1, 1], "test": [0, 1, 0, 1], **words, **tags, **changes}
    given = {key: value for key, value in whole.items() if value is not None}
    np.savez(path := folder / "bags.npz", **given)
    return path


def test_bags_of_words_are_means_of_one_hots(tmp_path: Path) -> None:
    data = load_file(bags(tmp_path))
    assert data.is_sparse
    assert (data.task, data.outputs, data.features) == ("multi-label", 3, 5)
    np.testing.assert_allclose(data.matrix(np.array([1, 2])), [[0.5, 0, 0, 0.25, 0.25], [0.0] * 5])
    np.testing.assert_array_equal(data.targets(np.array([1, 2])), [[1, 0, 1], [0, 0, 0]])
    longer = load_file(bags(tmp_path, length=[6, 8, 5, 4]))  # with words out of the vocabulary
    expected = [[0, 0.5, 0, 0, 0], [0.25, 0, 0, 0.125, 0.125]]
    np.testing.assert_allclose(longer.matrix(np.array([0, 1])), expected)


def test_plain_csr_with_classes(tmp_path: Path) -> None:
    values = {"data": np.array([1.5, -2, 1, 1, 4]), "y": [0, 1, 1, 0]}
    data = load_file(bags(tmp_path, counts=None, tag_indptr=None, tag_names=None, **values))
    assert data.task == "classification"
    np.testing.assert_array_equal(data.matrix(np.array([1])), [[-2, 0, 0, 1, 1]])


def test_users_with_too_few_rows_are_named(tmp_path: Path) -> None:
    user = np.array([0] * 8 + [1] * 3 + [2])
    path = npz(tmp_path, user=user, test=np.arange(12) == 0)
    assert "2 users: '1' (3), '2' (1)" in load_file(path).describe(5)
    data = load_file(path, min_train=2)
    assert data.users == ("0", "1")
    assert "left out 1 user: '2' (1) with fewer than 2 training rows" in data.describe()
    assert "who is left out" in data.looked
    assert load_file(path, users=1).users == ("0",)
    with pytest.raises(ValueError, match="no user has 100 training rows: the most is 7"):
        load_file(path, min_train=100)


def test_an_asked_for_split_passes_over_the_test_column(tmp_path: Path) -> None:
    data = load_file(npz(tmp_path), test_fraction=0.5)
    assert "column 'test' left out" in data.describe()
    np.testing.assert_array_equal(data.test_sizes, [2, 2, 2])


ONE_CLASS = np.full(12, "a")
ONE_NAN = np.where(np.arange(24) == 13, np.nan, 1.0).reshape(12, 2)
EMPTY: dict[str, Any] = {"user": [], "x": np.empty((0, 2)), "y": [], "test": []}
BAD_NPZ: list[tuple[dict[str, Any], str]] = [
    ({"x": None}, "no array 'x' among user, y, test: did you mean"),
    ({"user": None}, "(--user names the column)"),
    ({"user": np.array([0.0] * 5 + [np.nan] + [1.0] * 6)}, "'user' is empty in row 5"),
    ({"user": np.array(["a"] * 11 + [" "])}, "'user' is empty in row 11"),
    ({"x": ONE_NAN}, "feature 1, is not a finite number in row 6"),
    ({"y": np.where(np.arange(12) == 3, np.inf, 0.5)}, "'y' is not a finite number in row 3"),
    ({"y": np.arange(11) % 2}, "'y' has shape (11,) and 'user' has 12 rows"),
    ({"test": np.tile([0, 1, 0], 4)}, "user '0' has test rows only, the first in row 1"),
    ({"test": np.arange(12)}, "'test' is neither 0 nor 1 in row 2"),
    (EMPTY, "there are no rows"),
    ({"user": 3}, "'user' must have one value per row, got shape ()"),
    ({"y": ONE_CLASS}, "'y' has one class, 'a': there is nothing to learn: name another --target"),
    ({"x": np.full((12, 2), "a")}, "features must be real numbers"),
]
NO_CSR = "indptr, indices, counts are not those of one CSR matrix"
BAD_BAGS: list[tuple[dict[str, Any], str]] = [
    ({"indptr": [0, 1, 4, 4, 6]}, NO_CSR),
    ({"indices": [1, 0, 3, 9, 2]}, NO_CSR),
    ({"counts": None}, "no array 'data'"),
    ({"tag_indices": None}, "no array 'tag_indices'"),
    ({"user": [0, 0, 1]}, "has shape (4,) and 'user' has 3 rows"),
]


@pytest.mark.parametrize(
    ("make", "changes", "part"),
    [(npz, *bad) for bad in BAD_NPZ] + [(bags, *bad) for bad in BAD_BAGS],
)
def test_bad_arrays_are_refused_in_one_line(
    tmp_path: Path, make: Any, changes: dict[str, Any], part: str
) -> None:
    refused(make(tmp_path, **changes), part)


LONG_AMOUNTS = "".join(f'1,{row * 7 % 9},"{row},204"\n' for row in range(20))
BAD_CSV: dict[str | bytes, str] = {  # what is in the file, and what the line says
    "person,a,y\n1,2,3\n": "no column 'user' among person, a, y: did you mean",
    "user,a,z\n1,2,3\n": "no column 'y'",
    "user,a,y\n1,2,0\n,3,1\n": "'user' is empty in line 3: --impute drop leaves such rows out",
    "user,a,y\n1,2,0.5\n1,3,\n": "'y' is not a finite number in line 3: --impute drop leaves such",
    "user,a,y\n1,2,\n1,3,b\n1,3,c\n": "'y' is empty in line 2",
    "user,a,y,test\n1,2,0,1\n2,3,1,0\n": "user '1' has test rows only, the first in line 2",
    "user,a,y\n1,2,0\n\n1,nan,1\n": "column 'a' is not a finite number in line 4: add "
    "--impute with one of drop, own-mean, zero, or --exclude a",
    "user,a,y\n1,2,0\n1,inf,1\n": "column 'a' is not a finite number in line 3",
    "user,a,y\n1,2,0\n1,1e300,1\n": "column 'a' is not a finite number in line 3",
    "user,a,y\n1,2,0.5\n1,3,-1e200\n": "column 'y' is not a finite number in line 3",
    "user,a,y\n1,2,0\n1,2\n1,3\n": "line 3 has 2 values and there are 3",
    "user,a,y\n1,2,0\n1,2,3,4\n": "line 3 has 4 values and there are 3",
    "user,a,y\n1,2,0,9\n1,2,3,4\n": "(and 1 more lines are wrong)",
    "user,a,y\n1,2,Müller\n".encode("latin-1"): "--set encoding=latin-1",
    "\n\n": "it is empty",
    "user,a,y\n": "there are no rows",
    "user,a,y\n1,p,0\n1,q,1\n": "left out, many words (--categorical or --set text-columns= uses "
    "them): 'a'",
    b"PK\x03\x04\x14\0\x06\0user,a,y\n": "not a text file",
    "0,1.5,2\n1,2,0\n": "the first line must name the columns",
    "user,a,y\n1,2,2.5\n1,3,2.5\n": "column 'y' is 2.5 in every row",
    f"user,a,y\n{LONG_AMOUNTS}": "column 'y' has 20 different words in 20 rows: name another "
    "--target, or write amounts as plain numbers (1234.5)",
    "user,a,test,y\n1,2,0,0\n1,3,71,1\n": "column 'test' is neither 0 nor 1 in line 3: 1 marks the "
    "rows of the test part (--set test-fraction=0.2 chooses others)",
}


@pytest.mark.parametrize("content", BAD_CSV)
def test_a_bad_csv_is_refused_in_one_line(tmp_path: Path, content: str | bytes) -> None:
    refused(csv(tmp_path, content), BAD_CSV[content])


UNREADABLE = (
    "column 'd' is not a time ('31.02.2024') in line 3: write 2024-01-31 or a number, or leave "
    "such rows out with --impute drop"
)
TWO_ROLES = "'user' has two roles among user, target, test"


@pytest.mark.parametrize(
    ("rows", "options", "part"),
    [
        ("1,2,0,5", {"encoding": "klingon"}, "no encoding 'klingon'"),
        ("1,2,0,5", {"exclude_columns": "aa"}, "did you mean 'a'?"),
        ("1,2,0,5\n2,3,1,6", {"target_column": "user"}, TWO_ROLES),
        ("1,2,x,5\n1,3,y,6", {"task": "regression"}, "column 'y' is not a finite number in line 2"),
        ("1,2,0,5", {"time_column": "when"}, "no column 'when'"),
        ("1,2,0,5", {"test_column": "held"}, "no column 'held'"),
        ("1,2,0,2024-01-31\n1,3,1,31.02.2024", {"time_column": "d"}, UNREADABLE),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    tmp_path: Path, rows: str, options: dict[str, Any], part: str
) -> None:
    refused(csv(tmp_path, f"user,a,y,d\n{rows}\n"), part, **options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test_column": "a", "test_fraction": 0.2}, "both given"),
        ({"test_column": "a", "time_column": "b"}, "both given"),
        ({"test_fraction": float("nan")}, "test-fraction must be between 0 and 1, got nan"),
        ({"impute": "guess"}, "impute must be 'drop' or 'own-mean' or 'zero', got 'guess'"),
    ],
)
def test_settings_that_no_file_fits_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(**settings)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    refused(tmp_path / "absent.npz", "no such file")
    (tmp_path / "data.xlsx").touch()
    refused(tmp_path / "data.xlsx", ".csv", ".parquet", ".npz")
    whole = npz(tmp_path).read_bytes()
    for content in (b"", b"no zip", whole[: len(whole) // 2]):
        (tmp_path / "broken.npz").write_bytes(content)
        refused(tmp_path / "broken.npz", "cannot be read as npz")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    refused(tmp_path / "broken.parquet", "cannot be read as parquet")


USED = "(--set feature-columns= uses it)"
DATES = "left out, dates (--set time-column= tests on each user's last rows): 'd', 'e'"
MIXED = (
    "left out, not plain numbers (leave cells empty for gaps, write 1234.5; --categorical uses "
    "them): 'b' (as 'unknown'), 'c' (as '$2.50')"
)
NOTES = {  # what is in the file, and what is said about it; the one feature is a
    ",user,a,y\n0,1,2,0\n1,1,7,1\n2,2,5,1\n": f"left out, row ids {USED}: 'column 1'",
    ",user,a,y\n17,1,2,0\n9,1,7,1\n20,2,5,1\n": f"left out, row ids {USED}: 'column 1'",
    "user,a,order_id,y\n1,2,17,0\n1,7,12,1\n2,5,99,1\n": f"left out, row ids {USED}: 'order_id'",
    "user,a,c,y\n1,2,3,0\n1,7,3,1\n": "left out, the same in every row: 'c'",
    "user,a,d,e,y\n1,2,2024-01-31,20240131,0\n1,7,2024-02-01,20240201,1\n": DATES,
    'user,a,d,e,y\n1,2,"Jan 3, 2024",3 Jan 2024,0\n1,7,"Feb 4, 2024",Sunday 4 May 24,1\n': DATES,
    "user,a,t,y\n1,2,1700000000,0\n1,7,1600000000,1\n": "left out, timestamps (--set time-column=",
    "user,a,b,c,y\n1,2,1.25,$2.50,0\n1,7,2.5,3%,1\n1,3,unknown,1,0\n": MIXED,
    "user,a,e,y\n1,2,,0\n1,7,,1\n": "left out, empty: 'e'",
    "user,a,h,y\n1,2,1e300,0\n1,7,-1e299,1\n": "left out, numbers beyond 1e+60: 'h'",
    "user;a;y\n1.0;2,5;0\n7;7,25;1\n": "numbers have a decimal comma",
    "user\ta\ty\n1\t2\t0\n1\t7\t1\n": "",
    "user|a|y\n1|2|0\n1|7|1\n": "",
    "\ufeffuser,a,y\n1,2,0\n1,7,1\n": "",
    "# from\n\nuser,a,y\n1,2,0\n\n1,7,1\n\n": "",
    "user, a, y\n1, 2, 0\n1, 7, 1\n": "",
}


@pytest.mark.parametrize("content", NOTES)
def test_what_is_odd_is_said_and_does_not_stop(tmp_path: Path, content: str) -> None:
    data = read_csv(tmp_path, content)
    assert NOTES[content] in data.describe()
    assert data.feature_names == ("a",)


DROPPED = "left out 4 rows with gaps, or without a user, target or time (impute = drop)"
SECOND_A = "column 3 is the second one called 'a': named 'a (3)'"
FILLED = "gaps in 1 row, filled with 0 (--impute zero): 'b' (1)"
LATE_GAPS = "user,a,t,y\n1,2,1,0.5\n1,3,2,\n1,5,3,2.5\n2,,4,2.5\n,8,5,1.5\n1,4,,1.5\n"
TWO_CLASSES = "user,a,y\n1,2,1\n1,3,\n1,5,2\n2,5,1\n"
A_TEST = "user,a,test\n1,2,71.5\n1,3,53.25\n1,4,2.5\n"


@pytest.mark.parametrize(
    ("content", "options", "note", "names"),
    [
        ("user,a,id,y\n1,2,7,0\n1,7,2,1\n", {"feature_columns": "id"}, "", ("id",)),
        ("user,a,b,y\n1,2,9,0\n1,7,8,1\n", {"exclude_columns": "b"}, "", ("a",)),
        ("user,a,b,y\n1,True,9,0\n1,false,8,1\n", {}, "", ("a", "b")),
        ("user,a,a,y\n1,2,3,0\n1,7,4,1\n", {}, SECOND_A, ("a", "a (3)")),
        ("user,a,b,y\n1,2,1.25,0\n1,7,<NA>,1\n", {"impute": "zero"}, FILLED, ("a", "b")),
        (LATE_GAPS, {"impute": "drop", "time_column": "t"}, DROPPED, ("a",)),
        (TWO_CLASSES, {"impute": "drop"}, "classification (1, 2)", ("a",)),
        (A_TEST, {"target_column": "test"}, "test part: a random 20%", ("a",)),
        ('user,t,y\n1,"p\nq",0\n1,r,1\n1,r,1\n1,r,0\n', {}, "'t'", ("t=p\nq", "t=r")),
    ],
)
def test_columns_that_are_used_and_what_is_said(
    tmp_path: Path, content: str, options: dict[str, Any], note: str, names: tuple[str, ...]
) -> None:
    data = read_csv(tmp_path, content, **options)
    assert note in data.describe()
    assert data.feature_names == names


def test_utf_16_is_found_by_its_mark(tmp_path: Path) -> None:
    assert read_csv(tmp_path, "user,a,y\n1,2,0\n1,7,1\n".encode("utf-16")).x.tolist() == [[2], [7]]


def test_a_file_goes_on_otherwise_than_it_starts(tmp_path: Path) -> None:
    """What numbers are is taken from the head: a later fraction or word must not be lost."""
    text = "user,a,b,y\n" + 20_000 * "1,2,3,0\n" + "1,2.5,word,7\n"
    data = read_csv(tmp_path, text)
    assert data.feature_names == ("a", "b=3", "b=word")
    assert data.x[:, 0].max() == 2.5
    assert data.y.max() == 7


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("zero", [[2], [0], [5], [4]]), ("own-mean", [[2], [3], [5], [4]]), ("drop", [[2], [5], [4]])],
)
def test_gaps_are_filled_by_a_named_rule(tmp_path: Path, rule: str, expected: Any) -> None:
    """User 1 trains on 2 and 4, so the own mean is 3. The test row does not count."""
    text = "user,a,y,test\n1,2,0,0\n1,,1,0\n1,4,0,0\n2,5,1,0\n1,100,1,1\n"
    data = read_csv(tmp_path, text, impute=rule)
    trained = data.x[~data.test]
    np.testing.assert_array_equal(np.sort(trained, axis=0), np.sort(expected, axis=0))


def test_categories_are_text_and_a_gap_is_none_of_them(tmp_path: Path) -> None:
    text = "user,g,a,y\n1,007,1,0\n1,7,2,1\n2,,3,1\n2, NA,5,0\n"
    data = read_csv(tmp_path, text, categorical_columns="g")
    assert data.feature_names == ("g=007", "g=7", "g=NA", "a")
    expected = [[1, 0, 0, 1], [0, 1, 0, 2], [0, 0, 0, 3], [0, 0, 1, 5]]
    np.testing.assert_array_equal(data.x, expected)
    assert "the words of 'g'" in data.looked


def test_many_categories_are_hashed_and_the_table_is_sparse(tmp_path: Path) -> None:
    count = MOST_ONE_HOT + 1
    rows = "".join(f"{row % 3},f{row},{row % 9},{row % 4}.5\n" for row in range(count))
    data = read_csv(tmp_path, "user,film,a,y\n" + rows, categorical_columns="film")
    assert data.is_sparse
    assert data.x.shape == (count, BUCKETS + 1)
    np.testing.assert_array_equal(data.x[:, :-1].sum(axis=1), np.ones(count))
    assert data.x[0, bucket_of("f0")] == 1


def test_words_of_a_text_have_shares(tmp_path: Path) -> None:
    content = 'user,t,y\n1,"cars, Cars and vans",0\n1,vans,1\n2,,0\n'
    rows = read_csv(tmp_path, content, text_columns="t").x.toarray()
    assert rows[0, bucket_of("cars")] == 0.5
    assert rows[0, bucket_of("vans")] == 0.25
    assert rows[1, bucket_of("vans")] == 1.0
    assert not rows[2].any()


def test_words_are_classes_however_many(tmp_path: Path) -> None:
    rows = "".join(f"{row % 5},{row / 2},c{row % 80:02}\n" for row in range(400))
    data = read_csv(tmp_path, "user,a,y\n" + rows)
    assert (data.task, data.outputs, data.schema.classes[79]) == ("classification", 80, "c79")


def test_nested_parquet_columns_are_left_out_by_name(tmp_path: Path) -> None:
    path = parquet(tmp_path, user=[1, 1], a=[1.5, 2], v=[[1, 2], [3]], y=[0, 1])
    for categorical in ("", "v"):
        data = load_file(path, categorical_columns=categorical)
        assert data.feature_names == ("a",)
        assert "left out, nested (write one column for each number): 'v'" in data.describe()
    for role in ("target_column", "user_column"):
        refused(path, "column 'v' is nested: write one column for each number", **{role: "v"})


def test_decimals_of_a_parquet_file_are_numbers(tmp_path: Path) -> None:
    """As databases export them."""
    prices = [Decimal("1.25"), Decimal("-3.50"), None]
    amounts = [Decimal("0.5"), Decimal("1.5"), Decimal("2.5")]
    data = load_file(parquet(tmp_path, user=[1, 1, 1], price=prices, y=amounts), impute="zero")
    assert data.x.tolist() == [[1.25], [-3.5], [0.0]]
    assert data.task == "regression"


def test_bytes_that_are_no_picture_are_one_line(tmp_path: Path) -> None:
    path = parquet(tmp_path, user=[1, 1], a=[1.5, 2], v=[b"p", b"q"], y=[0, 1])
    refused(path, "column 'v', row 0: cannot be read as a picture: remove the column")


class Bomb:
    """Leaves a mark if it is unpickled."""

    mark: Path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_pickled_arrays_are_refused_and_never_executed(tmp_path: Path) -> None:
    Bomb.mark = tmp_path / "executed"
    users = np.array([Bomb(), Bomb()], dtype=object)
    refused(npz(tmp_path, user=users), "array 'user' holds Python objects, which are never read")
    assert not Bomb.mark.exists()


@needs_real_data
def test_the_writers_of_mnist_load() -> None:
    data = load_file(SHARED / "mnist_writer.npz")
    assert data.x.dtype == np.uint8
    sizes = (len(data), data.outputs, data.train_sizes.sum(), data.test_sizes.sum())
    assert sizes == (580, 10, 58_916, 5_800)
    assert data.shape == (28, 28)
    assert data.matrix(data.rows(3, test=False)).max() == 1.0


@needs_real_data
def test_the_tags_of_zephyr_are_sparse_means() -> None:
    data = load_file(SHARED / "zephyr_tags.npz")
    assert (len(data), data.features, data.outputs, data.task) == (191, 5000, 80, "multi-label")
    assert sparse.issparse(data.x)
    totals = data.matrix(data.rows(5, test=True)).sum(axis=1)
    assert ((np.abs(totals - 1) < 1e-12) | (totals == 0)).all()
