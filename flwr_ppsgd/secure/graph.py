"""Who holds whose shares: everyone up to 200 participants, random neighbours beyond.

A random graph is the union of k/2 random cycles through all participants (Bell et al. 2020 draw one
random cycle and join everybody to the k nearest on it; independent cycles need half the neighbours
for the same connectivity). Two things must not happen, in all with a probability of at most η per
round:

* the honest survivors fall into parts with no edge between them: each part's sum would show. For
  a part of s of h survivors, one cycle has no edge with probability p_s, so at most
  Σ_s C(h, s)·p_s^(k/2).
* more than t′ of somebody's share-holders collude. A share needs t_s > (k + t′)/2 holders: then no
  server can have one half of them give up one secret of a participant, and the other half the
  other.

Who colludes and who drops out is taken to be independent of the graph, which the server draws anew
for each round in secret. A server that lies about survivors can read single vectors in
a random graph; in the complete graph it cannot.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import MOST_COMPLETE, SecureSum, Vector
from flwr_ppsgd.noise import RandomStream

MOST_PARTICIPANTS = 10_000  # a client works out the graph's numbers itself, in under a second
LOST_ROUND = 1e-3  # the chance of a round without a sum if as many drop out as may


@dataclass(frozen=True)
class Design:
    """How many neighbours each participant has, and how many of them may collude.

    Args:
        neighbours: k.
        fewest: of distinct neighbours; cycles may join the same two participants twice.
        colluders: t′, the most that collude among one participant's share-holders.
        complete: whether everybody is everybody's neighbour.
    """

    neighbours: int
    fewest: int
    colluders: int
    complete: bool

    def threshold(self, holders: int) -> int:
        """t_s, the smallest whole number above (k + t′)/2 for a participant of k holders."""
        return (holders + self.colluders) // 2 + 1


@functools.lru_cache(maxsize=256)
def design(rules: SecureSum, participants: int) -> Design:
    """The graph of a round: complete, or with the fewest neighbours that keep the promise.

    ValueError if there is none.

    Args:
        rules: h, t, η and the least number of neighbours.
        participants: n, those who sent keys.
    """
    if participants > MOST_PARTICIPANTS:
        raise ValueError(
            f"a secure sum has at most {MOST_PARTICIPANTS:,} participants, got {participants:,}: "
            "draw fewer clients per round"
        )
    others = max(participants - 1, 0)
    complete = Design(others, others, rules.colluding, True)
    if rules.is_complete(participants) or participants < rules.least:
        return complete
    connected = _neighbours_to_connect(participants, rules.honest, rules.failure / 2)
    fewest = max(connected, rules.neighbours + rules.neighbours % 2)
    for neighbours in range(fewest, min(others, MOST_COMPLETE), 2):
        colluders = _most_colluders(rules, participants, neighbours)
        distinct = _fewest_distinct(participants, neighbours)
        found = Design(neighbours, distinct, colluders, False)
        if _chance_of_no_sum(rules, participants, found) <= LOST_ROUND:
            return found
    if participants <= MOST_COMPLETE:
        return complete
    raise ValueError(
        f"no graph of fewer than {MOST_COMPLETE} neighbours protects {participants} participants "
        f"with honest={rules.honest} and colluding={rules.colluding}: raise honest, or draw fewer "
        "clients per round"
    )


def draw_graph(design: Design, participants: int, stream: RandomStream) -> list[frozenset[int]]:
    """The neighbours of each participant; never the participant itself.

    Args:
        design: what to draw.
        participants: n.
        stream: a secret one.
    """
    if design.complete:
        everyone = frozenset(range(participants))
        return [everyone - {place} for place in range(participants)]
    found: list[set[int]] = [set() for _ in range(participants)]
    for _ in range(design.neighbours // 2):
        cycle = np.argsort(stream.words(participants), kind="stable").tolist()
        for place, own in enumerate(cycle):
            before = cycle[place - 1]
            found[own].add(before)
            found[before].add(own)
    return [frozenset(neighbours) for neighbours in found]


def survivors_needed(rules: SecureSum, participants: int) -> int:
    """How many of the participants of a round must stay to its end, so that it has a sum.

    h + t, and with a complete graph at least t_s + 1: each secret then finds its t_s holders. It
    also limits a server that names other survivors to each client. If every list has m ≥ t_s + 1
    names, then whatever it puts together is the sum of at least 2m − n ≥ t + 2 clients, two of them
    honest. With a random graph h + t are enough but for a chance of ``LOST_ROUND``, and nothing
    limits such a server.
    """
    found = design(rules, participants)
    if not found.complete:
        return rules.least
    return max(rules.least, found.threshold(found.neighbours) + 1)


def _neighbours_to_connect(participants: int, honest: int, failure: float) -> int:
    """The smallest even k with Σ_s C(h, s)·p_s^(k/2) ≤ failure; n or more if there is none."""
    ways, apart = _log_apart(participants, honest)
    for cycles in range(1, MOST_COMPLETE // 2):
        if np.exp(np.minimum(ways + cycles * apart, 0.0)).sum() <= failure:
            return 2 * cycles
    return participants


def _log_apart(participants: int, honest: int) -> tuple[Vector, Vector]:
    """log C(h, s) and log p_s for parts of s = 1 … h/2 honest survivors.

    p_s: a random cycle of s of one part, h − s of the other and r = n − h who dropped out has no
    place at which the parts meet. Those who dropped out cut the cycle into r gaps, i of which hold
    the first part: C(r, i)·C(s−1, i−1) ways, and C(h−s+r−i−1, h−s) for the other part in the gaps
    that are left. One of them is held fixed, which counts every cycle r/n times.
    """
    dropped = participants - honest
    parts = np.arange(1, honest // 2 + 1)
    logs = np.log(np.arange(1, 2 * participants))
    log_factorials = np.concatenate([[0.0], np.cumsum(logs)])

    def log_binomial(n: NDArray[np.int64] | int, k: NDArray[np.int64] | int) -> Vector:
        others = np.subtract(n, k)
        found: Vector = log_factorials[n] - log_factorials[k] - log_factorials[others]
        return found

    ways = log_binomial(honest, parts)
    if dropped < 2:  # one gap holds one part only
        return ways, np.full(len(parts), -math.inf)
    apart = np.empty(len(parts))
    for place, first in enumerate(parts.tolist()):
        other = honest - first
        gaps = np.arange(1, min(dropped - 1, first) + 1)
        choice_of_gaps = log_binomial(dropped, gaps)
        first_in_gaps = log_binomial(first - 1, gaps - 1)
        other_in_rest = log_binomial(other + dropped - gaps - 1, other)
        total = np.logaddexp.reduce(choice_of_gaps + first_in_gaps + other_in_rest)
        total += math.log(participants / dropped)
        all_cycles = log_binomial(participants, dropped) + ways[place]
        apart[place] = total - all_cycles
    return ways, apart


def _most_colluders(rules: SecureSum, participants: int, neighbours: int) -> int:
    """t′: more than that collude among anybody's neighbours with probability at most η/2."""
    among = _among_neighbours(participants, rules.colluding, neighbours)
    for most in range(rules.colluding):
        if participants * among[most + 1 :].sum() <= rules.failure / 2:
            return most
    return rules.colluding


def _chance_of_no_sum(rules: SecureSum, participants: int, found: Design) -> float:
    """At most the chance that too few of somebody's share-holders stay, if h + t stay in all."""
    spare = found.neighbours - found.threshold(found.neighbours)
    if spare < 0:
        return 1.0
    dropouts = participants - rules.least
    among = _among_neighbours(participants, dropouts, found.neighbours)
    return participants * float(among[spare + 1 :].sum())


def _among_neighbours(participants: int, marked: int, neighbours: int) -> Vector:
    """How many of a participant's neighbours are marked, as probabilities of 0, 1, 2, …

    Two in each cycle, one who is a neighbour in two cycles counted twice.
    """
    others = participants - 1
    pairs = others * (others - 1)
    none = (others - marked) * (others - marked - 1) / pairs
    both = marked * (marked - 1) / pairs
    one_cycle = np.array([none, 1 - none - both, both])
    among = np.ones(1)
    for _ in range(neighbours // 2):
        among = np.convolve(among, one_cycle)
    return among


def _fewest_distinct(participants: int, neighbours: int) -> int:
    """The largest m such that anybody has fewer distinct neighbours with at most ``LOST_ROUND``.

    n·P[distinct < m] ≤ LOST_ROUND. Each cycle adds two of the others, drawn at random, of whom
    none, one or both may be neighbours already.
    """
    others = participants - 1
    pairs = others * (others - 1) / 2
    known = np.arange(neighbours + 1)
    both_new = (others - known) * (others - known - 1) / 2 / pairs
    one_new = known * (others - known) / pairs
    chances = np.zeros(neighbours + 1)  # of 0, 1, 2, … distinct neighbours
    chances[0] = 1.0
    for _ in range(neighbours // 2):
        after = chances * (1 - both_new - one_new)
        after[1:] += (chances * one_new)[:-1]
        after[2:] += (chances * both_new)[:-2]
        chances = after
    fewer = participants * np.cumsum(chances)
    return int(np.searchsorted(fewer, LOST_ROUND, side="right"))
