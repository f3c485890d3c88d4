"""From a raw file of users' rows to predictions by everyone's own model, through the commands."""

import csv
import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract import files
from tests.contract.command import ppsgd
from tests.contract.files import BUDGET, Row, check_done, check_refused, measured, privacy_of

DOCUMENTED = {"config.toml", "metrics.jsonl", "privacy.json", "model.npz"}
TABLE = files.people()
SEEDED = ("--set", "insecure-seed=1")


def with_category(table: list[Row]) -> list[Row]:
    """With a column of words that is worth 3 where it is "red", and a gap in every 20th row."""
    found = []
    for place, row in enumerate(table):
        colour = ("red", "blue", "green")[place * 7 % 3]
        a = "" if place % 20 == 7 else row["a"]
        y = round(row["y"] + 3 * (colour == "red"), 4)
        found.append({**row, "a": a, "colour": colour, "y": y})
    return found


def as_csv(path: Path, table: list[Row], **form: str) -> tuple[str, ...]:
    return ("--data", str(files.write_csv(path.with_suffix(".csv"), table, **form)))


def as_semicolons(path: Path, table: list[Row]) -> tuple[str, ...]:
    return as_csv(path, table, sep=";", decimal=",")


def as_raw(path: Path, table: list[Row]) -> tuple[str, ...]:
    options = ("--categorical", "colour", "--impute", "own-mean")
    return (*as_csv(path, with_category(table)), *options)


def as_parquet(path: Path, table: list[Row]) -> tuple[str, ...]:
    return ("--data", str(files.write_parquet(path.with_suffix(".parquet"), table)))


def as_npz(path: Path, table: list[Row]) -> tuple[str, ...]:
    return ("--data", str(files.write_npz(path.with_suffix(".npz"), table)))


KINDS = {
    "a .csv": as_csv,
    "semicolons and decimal commas": as_semicolons,
    "categories and gaps": as_raw,
    "a .parquet": as_parquet,
    "an .npz": as_npz,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_raw_file_is_looked_at_and_trained_on(kind: str, tmp_path: Path) -> None:
    _, data, *options = KINDS[kind](tmp_path / "people", TABLE)
    looked = check_done(ppsgd("look", data, *options, where=tmp_path))
    assert "12 users" in looked.out
    assert "regression" in looked.out
    assert "not covered" in looked.out  # what was read from users' rows
    run = ("run", "--data", data, *options, *BUDGET, "--out", "out")
    assert "regression" in check_done(ppsgd(*run, where=tmp_path)).out
    assert {path.name for path in (tmp_path / "out").iterdir()} >= DOCUMENTED
    table = with_category(TABLE) if kind == "categories and gaps" else TABLE
    reached = measured(tmp_path / "out")["rmse"]
    assert reached < files.rmse_without_features(table)
    privacy = privacy_of(tmp_path / "out")
    assert privacy["guarantee"] == "user-level joint differential privacy"
    assert privacy["epsilon"] == pytest.approx(8, rel=1e-3)
    with np.load(tmp_path / "out" / "model.npz") as model:
        assert all(np.isfinite(model[name]).all() for name in model.files)


@pytest.mark.parametrize("kind", ["a .csv", "a .parquet"])
def test_predictions_come_back_for_each_row_in_its_order(kind: str, tmp_path: Path) -> None:
    """Users are mixed, targets are not in the new file, and each user's own model answers."""
    check_done(ppsgd("run", *KINDS[kind](tmp_path / "people", TABLE), *BUDGET, where=tmp_path))
    new = files.people(rows=3, seed=1)
    new = [new[place] for place in np.random.default_rng(2).permutation(len(new))]
    hidden = [{name: row[name] for name in ("b", "user", "a")} for row in new]
    _, path = KINDS[kind](tmp_path / "new", hidden)
    check_done(ppsgd("predict", "runs/people", "--data", path, where=tmp_path))
    found = predictions(tmp_path)
    assert [row["user"] for row in found] == [row["user"] for row in new]
    errors = [float(row["prediction"]) - truth["y"] for row, truth in zip(found, new, strict=True)]
    assert np.abs(errors).mean() < files.rmse_without_features(TABLE) / 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a run on ``TABLE``."""
    here = tmp_path_factory.mktemp("trained")
    files.write_csv(here / "people.csv", TABLE)
    check_done(ppsgd("run", "--data", "people.csv", *BUDGET, where=here))
    return str(here / "runs" / "people")


def predictions(directory: Path) -> list[dict[str, str]]:
    with (directory / "predictions.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_user_is_called_as_in_the_file(tmp_path: Path) -> None:
    """Users are text: 007, 7 and 7.0 are three, and NA is a name and no gap.

    Each of them has a level of its own, so a mixed-up user is predicted far off.
    """
    levels = {"007": 100, "7": 200, "NA": 300, "7.0": 400, "Zoë, Ltd.": 500, "nan": 600, "1": 700}
    draw = np.random.default_rng(0)
    table = []
    for user, level in levels.items():
        for row in range(10):
            a = round(draw.normal(), 4)
            table.append({"user": user, "a": a, "y": round(level + 2 * a, 4), "test": row % 5 // 4})
    files.write_csv(tmp_path / "named.csv", table)
    ended = check_done(ppsgd("run", "--data", "named.csv", *BUDGET, where=tmp_path))
    assert "7 users" in ended.out
    asked = ["7", "NA", "7.0", "007", "1", "nan", "Zoë, Ltd.", "7"]
    files.write_csv(tmp_path / "new.csv", [{"user": user, "a": 0.5} for user in asked])
    check_done(ppsgd("predict", "runs/named", "--data", "new.csv", where=tmp_path))
    for user, answer in zip(asked, predictions(tmp_path), strict=True):
        assert float(answer["prediction"]) == pytest.approx(levels[user] + 1, abs=40), user


WORDS = ("no", "yes")


def classes(users: int = 20, rows: int = 12) -> list[Row]:
    """Everyone's y is "yes" if 2a > b: there is much to share."""
    draw = np.random.default_rng(3)
    table = []
    for place in range(users * rows):
        a, b = draw.normal(size=2).round(4).tolist()
        test = int(place % rows >= rows - 3)
        row = {"user": f"u{place // rows}", "a": a, "b": b, "y": WORDS[2 * a > b], "test": test}
        table.append(row)
    return table


def test_a_user_never_seen_gets_the_shared_model(tmp_path: Path) -> None:
    """No row of that user has a target: there is nothing else to answer with."""
    table = classes()
    files.write_csv(tmp_path / "answers.csv", table)
    options = ("--data", "answers.csv", "--set", "epsilon=100", "--set", "delta=1e-3")
    ended = check_done(ppsgd("run", *options, where=tmp_path))  # with hardly any noise
    assert "classification" in ended.out
    draw = np.random.default_rng(4)
    x = draw.normal(size=(60, 2)).round(4).tolist()
    new = [{"user": "nobody yet", "a": a, "b": b} for a, b in x]
    new.append({"user": "u3", "a": 2.0, "b": 0.0})
    files.write_csv(tmp_path / "new.csv", new)
    ended = check_done(ppsgd("predict", "runs/answers", "--data", "new.csv", where=tmp_path))
    assert "shared" in ended.out
    found = predictions(tmp_path)
    right = [row["prediction"] == WORDS[2 * a > b] for row, (a, b) in zip(found, x, strict=False)]
    assert np.mean(right) > 0.75  # a constant has about a half
    assert found[0]["model"] != found[-1]["model"]


def test_a_new_user_with_known_rows_gets_a_model_of_their_own(trained: str, tmp_path: Path) -> None:
    new = [{**row, "user": "new", "y": row["y"] + 40} for row in files.people(1, 15, seed=5)]
    hidden = [{**row, "y": row["y"] if place < 12 else ""} for place, row in enumerate(new)]
    files.write_csv(tmp_path / "new.csv", hidden)
    check_done(ppsgd("predict", trained, "--data", "new.csv", where=tmp_path))
    for row, truth in zip(predictions(tmp_path)[12:], new[12:], strict=True):
        assert float(row["prediction"]) == pytest.approx(truth["y"], abs=3)


def model_of(directory: Path) -> dict[str, Any]:
    with np.load(directory / "model.npz") as model:
        return {name: model[name] for name in model.files}


def test_test_rows_teach_nothing(tmp_path: Path) -> None:
    """With a known seed, whatever stands in their targets: the same w and the same predictions."""
    changed = [{**row, "y": -row["y"] if row["test"] else row["y"]} for row in TABLE]
    files.write_csv(tmp_path / "new.csv", [{"user": "u05", "a": 1.0, "b": 0.5}])
    answers = []
    for name, table in (("as they are", TABLE), ("changed", changed)):
        here = tmp_path / name
        here.mkdir()
        files.write_csv(here / "people.csv", table)
        run = ("run", "--data", "people.csv", *BUDGET, *SEEDED, "--out", "out")
        check_done(ppsgd(*run, where=here))
        check_done(ppsgd("predict", "out", "--data", "../new.csv", where=here))
        answers.append((model_of(here / "out"), predictions(here), measured(here / "out")))
    (w, rows, before), (other_w, other_rows, after) = answers
    for name, array in w.items():
        np.testing.assert_array_equal(array, other_w[name])
    assert rows == other_rows
    assert before["rmse"] != after["rmse"]


def test_a_fifth_of_each_users_rows_is_for_testing_and_no_row_for_both(tmp_path: Path) -> None:
    """2 of 12 rows, if nothing else is said; ``look`` counts them."""
    files.write_csv(tmp_path / "people.csv", [without(row, "test") for row in TABLE])
    shown = check_done(ppsgd("look", "people.csv", where=tmp_path)).words
    counts = [int(count) for count in re.findall(r"(\d+) (?:training|test) rows", shown)[:2]]
    assert counts == [10 * 12, 2 * 12]


def without(row: Row, name: str) -> Row:
    return {key: value for key, value in row.items() if key != name}


def test_the_last_rows_by_time_are_for_testing(tmp_path: Path) -> None:
    """3 of 12 rows of each user, though the file has them in another order."""
    table = [{**without(row, "test"), "when": 100 - place % 12} for place, row in enumerate(TABLE)]
    changed = [{**row, "y": -row["y"] if row["when"] > 97 else row["y"]} for row in table]
    found = []
    for name, rows in (("first", table), ("second", changed)):
        files.write_csv(tmp_path / f"{name}.csv", rows)
        split = ("--set", "time-column=when", "--set", "test-fraction=.25", *SEEDED, *BUDGET)
        ended = check_done(ppsgd("run", "--data", f"{name}.csv", *split, where=tmp_path))
        assert "36 test" in ended.out
        found.append(model_of(tmp_path / "runs" / name))
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name])


def test_the_resolved_settings_give_the_same_run_again(tmp_path: Path) -> None:
    files.write_csv(tmp_path / "people.csv", TABLE)
    first = ("run", "--data", "people.csv", *BUDGET, *SEEDED, "--out", "first")
    check_done(ppsgd(*first, where=tmp_path))
    check_done(ppsgd("run", "first/config.toml", "--out", "again", where=tmp_path))
    again = model_of(tmp_path / "again")
    for name, array in model_of(tmp_path / "first").items():
        np.testing.assert_array_equal(array, again[name])


def test_several_labels_are_told_from_classes(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(120, 3))
    labels = (x @ draw.normal(size=(3, 4)) > 0).astype(int)
    np.savez(tmp_path / "tags.npz", user=np.arange(120) % 10, x=x, y=labels)
    ended = check_done(ppsgd("run", "--data", "tags.npz", *BUDGET, where=tmp_path))
    assert "multi-label" in ended.out
    assert 0 <= measured(tmp_path / "runs" / "tags")["precision_at_1"] <= 1


RUN = ("run", "--data", "people.csv", "--out", "out")
MISTAKES = [  # what is typed, what the line names
    ((*RUN, *BUDGET, "--user", "usr"), ("people.csv", "'usr'", "'user'")),
    ((*RUN, *BUDGET, "--target", "z"), ("people.csv", "'z'")),
    ((*RUN, *BUDGET, "--exclude", "c"), ("people.csv", "'c'")),
    ((*RUN, *BUDGET, "--task", "guess"), ("guess", "classification")),
    (("run", "--data", "empty.csv", *BUDGET), ("empty.csv",)),
    (("run", "--data", "header.csv", *BUDGET), ("header.csv",)),
    (("run", "--data", "missing.csv", *BUDGET), ("missing.csv",)),
    (("run", "--data", "gaps.csv", *BUDGET), ("gaps.csv", "'a'", "line 3", "--impute")),
    (("run", "--data", "ragged.csv", *BUDGET), ("ragged.csv", "line 3")),
    (("look", "empty.csv"), ("empty.csv",)),
    ((*RUN, "--set", "epsilon=2"), ("delta",)),
    ((*RUN, "--set", "delta=1e-3"), ("epsilon",)),
    ((*RUN, *BUDGET, "--set", "epsilom=2"), ("epsilom", "epsilon")),
    ((*RUN, *BUDGET, "--delta", "2"), ("delta", "2")),
    ((*RUN, *BUDGET, "--color"), ("--color",)),
    (("run", "wrong.toml", "--out", "out"), ("wrong.toml", "clip-nrom", "clip-norm")),
    (("run", "missing.toml", "--out", "out"), ("missing.toml",)),
    (("run", "--data", "people.csv", *BUDGET, "--out", "full"), ("full",)),
    (("predict", "full", "--data", "people.csv"), ("full",)),
]


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("mistakes")
    files.write_csv(here / "people.csv", TABLE)
    (here / "empty.csv").write_text("")
    (here / "header.csv").write_text("user,a,y\n")
    (here / "gaps.csv").write_text("user,a,y\nu,1.5,2\nu,,3\nv,1,2\nv,2,3\n")
    (here / "ragged.csv").write_text("user,a,y\nu,1,2\nu,1\nv,1,2\n")
    (here / "wrong.toml").write_text(files.TOML.replace("clip-norm", "clip-nrom"))
    (here / "full").mkdir()
    (here / "full" / "precious").write_text("data")
    return here


@pytest.mark.parametrize(("typed", "named"), MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    typed: tuple[str, ...], named: tuple[str, ...], mistaken: Path
) -> None:
    before = listing(mistaken)
    check_refused(ppsgd(*typed, where=mistaken), *named)
    assert listing(mistaken) == before


def listing(directory: Path) -> list[str]:
    return sorted(str(path) for path in directory.rglob("*"))


def test_predictions_are_for_their_users_and_never_overwritten(
    trained: str, tmp_path: Path
) -> None:
    files.write_csv(tmp_path / "people.csv", TABLE)
    asked = ("predict", trained, "--data", "people.csv")
    check_done(ppsgd(*asked, where=tmp_path))
    path = tmp_path / "predictions.csv"
    assert path.stat().st_mode & 0o077 == 0
    before = path.read_bytes()
    check_refused(ppsgd(*asked, where=tmp_path), "predictions.csv", "--out")
    assert path.read_bytes() == before


def test_new_rows_that_cannot_be_read_are_one_line(trained: str, tmp_path: Path) -> None:
    asked = ("predict", trained, "--data", "new.csv")
    for content, part in (
        (b"user,a,b\n", "there are no rows"),
        (b"PK\0\0user,a,b\n", "not a text file"),
        ("user,a,b\nZoë,1,2\n".encode("latin-1"), "save it as UTF-8"),
        (b"user,a\nu01,1\n", "no column 'b'"),
    ):
        (tmp_path / "new.csv").write_bytes(content)
        check_refused(ppsgd(*asked, where=tmp_path), "new.csv", part)
        assert not (tmp_path / "predictions.csv").exists()


def two_worlds(tmp_path: Path) -> tuple[Path, Path]:
    """The same people in two directories, but for one row of u03: another city, another answer."""
    table = [{**row, "city": ("Bonn", "Rome")[place % 2]} for place, row in enumerate(classes())]
    other = [dict(row) for row in table]
    changed = next(row for row in other if row["user"] == "u3")
    changed |= {"city": "Oslo", "y": "perhaps", "a": "many"}
    found = []
    for name, rows in (("one", table), ("other", other)):
        (tmp_path / name).mkdir()
        files.write_csv(tmp_path / name / "people.csv", rows)
        found.append(tmp_path / name)
    return found[0], found[1]


def seen_of(directory: Path, *options: str) -> tuple[list[str], list[str], dict[str, Any]]:
    """What a run shows up to the end of training, its conditions, and the shapes of its arrays."""
    run = ("run", "--data", "people.csv", *options, *BUDGET, "--out", "out")
    ended = check_done(ppsgd(*run, where=directory))
    lines = ended.out.splitlines()
    last = next(place for place, line in enumerate(lines) if line.startswith("training"))
    assert not ended.err
    shapes = {name: array.shape for name, array in model_of(directory / "out").items()}
    return lines[: last + 1], privacy_of(directory / "out")["conditional_on"], shapes


def test_with_a_schema_one_users_row_changes_neither_form_nor_words(tmp_path: Path) -> None:
    one, other = two_worlds(tmp_path)
    schema = tmp_path / "schema.toml"
    check_done(ppsgd("look", "people.csv", "--write", schema, where=one))
    assert schema.stat().st_mode & 0o077 == 0
    worlds = [seen_of(here, "--schema", str(schema)) for here in (one, other)]
    assert worlds[0] == worlds[1]
    (condition,) = worlds[0][1]
    digest = hashlib.sha256(schema.read_bytes()).hexdigest()
    assert condition == (
        f"provided that schema.toml (sha256 {digest}) is public knowledge, as its author declares"
    )
    assert condition in " ".join(" ".join(worlds[0][0]).split())
    kept = model_of(one / "out")["schema-sha256"].tobytes().hex()
    assert kept == digest


def test_without_a_schema_what_was_looked_for_is_a_condition(tmp_path: Path) -> None:
    """The same row changes the form of w then, which no ε covers."""
    one, other = two_worlds(tmp_path)
    shown, conditions, shapes = seen_of(one)
    assert shapes != seen_of(other)[2]
    (condition,) = conditions
    for named in ("the columns and their kinds", "the words of 'city'", "the task", "the classes"):
        assert named in condition
        assert named in " ".join(shown)


def test_a_schema_predicts_and_sweeps_and_decides_alone(tmp_path: Path) -> None:
    files.write_csv(tmp_path / "people.csv", TABLE)
    check_done(ppsgd("look", "people.csv", "--write", "schema.toml", where=tmp_path))
    given = ("--data", "people.csv", "--schema", "schema.toml")
    check_done(ppsgd("run", *given, *BUDGET, "--out", "out", where=tmp_path))
    asked = ("predict", "out", *given)
    check_done(ppsgd(*asked, where=tmp_path))
    assert len(predictions(tmp_path)) == len(TABLE)
    check_refused(ppsgd("run", *given, *BUDGET, "--user", "user", where=tmp_path), "user-column")
    text = (tmp_path / "schema.toml").read_text(encoding="utf-8")
    (tmp_path / "schema.toml").write_text(text + "# changed\n", encoding="utf-8")
    check_refused(ppsgd(*asked, "--out", "p.csv", where=tmp_path), "schema")
    grid = ("--set", "method=auto", "--set", "epsilon=[4.0]", "--set", "insecure-seed=1")
    swept = ("sweep", *given, "--delta", "1e-3", *grid, "--out", "swept")
    check_done(ppsgd(*swept, where=tmp_path))


def test_a_user_without_a_readable_row_stays_enrolled(tmp_path: Path) -> None:
    table = classes()
    files.write_csv(tmp_path / "people.csv", table)
    check_done(ppsgd("look", "people.csv", "--write", "schema.toml", where=tmp_path))
    gone = [{**row, "y": "perhaps"} if row["user"] == "u3" else row for row in table]
    files.write_csv(tmp_path / "people.csv", gone)
    run = ("run", "--data", "people.csv", "--schema", "schema.toml", *BUDGET, "--out", "out")
    ended = check_done(ppsgd(*run, where=tmp_path))
    assert "20 users" in ended.out
    assert "u3" not in ended.out
