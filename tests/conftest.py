"""Flower must neither phone home nor leave settings behind while it is tested."""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

settings.register_profile(
    "fuzz",
    max_examples=10_000,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def _no_waiting_for_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr_ppsgd.server.store.PATIENCE", 0.0)


@pytest.fixture(autouse=True)
def _as_much_logging_as_before() -> Iterator[None]:
    """Commands and examples make Flower quieter, for good; the next test may read its log."""
    log = logging.getLogger("flwr")
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def _records_of_charges_in_a_temporary_place(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPSGD_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small networks are several times slower on threads that share busy cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
