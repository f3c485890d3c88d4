"""Through ``flwr run`` itself: a small app directory, a SuperLink of our own, and the truth about how it ended."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import tomli_w

from flwr_ppsgd.experiments.run import Experiment

START_SECONDS = 60.0
MODULE = """from flwr_ppsgd import app

server = app.server
client = app.client
"""  # Flower looks for assignments: an import of the names would not do


class FlowerRunError(RuntimeError):
    """A run that Flower reports as failed, though its command ended well."""


def run(experiment: Experiment, out: Path) -> None:
    """Train under Flower's own simulation engine (Ray), one virtual node a user; FlowerRunError where that failed."""
    with tempfile.TemporaryDirectory() as temporary:
        app = _write_app(Path(temporary) / "ppsgd_app", {**experiment.to_flat(), "out": str(out.resolve())})
        run_app(app, experiment.population)


def run_app(app: Path, nodes: int, changes: str = "") -> None:
    """``flwr run APP`` on so many virtual nodes, with ``changes`` to its run config as of ``--run-config``."""
    with tempfile.TemporaryDirectory() as temporary:
        environment = _environment(Path(temporary))
        resources = f"num-supernodes={nodes} client-resources-num-cpus=1"
        command = [_program("flwr"), "run", str(app.resolve()), "--stream", "--federation-config", resources]
        with _superlink(environment):
            more = ["--run-config", changes] if changes else []
            subprocess.run([*command, *more], env=environment, cwd=temporary, check=False)
            _check_finished(Path(temporary), environment)


def _environment(home: Path) -> dict[str, str]:
    """Flower with a home of its own, free ports, no telemetry, and without installing torch a second time."""
    ports = _free_ports(2)
    programs = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": programs + os.pathsep + os.environ.get("PATH", ""),
        "FLWR_HOME": str(home / "flwr-home"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(ports[0]),
        "FLWR_LOCAL_CONTROL_API_PORT": str(ports[1]),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }


def _write_app(directory: Path, config: dict[str, Any]) -> Path:
    """What ``flwr run`` needs: a pyproject.toml and a module that names the two apps."""
    directory.mkdir()
    (directory / "ppsgd_app.py").write_text(MODULE)
    components = {"serverapp": "ppsgd_app:server", "clientapp": "ppsgd_app:client"}
    about = {"name": "ppsgd-app", "version": "1.0.0", "description": "PPSGD", "license": "Apache-2.0"}
    project = {
        "project": {**about, "dependencies": ["flwr-ppsgd"]},
        "tool": {"flwr": {"app": {"publisher": "flwr-ppsgd", "components": components, "config": config}}},
    }
    (directory / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")
    return directory


@contextmanager
def _superlink(environment: dict[str, str]) -> Iterator[None]:
    """A SuperLink for simulations, for as long as the block lasts. ``flwr run`` would start one and leave it behind."""
    port = environment["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"]
    control = "127.0.0.1:" + environment["FLWR_LOCAL_CONTROL_API_PORT"]
    address = ["--host", "127.0.0.1", "--port", port, "--control-api-address", control]
    command = [_program("flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess", *address]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        _await_health(port, process)
        yield
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the SuperLink and whatever it has started: a run that was interrupted must not train on."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=15)


def _await_health(port: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=1.0).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise FlowerRunError(f"flower-superlink did not answer on port {port} within {START_SECONDS:g} s")


def _check_finished(directory: Path, environment: dict[str, str]) -> None:
    """``flwr run`` ends with 0 even if the run failed; ``flwr list`` knows."""
    listing = subprocess.run(
        [_program("flwr"), "list", "--format", "json"],
        env=environment, cwd=directory, capture_output=True, text=True, check=False,
    )  # fmt: skip
    try:
        status = str(json.loads(listing.stdout)["runs"][0]["status"])
    except (json.JSONDecodeError, KeyError, IndexError) as error:
        raise FlowerRunError(f"Flower does not say how the run ended ({error}): {listing.stdout[-300:]}") from None
    if status != "finished:completed":
        raise FlowerRunError(f"Flower reports the run as {status}: see its log above")


def _program(name: str) -> str:
    """Beside this Python, where an installation puts it, or else wherever it is found."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or str(beside)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
