"""Train through ``flwr run``: write a small app, start a SuperLink, check how the run ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import tomli_w

from flwr_ppsgd.lab.experiment import Experiment

START_SECONDS = 60.0
STOP_SECONDS = 15
COMPLETED = "finished:completed"
APP = "ppsgd_app"
# Flower looks for assignments: importing the names is not enough. Client and server have modules of
# their own, so that a client does not load the server.
CLIENT_MODULE = """from flwr_ppsgd.lab import client_app

client = client_app.client
"""
SERVER_MODULE = """from flwr_ppsgd.lab import server_app

server = server_app.server
"""


class FlowerRunError(RuntimeError):
    """Flower reports a run as failed, although ``flwr run`` ended with 0."""


def run_with_flower(experiment: Experiment, out: Path) -> None:
    """Train under Flower's own simulation engine (Ray), one virtual node for each user.

    FlowerRunError if the run failed.
    """
    config = {**experiment.to_flat(), "out": str(out.resolve())}
    with tempfile.TemporaryDirectory() as temporary:
        app = _write_app(Path(temporary) / APP, config)
        run_app(app, experiment.training.population)


def run_app(app: Path, nodes: int, changes: str = "") -> None:
    """``flwr run APP`` on virtual nodes.

    Args:
        app: the directory of the app.
        nodes: the number of virtual nodes.
        changes: to the run config, written as for ``--run-config``.
    """
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        environment = _flower_environment(directory)
        resources = f"num-supernodes={nodes} client-resources-num-cpus=1"
        command = ["flwr", "run", str(app.resolve()), "--stream"]
        command += ["--federation-config", resources]
        if changes:
            command += ["--run-config", changes]
        with _run_superlink(environment):
            subprocess.run(command, env=environment, cwd=directory, check=False)
            _check_finished(directory, environment)


def _flower_environment(home: Path) -> dict[str, str]:
    """For Flower's programs: this Python's directory, a new home, free ports, no telemetry and no
    installation of dependencies."""
    with socket.socket() as http, socket.socket() as control:
        http.bind(("127.0.0.1", 0))
        control.bind(("127.0.0.1", 0))
        http_port = http.getsockname()[1]
        control_port = control.getsockname()[1]
    programs = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": programs + os.pathsep + os.environ.get("PATH", ""),
        "FLWR_HOME": str(home / "flwr-home"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http_port),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control_port),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }


def _write_app(directory: Path, config: Mapping[str, Any]) -> Path:
    """Write a pyproject.toml and the modules that it names, for ``flwr run``."""
    directory.mkdir()
    (directory / "ppsgd_client.py").write_text(CLIENT_MODULE)
    (directory / "ppsgd_server.py").write_text(SERVER_MODULE)
    about = {
        "name": "ppsgd-app",
        "version": "1.0.0",
        "description": "PPSGD",
        "license": "Apache-2.0",
        "dependencies": ["flwr-ppsgd"],
    }
    app = {
        "publisher": "flwr-ppsgd",
        "components": {"serverapp": "ppsgd_server:server", "clientapp": "ppsgd_client:client"},
        "config": dict(config),
    }
    text = tomli_w.dumps({"project": about, "tool": {"flwr": {"app": app}}})
    (directory / "pyproject.toml").write_text(text, encoding="utf-8")
    return directory


@contextmanager
def _run_superlink(environment: dict[str, str]) -> Iterator[None]:
    """A SuperLink for simulations that ends with the block.

    ``flwr run`` would start one and leave it running.
    """
    port = environment["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"]
    control = "127.0.0.1:" + environment["FLWR_LOCAL_CONTROL_API_PORT"]
    command = ["flower-superlink", "--insecure", "--simulation"]
    command += ["--isolation", "subprocess"]
    command += ["--host", "127.0.0.1", "--port", port, "--control-api-address", control]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _await_health(port, process)
        yield
    finally:
        _stop_superlink(process)


def _stop_superlink(process: subprocess.Popen[bytes]) -> None:
    """End the SuperLink and all it has started: an interrupted run must not train on."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_SECONDS)


def _await_health(port: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=1.0).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise FlowerRunError(
        f"flower-superlink did not answer on port {port} within {START_SECONDS:g} s"
    )


def _check_finished(directory: Path, environment: dict[str, str]) -> None:
    """Ask ``flwr list`` for the status: ``flwr run`` ends with 0 even if the run failed."""
    listing = subprocess.run(
        ["flwr", "list", "--format", "json"],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        latest = json.loads(listing.stdout)["runs"][0]
        status = str(latest["status"])
    except (json.JSONDecodeError, KeyError, IndexError) as error:
        raise FlowerRunError(
            f"Flower does not say how the run ended ({error}): {listing.stdout[-300:]}"
        ) from None
    if status != COMPLETED:
        raise FlowerRunError(f"Flower reports the run as {status}: see its log above")
