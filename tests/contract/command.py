"""The ``ppsgd`` command, as its entry point runs it, without the cost of a new process."""

import contextlib
import io
import sys
from dataclasses import dataclass
from unittest import mock

from flwr_ppsgd import cli


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit status and what it printed."""

    status: int
    out: str
    err: str


def ppsgd(*arguments: object) -> Ended:
    """Run ``ppsgd`` with these arguments."""
    typed = ["ppsgd", *map(str, arguments)]
    out = io.StringIO()
    err = io.StringIO()
    status: object = 0
    with (
        mock.patch.object(sys, "argv", typed),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code or 0
    assert isinstance(status, int)
    return Ended(status, out.getvalue(), err.getvalue())
