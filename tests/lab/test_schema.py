"""The schema: written, read back, obeyed, and refused in one line."""

import csv
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from flwr_ppsgd.lab.per_user import PerUser
from flwr_ppsgd.lab.schema import Schema, write_schema
from tests.support.own_data import load_file

ROWS = """user,a,smoker,city,when,y
ann,1.5,1,Rome,2024-01-01,yes
ann,2.5,0,Bonn,2024-01-02,no
bob,,1,Rome,2024-01-03,no
bob,4.5,0,Bonn,2024-01-04,yes
"""
SCHEMA = """user = "user"
target = "y"
task = "classification"
classes = ["no", "yes"]
[columns]
a = "number"
smoker = "flag"
city = ["Bonn", "Rome"]
when = "left out"
"""


def read(folder: Path, rows: str = ROWS, schema: str = SCHEMA) -> PerUser:
    (folder / "data.csv").write_text(rows, encoding="utf-8")
    (folder / "schema.toml").write_text(schema, encoding="utf-8")
    return load_file(folder / "data.csv", schema=str(folder / "schema.toml"))


def written_again(path: Path, found: PerUser) -> PerUser:
    """The rows of a file by the schema that was found in it, through a schema file."""
    schema = path.with_name("schema.toml")
    write_schema(found.schema, schema, path.name)
    assert schema.stat().st_mode & 0o777 == 0o600
    assert Schema.read(schema) == found.schema
    given = load_file(path, schema=str(schema))
    for name in ("x", "y", "test"):
        arrays = [getattr(data, name) for data in (found, given)]
        dense = [array.toarray() if sparse.issparse(array) else array for array in arrays]
        np.testing.assert_array_equal(*dense)
    assert (given.looked, given.shape) == ((), found.shape)
    return given


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text(ROWS)
    found = load_file(path, impute="own-mean")
    assert written_again(path, found).notes == ()
    with pytest.raises(ValueError, match="File exists"):
        write_schema(found.schema, tmp_path / "schema.toml", "data.csv")


def test_amounts_with_decimal_commas_are_read_alike(tmp_path: Path) -> None:
    """Bob's amounts cannot be read: he stays, without a row."""
    rows = "user;a;when;y\n"
    for user, place in itertools.product(("ann", "bob"), range(5)):
        rows += f"{user};{place},5;{9 - place},5;{place},25\n"
    path = tmp_path / "data.csv"
    path.write_text(rows)
    written_again(path, load_file(path, time_column="when"))
    path.write_text(rows.replace("bob;", "bob;x").replace(",25\nbob", "?\nbob"))
    after = load_file(path, schema=str(tmp_path / "schema.toml"))
    assert after.users == ("ann", "bob")
    assert after.targets(after.rows(1, test=False)).shape[1] == 1


def test_odd_names_and_words_survive(tmp_path: Path) -> None:
    words = ['say "hi"', "a\\b", "line\nbreak", "Zoë", "# no comment"]
    rows = [[f"u{place % 2}", word, place, place / 3] for place, word in enumerate(words * 2)]
    path = tmp_path / "data.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["user", "od.d = [x]", "b", "y"], *rows])
    found = load_file(path, feature_columns="od.d = [x],b")
    written_again(path, found)
    assert set(found.schema.columns[0].words) == set(words)


NUMBERS = np.column_stack([np.random.default_rng(0).normal(size=8), np.arange(8) % 2])
PICTURES = np.random.default_rng(0).integers(0, 256, (8, 12, 12), dtype=np.uint8)
BAGS = {"indptr": np.arange(9), "indices": np.arange(8) % 5, "data": np.ones(8)}


@pytest.mark.parametrize("arrays", [{"x": NUMBERS}, {"x": PICTURES}, BAGS])
def test_arrays_of_an_npz_have_a_schema_too(tmp_path: Path, arrays: dict[str, Any]) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, user=np.repeat([0, 1], 4), y=np.arange(8) % 2, **arrays)
    written_again(path, load_file(path))


def test_what_the_schema_does_not_list_changes_that_users_rows_alone(tmp_path: Path) -> None:
    """Another city is zeros, a word in a number is a gap, another class drops the row, and bob
    stays without a row; ann's rows are the same to the last bit."""
    before = read(tmp_path)
    assert before.feature_names == ("a", "smoker", "city=Bonn", "city=Rome")
    rows = ROWS.replace("bob,,1,Rome", "bob,many,7,Oslo").replace("04,yes", "04,perhaps")
    after = read(tmp_path, rows)
    assert after.users == before.users == ("ann", "bob")
    np.testing.assert_array_equal(after.offsets, [0, 2, 3])
    np.testing.assert_array_equal(after.x[:2], before.x[:2])
    np.testing.assert_array_equal(after.x[2], [0, 1, 0, 0])
    assert (after.notes, after.looked) == ((), ())
    gone = read(tmp_path, rows.replace("03,no", "03,"))
    assert gone.users == ("ann", "bob")
    np.testing.assert_array_equal(np.diff(gone.offsets), [2, 0])


def test_who_is_enrolled_can_be_listed(tmp_path: Path) -> None:
    """Carl has no rows and still takes part; bob is not enrolled."""
    data = read(tmp_path, schema='enrolled = ["carl", "ann"]\n' + SCHEMA)
    assert data.users == ("carl", "ann")
    np.testing.assert_array_equal(np.diff(data.offsets), [0, 2])


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (('user = "user"', 'user = "usr"'), ("data.csv", "'usr'", "'user'")),
        (('a = "number"', 'a = "number"\nb = "number"'), ("data.csv", "'b'", "take it out")),
        (('a = "number"\n', ""), ("data.csv", "column 'a' is not in the schema", "left out")),
        (('a = "number"', 'a = "numbr"'), ("schema.toml", "column 'a'", "'number'")),
        (('["Bonn", "Rome"]', '["Bonn", "Bonn"]'), ("schema.toml", "'city'", "once")),
        (('["no", "yes"]', '["no"]'), ("schema.toml", "classes must be at least 2")),
        (('["no", "yes"]', "[0, 1]"), ("schema.toml", "classes", "texts")),
        (("task =", "tsak ="), ("schema.toml", "'tsak'", "'task'")),
        (("task =", 'missing = "guess"\ntask ='), ("schema.toml", "missing", "own-mean")),
        (("task =", "test-fraction = 2\ntask ="), ("schema.toml", "test-fraction", "2")),
        (("task =", "split-seed = true\ntask ="), ("schema.toml", "split-seed", "True")),
        (("[columns]", "[columns"), ("schema.toml", "cannot be read")),
        (('task = "classification"\n', ""), ("schema.toml", "'task' is missing")),
    ],
)
def test_a_wrong_schema_is_one_line(
    tmp_path: Path, change: tuple[str, str], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=r"\.(csv|toml): ") as caught:
        read(tmp_path, schema=SCHEMA.replace(*change))
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_a_missing_schema_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.toml: cannot be read"):
        Schema.read(tmp_path / "absent.toml")
