"""Neighbours: regular, connected as often as promised, and few enough of them collude."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from flwr_ppsgd import SecureSum
from flwr_ppsgd.noise import Coins
from flwr_ppsgd.secure.graph import (
    Design,
    _among_neighbours,
    _log_apart,
    _most_colluders,
    _neighbours_to_connect,
    design,
    draw,
    survivors_needed,
)

RULES = SecureSum(honest=80, colluding=10)


def test_up_to_forty_clients_are_all_neighbours() -> None:
    rules = SecureSum(honest=30, colluding=3)
    assert design(rules, 40) == Design(39, 3, True)
    graph = draw(design(rules, 40), 40, Coins.insecure(0))
    assert all(graph[own] == frozenset(range(40)) - {own} for own in range(40))


def test_more_clients_have_random_neighbours_fewer_than_all() -> None:
    found = design(RULES, 100)
    assert not found.complete
    assert found.neighbours == 38
    assert found.colluders == 10


def test_a_graph_is_symmetric_without_loops_and_regular_but_for_doubled_edges() -> None:
    found = design(RULES, 100)
    graph = draw(found, 100, Coins.insecure(1))
    for own, others in enumerate(graph):
        assert own not in others
        assert all(own in graph[other] for other in others)
        assert found.neighbours * 0.6 < len(others) <= found.neighbours


def test_neighbours_are_drawn_uniformly() -> None:
    """Each pair is joined equally often, within 5 standard errors."""
    found = Design(4, 0, False)
    times = 4000
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(times):
        graph = draw(found, 12, Coins.insecure(seed))
        counts.update((own, other) for own in range(12) for other in graph[own] if own < other)
    chance = 1 - (1 - 2 / 11) ** 2  # in at least one of two cycles
    for pair in itertools.combinations(range(12), 2):
        assert abs(counts[pair] / times - chance) < 5 * math.sqrt(chance * (1 - chance) / times)


def test_more_neighbours_than_needed_can_be_asked_for() -> None:
    assert design(SecureSum(80, 10, neighbours=61), 100).neighbours == 62
    assert design(SecureSum(80, 10, neighbours=99), 100).complete


@pytest.mark.parametrize(("clients", "honest"), [(6, 4), (7, 4), (8, 5)])
def test_the_chance_that_a_part_is_cut_off_is_exact(clients: int, honest: int) -> None:
    """p_s against all cycles of a few clients, one by one."""
    ways, apart = _log_apart(clients, honest)
    for place, first in enumerate(range(1, honest // 2 + 1)):
        kinds = "A" * first + "B" * (honest - first) + "R" * (clients - honest)
        cycles = list(itertools.permutations(kinds))
        meets = sum(
            any({cycle[i - 1], cycle[i]} == {"A", "B"} for i in range(clients)) for cycle in cycles
        )
        assert math.exp(apart[place]) == pytest.approx(1 - meets / len(cycles))
        assert math.exp(ways[place]) == pytest.approx(math.comb(honest, first))


def test_the_bound_on_falling_apart_holds_in_simulation() -> None:
    """Three cycles, 10 of 30 gone: the honest ones fall apart at most as often as computed."""
    clients, honest, cycles = 30, 20, 3
    ways, apart = _log_apart(clients, honest)
    bound = float(np.exp(ways + cycles * apart).sum())
    times = 4000
    broken = 0
    for seed in range(times):
        graph = draw(Design(2 * cycles, 0, False), clients, Coins.insecure(seed))
        broken += not _connected(graph, frozenset(range(honest)))
    assert broken > 0  # else this says nothing
    assert broken / times < bound + 5 * math.sqrt(bound / times)
    assert broken / times > bound / 2  # and the bound is not far off


def _connected(graph: list[frozenset[int]], members: frozenset[int]) -> bool:
    reached = {min(members)}
    waiting = [min(members)]
    while waiting:
        new = (graph[waiting.pop()] & members) - reached
        reached |= new
        waiting += new
    return reached == members


@pytest.mark.parametrize("clients", [60, 100, 200])
def test_more_survivors_are_never_worse_connected(clients: int) -> None:
    """So that the bound at h survivors holds for all numbers of survivors from h on."""
    for least in (clients // 2, 3 * clients // 4):
        needed = [
            _neighbours_to_connect(clients, honest, 2.0**-41) for honest in range(least, clients)
        ]
        assert needed == sorted(needed, reverse=True)


def test_colluders_among_neighbours_have_the_distribution_of_the_draw() -> None:
    clients, marked, neighbours = 50, 8, 6
    among = _among_neighbours(clients, marked, neighbours)
    assert among.sum() == pytest.approx(1)
    times = 20_000
    source = np.random.default_rng(0)
    others = np.arange(clients - 1)
    found: Counter[int] = Counter()
    for _ in range(times):
        drawn = [source.choice(others, 2, replace=False) for _ in range(neighbours // 2)]
        found[int((np.concatenate(drawn) < marked).sum())] += 1
    for count in range(4):
        expected = among[count]
        assert abs(found[count] / times - expected) < 5 * math.sqrt(expected / times)


def test_more_than_the_assumed_colluders_are_as_rare_as_promised() -> None:
    rules = SecureSum(honest=800, colluding=100)
    found = design(rules, 1000)
    assert found.colluders < rules.colluding
    among = _among_neighbours(1000, 100, found.neighbours)
    assert 1000 * among[found.colluders + 1 :].sum() <= rules.failure / 2
    assert 1000 * among[found.colluders :].sum() > rules.failure / 2
    assert _most_colluders(rules, 1000, found.neighbours) == found.colluders


def test_nobody_can_be_made_to_give_up_both_secrets() -> None:
    """2·t_s > k + t′, for every number of holders and colluders."""
    for holders, colluders in itertools.product(range(1, 60), range(20)):
        threshold = Design(holders, colluders, True).threshold(holders)
        assert 2 * threshold > holders + colluders
        assert 2 * (threshold - 1) <= holders + colluders


def test_survivors_needed_are_those_that_always_suffice() -> None:
    assert survivors_needed(SecureSum(7, 1), 10) == 8  # t_s = 6, of others
    assert survivors_needed(SecureSum(3, 1), 10) == 7
    assert survivors_needed(RULES, 100) == 90


def test_a_few_thousand_clients_take_no_long_search() -> None:
    found = design(SecureSum(honest=4000, colluding=500), 5000)
    assert 80 < found.neighbours < 120
