"""A test that hangs ends, and says what it was waiting for."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def time_limit(seconds: int, end: Callable[[], str] = str) -> Iterator[None]:
    """TimeoutError in the middle of the block, after so many seconds.

    Args:
        seconds: far more than the block takes, however busy the machine is.
        end: is called then: it ends whatever was started, and its text is part of the error.
    """

    def give_up(*_: object) -> None:
        raise TimeoutError(f"no end after {seconds} s\n{end()}")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
