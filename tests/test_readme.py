"""README and the pages of the site: their code runs, their commands and links exist."""

import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pytest
import typer

import flwr_ppsgd
import flwr_ppsgd.legacy
from flwr_ppsgd import simulation
from flwr_ppsgd.cli import app
from tests.contract.command import ppsgd
from tests.contract.files import check_done
from tests.support.paths import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
MOST_BYTES = 6000  # of the front door
# Pages whose blocks need apps or files of their own, and the tests that execute them.
ELSEWHERE = {
    "flower-apps.md": ("test_apps.py", "test_adopters.py"),
    "deployment.md": ("test_deployment_page.py",),
    "own-data.md": ("test_docs.py",),
    "simulate.md": ("test_docs.py",),
}
EXECUTED = ("python", "sh", "bash", "diff")
SHOWN = ("", "text", "bibtex", "toml")  # commands for a terminal, output, settings


class Block(NamedTuple):
    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return [Block(*each) for each in found]


def python_of(page: Path) -> list[str]:
    return [block.text for block in blocks_of(page) if block.language == "python"]


def pasted(page: Path) -> tuple[dict[str, Any], str]:
    """The page's Python blocks, one after the other, and what they print."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for text in python_of(page):
            exec(compile(text, page.name, "exec"), namespace)
    return namespace, printed.getvalue()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_front_door_is_small() -> None:
    assert len(README.read_bytes()) <= MOST_BYTES


def test_the_front_doors_fifteen_lines_give_the_output_that_is_shown() -> None:
    code, paper = python_of(README)
    assert sum(bool(line.strip()) for line in code.splitlines()) == 15
    assert sum(bool(line.strip()) for line in paper.splitlines()) == 6
    namespace, printed = pasted(README)
    (shown,) = (block.text for block in blocks_of(README) if block.language == "text")
    first, statement = printed.split("\n", maxsplit=1)
    claimed = shown.splitlines()[0]
    assert numbers(first).keys() == numbers(claimed).keys()
    for name, value in numbers(first).items():
        assert value == pytest.approx(numbers(claimed)[name], abs=0.01), name  # secret noise
    assert " ".join(shown.splitlines()[1:3]) == statement.splitlines()[0]
    *_, measured = namespace["result"].evaluate_metrics_clientapp.values()
    assert measured["accuracy"] > measured["local_accuracy"] + 0.015
    assert measured["accuracy"] > measured["shared_accuracy"] + 0.02


def numbers(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"'(\w+)': ([0-9.]+)", text)}


def test_the_start_page_trains_states_its_guarantee_and_personalizes() -> None:
    namespace, printed = pasted(ROOT / "docs" / "start.md")
    measured = namespace["measured"]
    assert measured["loss"] < min(measured["local_loss"], measured["shared_loss"])
    assert printed.count("To each of the 100 enrolled users") == 1


# pages that are tested above, or elsewhere
WHOLE = ("README.md", "start.md", "secure-aggregation.md", *ELSEWHERE)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in WHOLE and python_of(page)],
    ids=lambda page: str(page.name),
)
def test_the_code_of_a_page_runs(page: Path) -> None:
    pasted(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_no_block_escapes_the_tests(page: Path) -> None:
    """A block is executed here, or by the tests that are named, or is shown only."""
    for block in blocks_of(page):
        assert block.language in EXECUTED + SHOWN, block
        if block.language == "toml":
            assert tomllib.loads(block.text)
    tests = ELSEWHERE.get(page.name, ())
    assert all((ROOT / "tests" / test).exists() for test in tests)
    if not tests:
        assert {block.language for block in blocks_of(page)} <= {"python", *SHOWN}


def commands(page: Path) -> Iterator[list[str]]:
    """What a page tells to type: lines of its blocks, and what is between backticks."""
    text = page.read_text("utf-8")
    lines = [line for block in blocks_of(page) for line in joined(block.text).splitlines()]
    for line in [*lines, *re.findall(r"`((?:ppsgd|make) [^`\n]+)`", text)]:
        if re.match(r"\s*(ppsgd|make) ", line):
            yield shlex.split(line.strip(), comments=True)


def joined(text: str) -> str:
    return text.replace("\\\n", " ")


def every_command() -> list[list[str]]:
    return [words for page in PAGES for words in commands(page)]


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {words[1] for words in every_command() if words[0] == "make"}
    assert len(named) >= 5
    assert named <= targets


def test_every_option_of_ppsgd_that_is_named_exists() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    used = [words[1:] for words in every_command() if words[0] == "ppsgd"]
    assert len(used) >= 20
    for name, *words in used:
        command = group.get_command(click.Context(group), name)
        assert command is not None, name
        known = {option for parameter in command.params for option in parameter.opts}
        options = {word.split("=")[0] for word in words if re.match(r"--\w", word)}
        assert options <= known | {"--help"}, (name, options - known)


def test_the_commands_about_a_file_of_ones_own_run(tmp_path: Path) -> None:
    """README's and the start page's, with their names filled in."""
    source = np.random.default_rng(0)
    rows = ["reader,stars,pages,age"]
    for reader in range(30):
        for _ in range(12):
            pages, age = source.normal(size=2)
            stars = 3 + pages - age + 0.3 * reader % 1 + 0.1 * source.normal()
            rows.append(f"r{reader},{stars:.3f},{pages:.3f},{age:.3f}")
    (tmp_path / "ratings.csv").write_text("\n".join(rows) + "\n")
    typed = [words for page in (README, ROOT / "docs" / "start.md") for words in commands(page)]
    chosen = [words for words in typed if words[:2] in (["ppsgd", "look"], ["ppsgd", "run"])]
    assert [words[1] for words in chosen if len(words) > 3] == ["run", "look", "run"]
    for words in chosen:
        if len(words) > 3:
            run_here(words)
    assert len(list(tmp_path.glob("runs/*/users.png"))) == 2


def run_here(words: list[str]) -> None:
    """A command in an empty directory; FILE and COLUMN stand for the file's."""
    line = shlex.join(words)
    line = line.replace("--user COLUMN", "--user reader").replace(
        "--target COLUMN", "--target stars"
    )
    filled = shlex.split(line.replace("FILE", "ratings.csv").replace("1e-5", "1e-3"))
    check_done(ppsgd(*filled[1:]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|#", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve()
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text("utf-8"), re.MULTILINE)
            assert anchor in [slug(heading) for heading in headings], target


def slug(heading: str) -> str:
    """A heading as GitHub and the site write it in addresses."""
    return re.sub(r"[^\w\- ]", "", heading.lower(), flags=re.ASCII).strip().replace(" ", "-")


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text("utf-8")
    shown = {line.rsplit(".", 1)[1] for line in re.findall(r"^::: (\S+)", text, re.MULTILINE)}
    public = {*flwr_ppsgd.__all__, *flwr_ppsgd.legacy.__all__, *simulation.__all__}
    assert public <= shown
    # where both strategies' arguments are explained, and what a learner may offer besides
    paper = {"clip", "client_step", "server_step"}
    assert shown - public == {"Training", "Enrolled", "Solver", "OwnModel", *paper}


def test_every_page_is_in_the_navigation() -> None:
    """Or ``make docs`` fails: a page that nobody finds is a warning there."""
    listed = re.findall(
        r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(page.name for page in PAGES if page != README)
