"""Raw .csv and .parquet files as people have them: what is used, said and refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd.lab.data import Columns
from flwr_ppsgd.lab.data.features import BUCKETS, MOST_ONE_HOT, bucket_of
from flwr_ppsgd.lab.data.files import read
from flwr_ppsgd.lab.data.per_user import PerUser

ROWS = "1,2,0\n1,7,1\n2,5,1\n2,4,0\n"


def loaded(folder: Path, content: str | bytes, **columns: Any) -> PerUser:
    path = folder / "raw.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read(path, Columns(**columns))


BAD: dict[str, tuple[str | bytes, dict[str, Any], str]] = {
    "semicolons": ("user;a;y\n1;2;0\n", {}, "3 with ';': add --sep ';'"),
    "tabs": ("user\ta\ty\n1\t2\t0\n", {}, r"add --sep '\t'"),
    "latin-1": (
        "user,a,y\n1,2,Müller\n".encode("latin-1"),
        {},
        "line 2 is not utf-8: name its encoding, as in --encoding latin-1",
    ),
    "latin-1 far down": (
        ("user,a,n,y\n" + 9000 * "1,2,abc,0\n" + "1,3,Müller,1\n").encode("latin-1"),
        {},
        "column 'n' in line 9002 is not utf-8",
    ),
    "utf-16": ("user,a,y\n1,2,0\n".encode("utf-16"), {}, "as in --encoding utf-16"),
    "no such encoding": ("user,a,y\n1,2,0\n", {"encoding": "klingon"}, "no encoding 'klingon'"),
    "NaN": (
        "user,a,y\n1,2,0\n1,nan,1\n",
        {},
        "column 'a' is not a finite number in line 3: add --impute with one of drop, zero, "
        "own-mean, or --exclude a",
    ),
    "infinity": ("user,a,y\n1,2,0\n1,inf,1\n", {}, "column 'a' is not a finite number in line 3"),
    "a line cut short": ("user,a,y\n1,2,0\n1,2\n", {}, "line 3 has 2 values and there are 3"),
    "empty": ("", {}, "it is empty"),
    "blank": ("\n\n", {}, "it is empty"),
    "a header alone": ("user,a,y\n", {}, "there are no rows"),
    "words alone": (
        "user,a,y\n1,p,0\n1,q,1\n",
        {},
        "no numeric feature column beside user, target, test and time; left out, not numeric (use "
        "--categorical or --text to add them): 'a' ('p' in line 2)",
    ),
    "a misspelt column": ("user,age,y\n1,2,0\n", {"exclude": ("agee",)}, "did you mean 'age'?"),
    "another time": (
        "user,a,d,y\n1,2,2024-01-31,0\n1,3,31.02.2024,0\n",
        {"time": "d"},
        "column 'd' is not a time ('31.02.2024') in line 3: write 2024-01-31",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_one_line_with_place_and_remedy(tmp_path: Path, case: str) -> None:
    content, columns, message = BAD[case]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        loaded(tmp_path, content, **columns)
    text = str(caught.value)
    assert text.startswith(str(tmp_path / "raw.csv"))
    assert "\n" not in text


SAID: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "an index": (
        ",user,a,y\n0,1,2,0\n1,1,7,1\n2,2,5,1\n",
        {},
        "left out, an index of rows: 'column 1'",
        ("a",),
    ),
    "a constant": (
        "user,a,c,y\n1,2,3,0\n1,7,3,1\n",
        {},
        "left out, the same in every row: 'c' (3)",
        ("a",),
    ),
    "a name twice": (
        "user,a,a,y\n1,2,3,0\n1,7,4,1\n",
        {},
        "column 3 is the second one called 'a': named 'a (3)'",
        ("a", "a (3)"),
    ),
    "a date": (
        "user,a,d,y\n1,2,2024-01-31,0\n1,7,2024-01-31,1\n",
        {},
        "left out, a date (use --time to test on each user's last rows): 'd'",
        ("a",),
    ),
    "an empty column": ("user,a,e,y\n1,2,,0\n1,7,,1\n", {}, "left out, empty: 'e'", ("a",)),
    "one user": ("user,a,y\n1,2,0\n1,7,1\n", {}, "test part", ("a",)),
    "no test rows": (
        "user,a,y,test\n1,2,0,0\n2,7,1,0\n",
        {},
        "no test rows, so trained but not measured: 2 users",
        ("a",),
    ),
    "users in two ways": (
        "user,a,y\n1,2,0\n1.0,7,1\n2,5,1\n",
        {},
        "users in column 'user' that are written in several ways are taken as one: '1' and '1.0'",
        ("a",),
    ),
    "classes in two ways": (
        "user,a,y\n1,2,run\n1,7, run\n2,5,Run\n",
        {},
        "differ by upper and lower case alone stay apart: 'Run' and 'run'",
        ("a",),
    ),
    "excluded": ("user,a,b,y\n1,2,9,0\n1,7,8,1\n", {"exclude": ("b",)}, "", ("a",)),
    "commas in numbers": (
        "user;a;y\n1;2,5;0\n1;7,25;1\n",
        {"sep": ";"},
        "numbers have a decimal comma",
        ("a",),
    ),
    "newlines in quotes": ('user,a,t,y\n1,2,"p\nq",0\n1,7,r,1\n', {}, "'t'", ("a",)),
    "spaces in the header": ("user, a, y\n1, 2, 0\n1, 7, 1\n", {}, "", ("a",)),
}


@pytest.mark.parametrize("case", SAID)
def test_what_is_odd_is_said_and_does_not_stop(tmp_path: Path, case: str) -> None:
    content, columns, note, names = SAID[case]
    data = loaded(tmp_path, content, **columns)
    assert note in data.describe()
    assert data.feature_names == names


def test_a_file_goes_on_otherwise_than_it_starts(tmp_path: Path) -> None:
    """Types are taken from the first 64 kB: a later fraction or word must not be lost."""
    text = "user,a,b,y\n" + 20_000 * "1,2,3,0\n" + "1,2.5,word,7\n"
    data = loaded(tmp_path, text)
    assert data.feature_names == ("a",)
    assert data.x.max() == 2.5
    assert "'b' ('word' in line 20002)" in data.describe()
    assert data.target_names == ()
    assert data.y.max() == 7


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("zero", [[2], [0], [5], [4]]), ("own-mean", [[2], [3], [5], [4]]), ("drop", [[2], [5], [4]])],
)
def test_gaps_are_filled_by_a_named_rule(tmp_path: Path, rule: str, expected: Any) -> None:
    """User 1 trains on 2 and 4, so the own mean is 3. The test row does not count."""
    text = "user,a,y,test\n1,2,0,0\n1,,1,0\n1,4,0,0\n2,5,1,0\n1,100,1,1\n"
    data = loaded(tmp_path, text, impute=rule)
    trained = data.x[~data.test]
    np.testing.assert_array_equal(np.sort(trained, axis=0), np.sort(expected, axis=0))


def test_categories_become_one_hot_columns(tmp_path: Path) -> None:
    text = "user,g,a,y\n1,x,1,0\n1,y,2,1\n2,,3,1\n2, x,4,0\n"
    data = loaded(tmp_path, text, categorical=("g",))
    assert data.feature_names == ("a", "g=x", "g=y")
    np.testing.assert_array_equal(data.x, [[1, 1, 0], [2, 0, 1], [3, 0, 0], [4, 1, 0]])
    assert "one-hot: 'g' (2 categories, chosen by looking at data: not covered)" in data.describe()


def test_many_categories_are_hashed_and_the_table_is_sparse(tmp_path: Path) -> None:
    count = MOST_ONE_HOT + 1
    text = "user,film,a,y\n" + "".join(f"{row % 3},f{row},{row},0.5\n" for row in range(count))
    data = loaded(tmp_path, text, categorical=("film",))
    assert data.is_sparse
    assert data.x.shape == (count, 1 + BUCKETS)
    np.testing.assert_array_equal(data.x[:, 1:].sum(axis=1), np.ones(count))
    assert data.x[0, 1 + bucket_of("f0")] == 1


def test_words_of_a_text_have_shares(tmp_path: Path) -> None:
    text = 'user,t,y\n1,"cars, Cars and vans",0\n1,vans,1\n2,,0\n'
    data = loaded(tmp_path, text, text=("t",))
    rows = data.x.toarray()
    assert rows[0, bucket_of("cars")] == 0.5
    assert rows[0, bucket_of("vans")] == 0.25
    assert rows[1, bucket_of("vans")] == 1.0
    assert not rows[2].any()


def test_words_are_classes_however_many(tmp_path: Path) -> None:
    text = "user,a,y\n" + "".join(f"{row % 5},{row},c{row % 80:02}\n" for row in range(400))
    data = loaded(tmp_path, text)
    assert (data.task, data.outputs) == ("classification", 80)
    assert data.target_names[79] == "c79"


def test_classes_that_do_not_start_at_0_keep_their_names(tmp_path: Path) -> None:
    data = loaded(tmp_path, "user,a,y\n1,2,3\n1,7,1\n2,5,5\n")
    assert (data.task, data.outputs, data.target_names) == ("classification", 3, ("1", "3", "5"))
    np.testing.assert_array_equal(data.y, [1, 0, 2])


def test_nested_parquet_columns_are_left_out_by_name(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = arrow.table({"user": [1, 1], "a": [1.5, 2], "v": [[1, 2], [3]], "y": [0, 1]})
    parquet.write_table(table, tmp_path / "nested.parquet")
    data = read(tmp_path / "nested.parquet")
    assert data.feature_names == ("a",)
    assert "left out, nested (write one column for each number): 'v'" in data.describe()


class Bomb:
    """Leaves a mark if it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_pickled_arrays_are_refused_and_never_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    users = np.array([Bomb(mark), Bomb(mark)], dtype=object)
    np.savez(tmp_path / "bomb.npz", user=users, x=np.ones((2, 1)), y=[0, 1])
    with pytest.raises(ValueError, match="array 'user' holds Python objects, which are never read"):
        read(tmp_path / "bomb.npz")
    assert not mark.exists()
