"""A round whose sum is secure: four exchanges instead of one, charged before the last.

The server takes keys, shares, masked vectors and revealed shares in turn, and adds up. If too few
clients stay, nothing can be unmasked: w stays as it is, and the round is charged all the same.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from flwr_ppsgd.algorithm import Release, Vector
from flwr_ppsgd.noise import coins_for
from flwr_ppsgd.secure.coordinator import Coordinator, NoSumError
from flwr_ppsgd.secure.participant import Session
from flwr_ppsgd.server.curator import Curator
from flwr_ppsgd.server.rounds import Reply, UnusableError
from flwr_ppsgd.wire import words_of

log = logging.getLogger("flwr.ppsgd")

MASKED_STAGE = 3


@dataclass(frozen=True)
class Exchange:
    """One message to each of some nodes.

    Args:
        stage: which exchange it is, 1 to 4.
        payloads: what each node gets, besides its Order.
    """

    stage: int
    payloads: Mapping[Hashable, bytes]

    @property
    def brings_w(self) -> bool:
        """Whether w travels along: only where a gradient is asked for."""
        return self.stage == MASKED_STAGE


class Purpose(Protocol):
    """What a secure sum is for."""

    release: Release
    size: int  # coordinates of the sum, private measures included

    def charge(self) -> None:
        """Write the release down."""
        ...

    def publish(self, noisy: Vector | None) -> tuple[Vector, dict[str, float]]:
        """What follows from the noisy sum; None if there is none."""
        ...


class SecureRound:
    """One secure sum, from asking for keys to publishing.

    Args:
        curator: knows the coins.
        session: which sum it is.
        purpose: charges and publishes.
    """

    def __init__(self, curator: Curator, session: Session, purpose: Purpose) -> None:
        rules = purpose.release.aggregation
        assert rules is not None
        self._purpose = purpose
        coins = coins_for(curator.training.insecure_seed, "neighbours", session.round)
        self._sum = Coordinator[Hashable](rules, session, purpose.size, coins)
        self._stage = 0
        self._charged = False
        self._total: Vector | None = None
        self.why_lost = ""  # why there is no sum

    def exchanges(self, asked: list[Hashable]) -> Iterator[Exchange]:
        """What to send, one exchange after the other; give each one's replies to ``read``."""
        try:
            yield self._exchange(1, dict.fromkeys(asked, b""))
            yield self._exchange(2, self._sum.rosters())
            yield self._exchange(3, self._sum.partners())
            named = self._sum.survivors()
            self._charge()
            yield self._exchange(4, named)
            words = self._sum.total()
            self._total = words.astype(float) * self._purpose.release.grid
        except NoSumError as error:
            self.why_lost = str(error)
        self._charge()

    def read(self, node: Hashable, reply: Reply) -> Callable[[], bool]:
        """Takes a reply in; an exception if it cannot be used."""
        if self._stage == MASKED_STAGE:
            words = words_of(reply.arrays, self._purpose.size)
            taken = self._sum.take_masked(node, words)
        else:
            takes: dict[int, Callable[[Hashable, bytes], bool]] = {
                1: self._sum.take_keys,
                2: self._sum.take_shares,
                4: self._sum.take_revealed,
            }
            taken = takes[self._stage](node, reply.payload)
        if not taken:
            raise UnusableError("malformed", f"an answer to exchange {self._stage} that is none")
        is_vector = self._stage == MASKED_STAGE
        return lambda: is_vector

    def publish(self) -> tuple[Vector, dict[str, float]]:
        """What follows from the sum, or from there being none."""
        if self.why_lost:
            log.warning(
                "A round has no sum (%s): nothing was unmasked, and it is charged all the same. "
                "Lower honest or colluding if that happens often.",
                self.why_lost,
            )
        return self._purpose.publish(self._total)

    def _exchange(self, stage: int, payloads: Mapping[Hashable, bytes]) -> Exchange:
        self._stage = stage
        return Exchange(stage, payloads)

    def _charge(self) -> None:
        if not self._charged:
            self._purpose.charge()
            self._charged = True


class SecureGradients:
    """A round of training.

    Args:
        curator: charges and releases.
        number: the absolute round.
        w: the shared parameters as one flat vector.
        columns: of users' rows, if w has a row for each of them.
    """

    def __init__(self, curator: Curator, number: int, w: Vector, columns: int) -> None:
        self._curator = curator
        self._number = number
        self._w = w
        self._columns = columns
        self.release = curator.training.release
        measures = curator.training.metrics
        self.size = len(w) + (len(measures.bounds) if measures else 0)

    def charge(self) -> None:
        self._curator.charge_round(self._number)

    def publish(self, noisy: Vector | None) -> tuple[Vector, dict[str, float]]:
        """The new w, and private measures; w as it was if there is no sum."""
        return self._curator.publish_sum(self._number, self._w, noisy, self._columns)


class SecureAnswers:
    """What is asked for once before the first round.

    Args:
        curator: charges and releases.
        name: what is asked for.
    """

    def __init__(self, curator: Curator, name: str) -> None:
        recipe = curator.training.recipe
        assert recipe is not None
        self._curator = curator
        self._name = name
        self.release = recipe.before[name]
        self.size = recipe.length(name)

    def charge(self) -> None:
        self._curator.charge_before(self._name)

    def publish(self, noisy: Vector | None) -> tuple[Vector, dict[str, float]]:
        """The noisy sum; zeros if there is none."""
        self._curator.note_sum(self._name, noisy)
        return self._curator.sums[self._name], {}
