"""The site: pages name files, keys and pictures that exist; commands and code of pages that need
files of their own work as printed."""

import re
import shlex
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from flwr_ppsgd.client.policy import KEYS
from flwr_ppsgd.settings import Settings, keys_of
from simulations.apps import compare
from tests.contract.command import ppsgd
from tests.contract.files import check_done
from tests.support.paths import ROOT
from tests.support.recipes import python_block
from tests.test_readme import blocks_of, joined, pasted

DOCS = ROOT / "docs"
PACKAGE = ROOT / "flwr_ppsgd"
PAGES = sorted(DOCS.glob("*.md"))
SECURE = DOCS / "secure-aggregation.md"
DIAGRAMS = sorted(DOCS.glob("*.svg"))
MOST_PAGES = 12


def section(page: str, heading: str) -> str:
    """The text under a heading of the second level."""
    _, _, rest = (DOCS / page).read_text("utf-8").partition(f"\n## {heading}\n")
    return rest.partition("\n## ")[0]


def test_the_page_on_secure_aggregation_runs() -> None:
    names, printed = pasted(SECURE)
    assert "the server and any 2 of the other users together" in printed
    assert names["strategy"].ledger.rounds == 3


def test_every_command_of_the_page_on_own_data_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``head`` is the only one that is not ours."""
    monkeypatch.chdir(tmp_path)
    shown = ""
    for language, code in blocks_of(DOCS / "own-data.md"):
        if language == "python":
            exec(compile(code, "own-data.md", "exec"), {})
        if language != "bash":
            continue
        for line in joined(code).strip().splitlines():
            program, *words = shlex.split(line)
            if program == "ppsgd":
                shown += check_done(ppsgd(*words)).words
            else:
                count, source, _, target = words
                lines = Path(source).read_text().splitlines(keepends=True)
                Path(target).write_text("".join(lines[: abs(int(count))]))
    assert "chosen by looking at data: not covered" in shown
    assert "of 80 users gain" in shown
    assert "choosing among 8 settings costs" in shown
    made = ("exams/users.parquet", "predictions.csv", "sweep/methods.pdf", "sweep/report.html")
    for name in made:
        assert Path(name).exists(), name


def test_the_code_and_the_command_of_the_page_on_simulation_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedAvg over 200 of 2,000 nodes pulls w by half towards the mean in each round."""
    monkeypatch.chdir(tmp_path)
    names, _ = pasted(DOCS / "simulate.md")
    (w,) = names["result"].arrays.to_numpy_ndarrays()
    assert abs(w - 999.5 * (1 - 0.5**5)).max() < 5 * 577 / 200**0.5  # standard errors
    (command,) = (text for kind, text in blocks_of(DOCS / "simulate.md") if kind == "sh")
    program, script, app, *options = shlex.split(command)
    assert (program, ROOT / script) == ("python", Path(compare.__file__))
    found = compare.main([str(ROOT / app), *options])
    points = {name: list(by_epsilon) for name, by_epsilon in found.items()}
    assert points == {"ppsgd": [1.0, 4.0], "fedavg": [1.0]}  # FedAvg has no ε
    assert (tmp_path / "runs" / "compare.png").stat().st_size > 0
    lines = (tmp_path / "runs" / "compare.csv").read_text().splitlines()
    assert lines[0] == "strategy,epsilon,measure,value"
    assert any(line.startswith("ppsgd,4.0,local_accuracy,") for line in lines)


def test_the_keys_of_secure_sums_are_read() -> None:
    flat, node = (tomllib.loads(text) for kind, text in blocks_of(SECURE) if kind == "toml")
    assert set(flat) <= set(keys_of(Settings))
    assert set(node) <= set(KEYS)


def test_the_table_of_node_keys_has_exactly_those_that_are_read() -> None:
    text = section("deployment.md", "The node's owner has the last word")
    table = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    assert set(re.findall(r"`(ppsgd-[a-z-]+)`", "\n".join(table))) == set(KEYS)


def test_the_tables_of_settings_have_every_key_of_a_training() -> None:
    named = re.findall(r"^\| (`.+?) \|", section("reference.md", "Settings"), re.MULTILINE)
    assert set(keys_of(Settings)) <= set(re.findall(r"`([a-z-]+)`", "\n".join(named)))


def test_the_walk_through_a_round_names_files_that_exist() -> None:
    page = (DOCS / "how-it-works.md").read_text("utf-8")
    files = re.findall(r"`([a-z_/]+(?:\.py|/))`", page)
    assert len(files) > 25
    for file in files:
        assert (PACKAGE / file).exists(), file
    drawn = re.findall(r"[a-z_/]+\.py", (DOCS / "round.svg").read_text("utf-8"))
    assert set(drawn) <= set(files)


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda path: path.stem)
def test_files_and_folders_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    for path in re.findall(r"\bsimulations/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
    for file in re.findall(r"`([a-z_/]+/[a-z_]+\.py)`", text):
        assert (PACKAGE / file).exists() or (ROOT / file).exists(), file


def test_the_strategies_beside_flower_s_wrapper_are_made() -> None:
    names: dict[str, Any] = {}
    exec(python_block("From Flower's DP wrapper to PPSGD"), names)
    assert names["after"].release.noise_multiplier == names["before"].noise_multiplier


@pytest.mark.parametrize("picture", DIAGRAMS, ids=lambda path: str(path.name))
def test_a_diagram_is_whole_and_readable_on_any_page(picture: Path) -> None:
    """With a ground of its own, since not every browser tells an image of the page's colours."""
    text = picture.read_text("utf-8")
    assert ET.fromstring(text).tag.endswith("svg")
    assert "prefers-color-scheme: dark" in text
    assert 'class="page"' in text


def test_every_picture_is_shown_and_there_are_few_pages() -> None:
    shown = set()
    for page in [ROOT / "README.md", *PAGES]:
        shown |= set(re.findall(r"!\[[^\]]+\]\((?:docs/)?([\w.-]+)\)", page.read_text("utf-8")))
    files = {path.name for path in DOCS.iterdir() if path.suffix not in (".md", ".css")}
    assert files == shown
    assert len(PAGES) <= MOST_PAGES
