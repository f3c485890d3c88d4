"""The worked example as a process of its own: whoever ends it ends all of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from simulations.deployment.federation import wait_for


def at_work_in(directory: Path) -> list[str]:
    """The processes whose working directory, Flower home or arguments are in a directory."""
    wanted = str(directory).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            place = os.readlink(entry / "cwd").encode()
            told = (entry / "cmdline").read_bytes()
            known = place + told + (entry / "environ").read_bytes()
        except OSError:
            continue
        if wanted in known:
            found.append(told.replace(b"\0", b" ").decode())
    return found


@pytest.mark.deployment
@pytest.mark.parametrize("until", ["SuperLink on", "flwr run"])
def test_sigterm_leaves_no_process_behind(tmp_path: Path, until: str) -> None:
    log = tmp_path / "example.log"
    place = tmp_path / "place"
    command = [sys.executable, "-m", "simulations.deployment", "--keep", str(place)]
    root = Path(__file__).parents[2]
    with log.open("wb") as out:
        example = subprocess.Popen(command, cwd=root, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for("the example", lambda: until in log.read_text() or example.poll() is not None)
        assert at_work_in(place), log.read_text()
        example.send_signal(signal.SIGTERM)
        assert example.wait() == 128 + signal.SIGTERM
        assert at_work_in(place) == []
    finally:
        example.kill()
        example.wait()
