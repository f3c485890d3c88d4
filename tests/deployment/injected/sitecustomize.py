"""Makes the disk or the clock of one process fail while a file says so. Python imports this by
itself.

``PPSGD_TEST_FAULTS`` names a directory: ``disk`` in it holds an errno, ``clock`` the seconds that
the clock is behind.
"""

import os
import time
from pathlib import Path
from typing import Any

_PLACE = Path(os.environ.get("PPSGD_TEST_FAULTS", "/nonexistent"))
_open, _time = os.open, time.time


def _failing_open(path: Any, flags: int, *more: Any, **named: Any) -> int:
    told = _PLACE / "disk"
    if flags & os.O_CREAT and str(path).endswith(".theta.partial") and told.exists():
        number = int(told.read_text())
        raise OSError(number, os.strerror(number), path)
    return _open(path, flags, *more, **named)


def _clock() -> float:
    told = _PLACE / "clock"
    return _time() - (float(told.read_text()) if told.exists() else 0.0)


os.open = _failing_open
time.time = _clock
