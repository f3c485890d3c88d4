"""What the server is told if a client cannot answer: a code and a class, never a text.

Flower sends ``str(exception)``, and in a simulation the traceback with its causes too. A learner's
message may hold its data or θ, so it stays on this machine, in the log.
"""

import builtins
import logging
import traceback
from enum import StrEnum

log = logging.getLogger("flwr.ppsgd")


class RefusalCode(StrEnum):
    """Why a client did not answer: all that a server gets to know."""

    REFUSED_ORDER = "refused-order"
    REFUSED_POLICY = "refused-policy"
    REFUSED_SIGNATURE = "refused-signature"
    REFUSED_CHARGES = "refused-charges"
    REFUSED_MESSAGE = "refused-message"
    REFUSED_SECURE = "refused-secure"
    NODE_CONFIG = "node-config"
    TOO_LATE = "too-late"
    THETA_BUSY = "theta-busy"
    THETA_DAMAGED = "theta-damaged"
    THETA_FOREIGN = "theta-foreign"
    DISK = "disk"
    LEARNER_FAILED = "learner-failed"


class RefusedError(ValueError):
    """This client does not do what it was asked for.

    Args:
        code: for the server.
        reason: the rule, the value and what to change, for whoever runs this client.
    """

    def __init__(self, code: RefusalCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def limit_refusal(reason: str) -> RefusedError:
    """The refusal of what the owner's limits do not allow."""
    return RefusedError(RefusalCode.REFUSED_POLICY, reason)


class DiskError(OSError):
    """The device's store could not be read or written."""

    code = RefusalCode.DISK


class ClientError(Exception):
    """All that the server gets to know about an error: ``CODE: ClassName``.

    Args:
        code: the value of a ``RefusalCode``.
        kind: the name of a class that Python itself defines.
    """

    def __init__(self, code: str, kind: str) -> None:
        super().__init__(code, kind)
        self.code = code
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.code}: {self.kind}"


def error_for_server(error: Exception) -> ClientError:
    """The error for the server; the full text goes into this machine's log."""
    code = RefusalCode.LEARNER_FAILED
    if isinstance(error, RefusedError | DiskError) and isinstance(error.code, RefusalCode):
        code = error.code
    told = ClientError(code.value, _class_of(error))
    if code == RefusalCode.LEARNER_FAILED and not _explains_itself(error):
        log.error("The client failed; the server is told %r", str(told), exc_info=error)
    else:
        log.error("%s; the server is told %r", error, str(told))
    return told


def _explains_itself(error: Exception) -> bool:
    """Whether it is a line of this package about somebody's input: no traceback is needed."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames or not isinstance(error, ValueError):
        return False
    innermost, _ = frames[-1]
    return str(innermost.f_globals.get("__name__")).startswith("flwr_ppsgd.")


def _class_of(error: Exception) -> str:
    """The nearest of its classes that Python itself defines: no name that anyone else chose."""
    for kind in type(error).__mro__:
        name = kind.__name__
        if vars(builtins).get(name) is kind:
            return name
    return "Exception"
