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
    """This client does not do what it was asked for, or its disk does not.

    Args:
        code: for the server.
        reason: the rule, the value and what to change, for the person who runs this client.
    """

    def __init__(self, code: RefusalCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def limit_refusal(reason: str) -> RefusedError:
    """The refusal of what the owner's limits do not allow."""
    return RefusedError(RefusalCode.REFUSED_POLICY, reason)


class ClientError(Exception):
    """All that the server gets to know about an error: ``CODE: ClassName``.

    Args:
        code: the value of a ``RefusalCode``.
        kind: the name of a class that Python itself defines.
    """

    def __init__(self, code: str, kind: str) -> None:
        super().__init__(code, kind)
        self.code = code

    def __str__(self) -> str:
        return ": ".join(self.args)


def error_for_server(error: Exception) -> ClientError:
    """The error for the server; the full text goes into this machine's log."""
    code = RefusalCode.LEARNER_FAILED
    if isinstance(error, RefusedError) and isinstance(error.code, RefusalCode):
        code = error.code
    # the nearest of its classes that Python itself defines: no name that anyone else chose
    names = [kind.__name__ for kind in type(error).__mro__ if kind in vars(builtins).values()]
    failure = ClientError(code.value, names[0])
    if code == RefusalCode.LEARNER_FAILED and not _explains_itself(error):
        log.error("The client failed; the server is told %r", str(failure), exc_info=error)
    else:
        log.error("%s; the server is told %r", error, str(failure))
    return failure


def _explains_itself(error: Exception) -> bool:
    """Whether it is a line of this package about somebody's input: no traceback is needed."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames or not isinstance(error, ValueError):
        return False
    innermost, _ = frames[-1]
    return str(innermost.f_globals.get("__name__")).startswith("flwr_ppsgd.")
