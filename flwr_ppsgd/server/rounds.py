"""A sum over users, from asking to closing: each reply is a vector or zero, never an exception."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import PrivateMetrics, Release, Vector
from flwr_ppsgd.checks import printable
from flwr_ppsgd.noise import GridSum, RandomStream
from flwr_ppsgd.secure.coordinator import Coordinator, NoSumError, SecureStage
from flwr_ppsgd.secure.terms import Session
from flwr_ppsgd.training import Identity
from flwr_ppsgd.wire import Asked

log = logging.getLogger("flwr.ppsgd")

# What one client sent: its vector, its masked vector, or another message of a secure sum.
Sent: TypeAlias = NDArray[Any] | bytes
# What each node gets besides its Order and w, in one exchange of messages.
Payloads: TypeAlias = Mapping[Identity, bytes]

NOT_FINITE = "not finite"
PLAIN_STAGE = 0  # the only exchange of a plain sum; those of a secure one are SecureStages
ENOUGH_ASKED = 10  # clients whose failing together says something about all
LONGEST_DETAIL = 300  # characters of a client's error that the server keeps


class UnusableError(ValueError):
    """A reply that counts as zero, with the reason under which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class SumRequest:
    """A sum that is asked for.

    Args:
        what: what each user sends: see ``Order.asks``.
        round: the absolute round; 0 before the first.
        release: who is asked, the bound of one vector, the noise, the divisor, and whether the
            server sees the sum only.
        length: the number of coordinates, without private measures.
        metrics: private measures that follow them, if there are any.
    """

    what: Asked
    round: int
    release: Release
    length: int
    metrics: PrivateMetrics | None = None

    @property
    def size(self) -> int:
        """The number of coordinates that are released."""
        return self.length + (len(self.metrics.bounds) if self.metrics else 0)

    def vector_of(self, gradient: Vector, measures: Mapping[str, float]) -> Vector:
        """What of one user is summed: the gradient, then private measures."""
        if self.metrics is None:
            return gradient
        return np.append(gradient, self.metrics.encode(measures, self.release.clip_norm))


class OpenSum:
    """A sum on its way: who was asked, what was added, what counted as zero and why.

    The server sees the vectors of this one, clips them and adds the noise. Nothing that is summed
    can be seen before it is charged.

    Args:
        request: what is asked for.
        nodes: who is asked.
        offline: how many were drawn and were not there to be asked.
        charge: writes the release down.
    """

    why_lost = ""  # why a secure sum has no total

    def __init__(
        self,
        request: SumRequest,
        nodes: Sequence[Identity],
        offline: int,
        charge: Callable[[SumRequest], None],
    ) -> None:
        self.request = request
        self.nodes = nodes
        self.closed = False
        self.first_failure = ""
        self._charge = charge
        self._charged = False
        self.stage = PLAIN_STAGE  # which exchange is asked for
        self._waiting: set[Identity] = set()  # for a valid reply
        self._silent: set[Identity] = set()
        self._unnamed = 0  # failures of asked nodes that Flower does not name
        self._used = 0  # vectors in the sum
        self._heard = 0  # replies that could be used, be they vectors or not
        self._zeros = Counter({"offline": offline})

    def exchanges(self) -> Iterator[Payloads]:
        """What to send: each exchange is answered before the next is asked for."""
        self._sum = GridSum(self.request.length, self.request.release, self.request.metrics)
        yield self._begin(PLAIN_STAGE, dict.fromkeys(self.nodes, b""))

    def _begin(self, stage: int, payloads: Payloads) -> Payloads:
        """An exchange to ask for; who has not answered the one before is missing."""
        self.stage = stage
        self._zeros["missing"] += len(self._silent)
        self._waiting = set(payloads)
        self._silent = set(payloads)
        return payloads

    def take(self, node: Identity | None, read: Callable[[], Sent]) -> None:
        """Add the first valid reply of an asked node. Everything else is zero, and counted.

        Args:
            node: whose reply it is.
            read: returns what was sent; an exception means that nothing of it can be used.
        """
        try:
            if node not in self._waiting:
                detail = "a reply of a node that was not asked, or has answered"
                raise UnusableError("not asked for", detail)
            self._used += self._add(node, read())
            self._waiting.discard(node)
            self._heard += 1
        except Exception as error:  # a reply is never a reason to stop a round
            self._count_as_zero(node, error)
        self._silent.discard(node)

    def take_unnamed_failure(self, detail: str) -> None:
        """Count the failure of an asked node that Flower does not name."""
        self._unnamed += 1
        self._count_as_zero(None, UnusableError("client error", detail))

    def _add(self, node: Identity, sent: Sent) -> bool:  # noqa: ARG002 - of a secure sum it counts
        """Whether this was a vector, which is in the sum now; an exception if it is no use."""
        if isinstance(sent, bytes):
            raise UnusableError("malformed", "bytes where a vector was expected")
        self._sum.add(sent)
        return True

    def _count_as_zero(self, node: Identity | None, error: Exception) -> None:
        if isinstance(error, UnusableError):
            reason = error.reason
        elif isinstance(error, FloatingPointError):
            reason = NOT_FINITE
        else:
            reason = "malformed"
        self._zeros[reason] += 1
        detail = printable(error, LONGEST_DETAIL)
        self.first_failure = self.first_failure or detail
        number = self.request.round
        log.debug("Round %d: a reply of node %s counts as zero: %s", number, node, detail)

    def charge(self) -> None:
        """Write the release down, once."""
        if not self._charged:
            self._charge(self.request)
            self._charged = True

    def close(self, stream: RandomStream) -> Vector | None:
        """The noisy sum, charged before it exists; None if a secure sum has none."""
        self.charge()
        self.closed = True
        return self._noisy(stream)

    def _noisy(self, stream: RandomStream) -> Vector | None:
        return self._sum.noisy(stream)

    @property
    def enough_asked(self) -> bool:
        """Whether enough were asked, or all that there are, for their failing to mean something."""
        cohort = self.request.release.cohort
        everyone = cohort.rate == 1 and len(self.nodes) >= cohort.population
        return everyone or len(self.nodes) >= ENOUGH_ASKED

    @property
    def usable(self) -> bool:
        """Whether any reply had a form that can be used; a vector that is not finite has one."""
        return self._heard > 0 or self._zeros[NOT_FINITE] > 0

    @property
    def all_failed_alike(self) -> bool:
        """Whether everyone asked has answered, and every answer failed for one kind of reason."""
        reasons = [reason for reason, times in self._zeros.items() if times]
        return not self._silent and len(reasons) == 1 and self._used == 0

    def facts(self) -> dict[str, Any]:
        """How many replies counted, and why others did not. It must not leave the server.

        Who sent them is not in it.
        """
        missing = max(0, len(self._silent) - self._unnamed)
        zeros = self._zeros + Counter({"missing": missing})
        return {
            "round": self.request.round,
            "used": self._used,
            "zeros": dict(sorted(zeros.items())),
            "first_failure": self.first_failure,
        }


class SecureOpenSum(OpenSum):
    """A sum of masked vectors, to which the clients have added the noise.

    Four exchanges: keys, shares, masked vectors, revealed shares. If too few clients stay, nothing
    can be unmasked, and there is no sum. ``session`` names it to the clients, with its terms;
    ``stream`` draws everybody's neighbours.
    """

    def __init__(  # noqa: PLR0917 - those of OpenSum, and two more
        self,
        request: SumRequest,
        nodes: Sequence[Identity],
        offline: int,
        charge: Callable[[SumRequest], None],
        session: Session,
        stream: RandomStream,
    ) -> None:
        super().__init__(request, nodes, offline, charge)
        self._masked = Coordinator[Identity](session, request.size, stream)
        self._total: Vector | None = None

    def exchanges(self) -> Iterator[Payloads]:
        """As of a plain sum; charged before the last one, after which it can be unmasked."""
        masked = self._masked
        try:
            yield self._begin(SecureStage.KEYS, dict.fromkeys(self.nodes, b""))
            yield self._begin(SecureStage.SHARES, masked.rosters())
            yield self._begin(SecureStage.MASKED, masked.partners())
            survivors = masked.survivors()
            self.charge()
            yield self._begin(SecureStage.REVEALED, survivors)
            self._total = masked.total().astype(float) * self.request.release.grid
        except NoSumError as error:
            self.why_lost = str(error)

    def _add(self, node: Identity, sent: Sent) -> bool:
        takes: dict[int, Callable[[Identity, Any], bool]] = {
            SecureStage.KEYS: self._masked.take_keys,
            SecureStage.SHARES: self._masked.take_shares,
            SecureStage.MASKED: self._masked.take_masked,
            SecureStage.REVEALED: self._masked.take_revealed,
        }
        if not takes[self.stage](node, sent):
            raise UnusableError("malformed", f"malformed reply to exchange {self.stage}")
        return self.stage == SecureStage.MASKED

    def _noisy(self, stream: RandomStream) -> Vector | None:  # noqa: ARG002 - the noise is in it
        return self._total
