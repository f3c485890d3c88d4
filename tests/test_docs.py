"""The site: pages that name files, keys, sections and pictures name those that exist."""

import re
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from flwr_ppsgd.client.policy import KEYS
from flwr_ppsgd.settings import Settings, keys_of
from tests.support.paths import ROOT
from tests.support.recipes import python_block

DOCS = ROOT / "docs"
PACKAGE = ROOT / "flwr_ppsgd"
PAGES = sorted(DOCS.glob("*.md"))
SECURE = (DOCS / "secure-aggregation.md").read_text("utf-8")
DIAGRAMS = sorted(DOCS.glob("*.svg"))
MOST_PAGES = 12


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def section(page: str, heading: str) -> str:
    """The text under a heading of the second level."""
    _, _, rest = (DOCS / page).read_text("utf-8").partition(f"\n## {heading}\n")
    return rest.partition("\n## ")[0]


def test_the_page_on_secure_aggregation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for code in blocks(SECURE, "python"):
        exec(code, names)
    printed = capsys.readouterr().out
    assert "the server and any 2 of the other users together" in printed
    assert names["strategy"].ledger.rounds == 3


def test_the_keys_of_secure_sums_are_read() -> None:
    flat, node = (tomllib.loads(text) for text in blocks(SECURE, "toml"))
    assert set(flat) <= set(keys_of(Settings))
    assert set(node) <= set(KEYS)


def test_the_table_of_node_keys_has_exactly_those_that_are_read() -> None:
    table = re.findall(
        r"^\| (.+?) \|",
        section("deployment.md", "The node's owner has the last word"),
        re.MULTILINE,
    )
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


def test_contributing_names_files_that_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for file in re.findall(r"`([a-z_/]+/[a-z_]+\.py)`", page):
        assert (PACKAGE / file).exists() or (ROOT / file).exists(), file


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda path: path.stem)
def test_scripts_and_folders_that_a_page_names_exist(page: Path) -> None:
    for path in re.findall(r"\bsimulations/[\w./-]*\w", page.read_text("utf-8")):
        assert (ROOT / path).exists(), path


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


def test_every_picture_is_shown() -> None:
    shown = {
        name
        for page in [ROOT / "README.md", *PAGES]
        for name in re.findall(r"!\[[^\]]+\]\((?:docs/)?([\w.-]+)\)", page.read_text("utf-8"))
    }
    files = {path.name for path in DOCS.iterdir() if path.suffix not in (".md", ".css")}
    assert files == shown


def test_there_are_few_pages() -> None:
    assert len(PAGES) <= MOST_PAGES
