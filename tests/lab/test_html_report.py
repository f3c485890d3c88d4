"""One page from a directory: well formed, self-contained, escaped, the same every time; errors are
one line."""

import base64
import json
import math
import re
import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import tomli_w

from flwr_ppsgd import cli
from flwr_ppsgd.lab.html_report import write_report
from flwr_ppsgd.lab.rows import CAVEAT, RunRow, SweepRow
from tests.lab.test_figures import ROWS

CONFIG: dict[str, object] = {"population": 50, "rate": 0.2, "rounds": 9, "delta": 1e-4}
CONFIG |= {"step": [0.1, 0.2, 0.9], "alpha-q": [0.0, 0.3, math.inf], "clip-norm": 1.0}
CONFIG |= {"noise-multiplier": [1.0, 5.0], "data": "synthetic", "checkpoint-dir": ""}
HOSTILE = "<script>alert('x')</script>&\"quoted\""
VOID = {"meta", "img"}


class Page(HTMLParser):
    """What is in a page; an element that is closed out of turn fails."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def attributes(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.seen if name == tag]


def as_lines(rows: Iterable[SweepRow | RunRow]) -> str:
    return "".join(json.dumps(row.to_json()) + "\n" for row in rows)


def sweep_in(directory: Path, **changes: object) -> Path:
    directory.mkdir()
    (directory / "config.toml").write_text(tomli_w.dumps({**CONFIG, **changes}), encoding="utf-8")
    (directory / "rows.jsonl").write_text(as_lines(ROWS), encoding="utf-8")
    return directory


def run_in(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.toml").write_text(tomli_w.dumps({"population": 50, "alpha-q": 0.3}))
    rows = [RunRow(t, 1.00001 * t, 1.00001 * t, {"loss": 9.0 - t}) for t in (0, 4)]
    (directory / "metrics.jsonl").write_text(as_lines(rows), encoding="utf-8")
    statement = f"To each of the 50 enrolled users.\n{HOSTILE}"
    privacy = {"rounds_trained": 4, "statement": statement}
    (directory / "privacy.json").write_text(json.dumps(privacy), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sweep_in(tmp_path_factory.mktemp("report") / "sweep")


def test_a_sweeps_page_says_what_was_run_and_what_is_guaranteed(swept: Path) -> None:
    page = Page(write_report(swept))
    for part in (
        CAVEAT,
        "NO GUARANTEE: this is a simulation",
        "zero-out neighbours",
        "replace-one neighbours",
        "3 of step, 3 of αQ, 2 of noise z",
        "50, each with chance 0.2 in each round, 9 rounds, δ = 0.0001",
        "1 diverged",
        "the server itself, which is trusted",
    ):
        assert part in page.text
    assert "checkpoint-dir" not in page.text
    assert "amplification" not in page.text
    cells = re.findall(r"<td>([^<]*)</td>", (swept / "report.html").read_text(encoding="utf-8"))
    assert cells[:6] == ["90", "1", "0.3", "0.1", "1", "1"]  # ε, z, αQ, step, C, loss
    second = cells.index("18")
    assert cells[second : second + 6] == ["18", "5", "0 (local)", "0.1", "–", "3"]


def test_a_page_begins_with_the_result_and_its_picture(swept: Path) -> None:
    page = Page(write_report(swept))
    result = "ε = 90: loss personalized 1, global 2, local 3"
    assert page.text.index(result) < page.text.index("Every method.")
    assert page.text.index("Every method.") < page.text.index("What is guaranteed")


def test_the_page_holds_all_that_it_shows(swept: Path) -> None:
    """No address but data and the rows beside it, no script; every figure is there, with words for
    it."""
    page = Page(write_report(swept))
    images = page.attributes("img")
    assert len(images) == 3
    for image in images:
        kind, data = image["src"].split(",")
        assert (kind, base64.b64decode(data)[:4]) == ("data:image/png;base64", b"\x89PNG")
        assert len(image["alt"]) > 40
    assert [attributes["href"] for attributes in page.attributes("a")] == ["rows.jsonl"]
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.seen}
    source = (swept / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"//|@import|url\(", re.sub(r"base64,[A-Za-z0-9+/=]*", "", source))


def test_the_same_rows_make_the_same_page(swept: Path) -> None:
    first = write_report(swept).read_bytes()
    assert write_report(swept).read_bytes() == first
    assert {path.name for path in swept.iterdir()} == {"config.toml", "rows.jsonl", "report.html"}


def test_hostile_names_are_text(tmp_path: Path) -> None:
    """In the directory's name, a setting and a statement; a slash cannot be in a name."""
    directory = sweep_in(
        tmp_path / HOSTILE.replace("/", ""),
        data=f"x{HOSTILE.replace('/', '')}",
        **{HOSTILE: HOSTILE},
    )
    page, run = Page(write_report(directory)), Page(write_report(run_in(tmp_path / "run")))
    assert HOSTILE in page.text
    assert HOSTILE in run.text
    assert "script" not in {tag for tag, _ in page.seen + run.seen}


def test_a_runs_page_holds_its_statement_and_never_rounds_epsilon_down(tmp_path: Path) -> None:
    page = Page(write_report(run_in(tmp_path / "run")))
    assert page.text.index("loss: personal 5") < page.text.index("What is guaranteed")
    assert "To each of the 50 enrolled users." in page.text
    assert "4.001" in page.text
    assert "outside_the_guarantee" not in page.text
    assert not page.attributes("img")


def test_a_sweep_under_way_says_so(tmp_path: Path) -> None:
    directory = sweep_in(tmp_path / "sweep", **{"cohort-size": 5})
    plan = {"blocks": [[1] * 20, [1] * 10]}
    (directory / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    text = Page(write_report(directory)).text
    assert "30 trainings" in text
    assert "7 of them are finished" in text
    assert "exactly 5 in each round" in text
    assert "no amplification by sampling is claimed" in text


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sweep", "there: no setting is finished yet: run ppsgd sweep"),
        ("run", "there: not the directory of a run"),
    ],
)
def test_a_directory_that_cannot_be_reported_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    message: str,
) -> None:
    """A sweep without a row yet, and a run whose privacy.json is empty."""
    there = run_in(tmp_path / "there")
    (there / "privacy.json").write_text("{}")
    if kind == "sweep":
        (there / "privacy.json").unlink()
        (there / "metrics.jsonl").unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppsgd", "report", "there"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith(f"ppsgd: {message}")
    assert not (there / "report.html").exists()
