"""The ``ppsgd`` command as its entry point runs it, without the cost of a new process."""

import contextlib
import io
import logging
import signal
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from flwr_ppsgd import cli


class Ended(NamedTuple):
    """How a command ended: its exit status and what it printed."""

    status: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Everything that was printed, in one line: where lines are broken is not promised."""
        return " ".join(self.out.split())


def ppsgd(*arguments: object, where: Path | None = None) -> Ended:
    """Run ``ppsgd`` with these arguments, in this directory if one is given."""
    out = io.StringIO()
    err = io.StringIO()
    log = logging.getLogger("flwr")  # a command makes it quieter, for good
    with contextlib.ExitStack() as stack:
        stack.callback(log.setLevel, log.level)
        if where is not None:
            stack.enter_context(contextlib.chdir(where))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(mock.patch.object(sys, "argv", ["ppsgd", *map(str, arguments)]))
        try:
            cli.main()
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
    return Ended(status, out.getvalue(), err.getvalue())


def heed_ctrl_c() -> None:
    """In a new process: what a shell starts in the background ignores Ctrl-C, and so would this."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
