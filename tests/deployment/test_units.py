"""The systemd units that ship: systemd takes them, and they keep the promises of the example."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from simulations.deployment.federation import PROXY_CONFIG, program

UNITS = sorted(PROXY_CONFIG.with_name("systemd").glob("*.service"))


def test_there_is_one_for_each_kind_of_process() -> None:
    names = [unit.stem for unit in UNITS]
    assert names == ["ppsgd-proxy", "ppsgd-superlink", "ppsgd-supernode"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_it(unit: Path, tmp_path: Path) -> None:
    """With programs that exist here in place of those in /opt and /usr/sbin."""

    def here(found: re.Match[str]) -> str:
        name = found[0].rsplit("/", 1)[-1]
        return program(name) if Path(program(name)).exists() else "/bin/true"

    text = unit.read_text(encoding="utf-8")
    changed = re.sub(r"(?<=ExecStart=)\S+|(?<=ExecStartPre=-)\S+", here, text)
    (tmp_path / unit.name).write_text(changed, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)],
        capture_output=True,
        text=True,
        check=False,
    )
    about_it = [line for line in done.stderr.splitlines() if unit.stem in line]
    assert about_it == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_nobody_else_reads_its_files_and_nothing_survives_it(unit: Path) -> None:
    lines = unit.read_text(encoding="utf-8").splitlines()
    assert "UMask=0077" in lines
    assert "Restart=always" in lines
    assert {"KillMode=control-group", "KillMode=mixed"} & set(lines)
    assert any(line.endswith("DirectoryMode=0700") for line in lines)
    assert "User=root" not in lines


def test_the_superlink_is_on_the_loopback_address_and_authenticates() -> None:
    (superlink,) = (unit for unit in UNITS if unit.stem == "ppsgd-superlink")
    text = superlink.read_text(encoding="utf-8")
    assert "--host 127.0.0.1 " in text
    assert "--enable-supernode-auth" in text
    assert "--insecure" not in text
