"""Flower must neither phone home nor leave settings behind while it is tested."""

import os

import pytest

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")


@pytest.fixture(autouse=True)
def _no_waiting_for_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr_ppsgd.server.journal.PATIENCE", 0.0)
