"""Who the population is: a fixed list of nodes, whoever happens to be online."""

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

log = logging.getLogger("flwr.ppsgd")

POLL_SECONDS = 1.0
Node = TypeVar("Node", int, str)


class Enrolment(Generic[Node]):
    """The fixed list of nodes that form the population; coins are flipped over it, never over who is online."""

    def __init__(self, population: int, enrolled: Iterable[Node] | None, min_online: float) -> None:
        self.known: list[Node] = list(dict.fromkeys(enrolled)) if enrolled is not None else []
        self._population = population
        self.open = enrolled is None
        self._min_online = min_online
        self._begun = False
        self._warned = False
        if not 0 <= min_online <= 1:
            raise ValueError(f"min_online must be in [0, 1], got {min_online!r}: it is a share of the population")
        if enrolled is not None and len(self.known) != population:
            raise ValueError(
                f"enrolled names {len(self.known)} different nodes but the cohort's population is {population}: the "
                "denominator and the guarantee rest on that number, make them equal"
            )

    def refresh(self, look: Callable[[], Iterable[Node]]) -> set[Node]:
        """Who is online now. The first call waits for ``min_online`` of the population and fixes who belongs to it."""
        online = set(look()) if self._begun else self._await(look)
        if self.open and len(self.known) < self._population:
            fresh = sorted(online.difference(self.known))
            self.known += fresh[: self._population - len(self.known)]
        if self.open and not self._warned and not online.issubset(self.known):
            self._warned = True
            log.warning("More nodes than population=%d have come: only the first ones take part", self._population)
        self._begun = True
        return online

    def nodes(self, places: Iterable[int]) -> list[Node]:
        """The nodes at these places of the population; a place that nobody has taken yet is nobody."""
        return [self.known[place] for place in places if place < len(self.known)]

    def _await(self, look: Callable[[], Iterable[Node]]) -> set[Node]:
        wanted, seen = math.ceil(self._min_online * self._population), -1
        while True:
            online = set(look())
            belonging = online if self.open else online.intersection(self.known)
            if self.open and len(online) > self._population:
                raise ValueError(
                    f"{len(online)} nodes are online but the cohort's population is {self._population}: set "
                    f"population={len(online)}, or name the population with enrolled=[…]"
                )
            if len(belonging) >= wanted:
                return online
            if len(belonging) != seen:
                seen = len(belonging)
                log.info(
                    "Waiting for %d of %d enrolled nodes (min_online=%g): %d online",
                    wanted, self._population, self._min_online, seen,
                )  # fmt: skip
            time.sleep(POLL_SECONDS)
