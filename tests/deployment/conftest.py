"""No test of processes hangs for ever, and whoever ends the tests ends what they have started."""

import signal
from collections.abc import Iterator

import pytest

from tests.deployment.harness import end_all
from tests.support.time_limit import time_limit

LIMIT = 2400  # seconds; the longest test takes a quarter of it on a machine at load 15


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    with time_limit(LIMIT, end_all):
        yield


@pytest.fixture(scope="session", autouse=True)
def _sigterm_ends_all() -> Iterator[None]:
    """As Ctrl-C does: fixtures end their processes."""

    def leave(*_: object) -> None:
        pytest.exit("SIGTERM")

    before = signal.signal(signal.SIGTERM, leave)
    yield
    signal.signal(signal.SIGTERM, before)
