"""Wheel and sdist: built from a copy of the sources, installed where the checkout is out of reach,
and used from there; the files that belong to a release."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

PACKAGE = "flwr_ppsgd"
SOURCES = ("pyproject.toml", "README.md", "LICENSE")
WRITTEN = ("config.toml", "metrics.jsonl", "privacy.json", "model.npz", "learning.png")
WHERE = f"""
import importlib.metadata, {PACKAGE}, {PACKAGE}.cli, {PACKAGE}.lab, {PACKAGE}.simulation
for module in ({PACKAGE}, {PACKAGE}.cli, {PACKAGE}.lab, {PACKAGE}.simulation):
    print(module.__file__)
print(importlib.metadata.distribution("flwr-ppsgd").locate_file("{PACKAGE}"))
"""


def execute(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that cannot see the checkout by its environment or by where it starts."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONNOUSERSITE": "1",
    }
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def succeed(*command: str | Path, cwd: Path) -> str:
    done = execute(*command, cwd=cwd)
    assert done.returncode == 0, f"{command} gave {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist of a copy of the sources: building in the checkout would leave build/ and
    egg-info behind."""
    sources = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        shutil.copy(ROOT / name, sources / name)
    caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / PACKAGE, sources / PACKAGE, ignore=caches)
    succeed(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", cwd=sources)
    return sources / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, and the dependencies of this one behind it.

    The dependencies come last, by a ``.pth`` line. The ``.pth`` files in a directory added that way
    are not read, so an editable installation there does not work; and pip, which would take it for
    installed, has run before.
    """
    directory = tmp_path_factory.mktemp("environment") / "venv"
    succeed(sys.executable, "-m", "venv", "--without-pip", directory, cwd=directory.parent)
    pip = (sys.executable, "-m", "pip", "--python", directory / "bin" / "python")
    quiet = ("--disable-pip-version-check", "--quiet")
    succeed(*pip, "install", "--no-deps", "--no-index", *quiet, wheel, cwd=directory.parent)
    (packages,) = directory.glob("lib/python*/site-packages")
    shared = [place for place in sys.path if Path(place).name == "site-packages"]
    (packages / "dependencies.pth").write_text("\n".join(shared) + "\n", encoding="utf-8")
    return directory


def test_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    """Packages are listed by hand in pyproject.toml: a new one that is missing there shows up
    here."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = (
        path
        for path in (ROOT / PACKAGE).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    assert packed == {path.relative_to(ROOT).as_posix() for path in files}
    assert {f"{PACKAGE}/py.typed", f"{PACKAGE}/lab/presets/synthetic.toml"} <= packed


def test_wheel_and_sdist_say_what_they_are(built: Path, wheel: Path) -> None:
    """What an index shows: name, version, licence, a README that it can draw."""
    (sdist,) = built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        shown = email.message_from_string(archive.read(name).decode())
    version = pyproject()["project"]["version"]
    assert (shown["Name"], shown["Version"]) == ("flwr-ppsgd", version)
    assert sdist.name == f"flwr_ppsgd-{version}.tar.gz"
    assert shown["License-Expression"] == "Apache-2.0"
    assert shown["Description-Content-Type"] == "text/markdown"
    assert shown.get_payload() == (ROOT / "README.md").read_text("utf-8")
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(
        shown.get_all("Classifier", [])
    )
    with tarfile.open(sdist) as archive:
        packed = {Path(name).name for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "py.typed"} <= packed


def test_the_citation_names_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {pyproject()['project']['version']}\n" in text


def test_the_lock_has_the_tested_versions_with_hashes_and_no_address() -> None:
    text = (ROOT / "requirements.lock").read_text("utf-8")
    assert "://" not in text
    assert "--index" not in text
    locked = dict(re.findall(r"^([\w.-]+)==(\S+) \\\n    --hash=sha256:", text, re.MULTILINE))
    assert len(locked) == len(re.findall(r"^[^\s#]", text, re.MULTILINE))  # each has a hash
    tested = (ROOT / "constraints.txt").read_text("utf-8")
    pins = {
        plain(name): version
        for name, version in re.findall(r"^(\S+)==(\S+)$", tested, re.MULTILINE)
    }
    assert {name: pins[name] for name in locked if name in pins} == {
        name: version for name, version in locked.items() if name in pins
    }
    direct = [re.split(r"[\[><=]", each)[0] for each in pyproject()["project"]["dependencies"]]
    assert {plain(name) for name in direct} <= locked.keys()


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def readme_lines(directory: Path) -> Path:
    """README's Python blocks as a file."""
    text = (ROOT / "README.md").read_text("utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    script = directory / "readme.py"
    script.write_text(code, encoding="utf-8")
    return script


def test_readmes_lines_run_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    script = readme_lines(tmp_path)
    shown = succeed(environment / "bin" / "python", script, cwd=tmp_path)
    assert "(2, 0.0001)-joint differential privacy" in shown


@pytest.mark.long
def test_readmes_lines_run_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Only what pip installs: a dependency that is not declared shows up here."""
    succeed(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    pip = (python, "-m", "pip", "install", "--quiet", "-c", constraints, wheel)
    succeed(*pip, cwd=tmp_path)
    shown = succeed(python, readme_lines(tmp_path), cwd=tmp_path)
    assert "(2, 0.0001)-joint differential privacy" in shown
    command = tmp_path / "venv" / "bin" / "ppsgd"
    assert "run" in succeed(command, "--help", cwd=tmp_path)
    missing = execute(python, "-c", "from flwr_ppsgd import SplitModel", cwd=tmp_path)
    assert "pip install 'flwr-ppsgd[torch]'" in missing.stderr


def test_package_is_imported_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    """Otherwise every other test here would be about the checkout."""
    places = succeed(environment / "bin" / "python", "-c", WHERE, cwd=tmp_path).split("\n")[:-1]
    assert len(places) == 5
    assert all(Path(place).is_relative_to(environment / "lib") for place in places), places


def test_the_command_works_and_run_writes_a_complete_directory(
    environment: Path, tmp_path: Path
) -> None:
    ppsgd = environment / "bin" / "ppsgd"
    version = pyproject()["project"]["version"]
    assert succeed(ppsgd, "--version", cwd=tmp_path) == f"flwr_ppsgd {version}\n"
    small = ("--rounds", "4", "--set", "population=6", "--set", "features=8")
    succeed(ppsgd, "run", *small, "--out", "out", cwd=tmp_path)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(WRITTEN)
    assert all((tmp_path / "out" / name).stat().st_size for name in WRITTEN)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
