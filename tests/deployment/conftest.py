"""No test of processes hangs for ever."""

from collections.abc import Iterator

import pytest

from tests.deployment.harness import end_all
from tests.support.time_limit import time_limit

LIMIT = 2400  # seconds; the longest test takes a quarter of it on a machine at load 15


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    with time_limit(LIMIT, end_all):
        yield
