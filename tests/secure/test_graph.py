"""Neighbours: regular, connected as often as promised, and few enough of them collude."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from flwr_ppsgd import SecureSum
from flwr_ppsgd.noise import RandomStream
from flwr_ppsgd.secure.graph import (
    MOST_PARTICIPANTS,
    Design,
    _among_neighbours,
    _fewest_distinct,
    _log_apart,
    _most_colluders,
    _neighbours_to_connect,
    design,
    draw_graph,
    survivors_needed,
)

RULES = SecureSum(honest=250, colluding=20)
CLIENTS = 300


def test_up_to_200_clients_are_all_neighbours() -> None:
    rules = SecureSum(honest=120, colluding=3)
    assert design(rules, 200) == Design(199, 199, 3, True)
    graph = draw_graph(design(rules, 200), 200, RandomStream.insecure(0))
    assert all(graph[own] == frozenset(range(200)) - {own} for own in range(200))


def test_more_clients_have_random_neighbours_fewer_than_all() -> None:
    found = design(RULES, CLIENTS)
    assert not found.complete
    assert found.neighbours == 58
    assert found.colluders == 20


def test_a_graph_is_symmetric_without_loops_and_regular_but_for_doubled_edges() -> None:
    found = design(RULES, CLIENTS)
    graph = draw_graph(found, CLIENTS, RandomStream.insecure(1))
    for own, others in enumerate(graph):
        assert own not in others
        assert all(own in graph[other] for other in others)
        assert found.fewest <= len(others) <= found.neighbours


def test_hardly_any_round_has_a_client_with_too_few_distinct_neighbours() -> None:
    """n·P[distinct < m] ≤ 1e-3 < n·P[distinct < m + 1], against drawn graphs."""
    clients, neighbours = 250, 58
    fewest = _fewest_distinct(clients, neighbours)
    times = 300
    counts: Counter[int] = Counter()
    for seed in range(times):
        graph = draw_graph(
            Design(neighbours, fewest, 0, False), clients, RandomStream.insecure(seed)
        )
        counts.update(len(others) for others in graph)
    drawn = times * clients
    expected = _chances_of_distinct(clients - 1, neighbours // 2)
    for distinct in range(48, 59):
        chance = expected[distinct]
        assert abs(counts[distinct] / drawn - chance) < 8 * math.sqrt(chance / drawn) + 1e-4
    fewer = [clients * sum(expected[:least]) for least in (fewest, fewest + 1)]
    assert fewer[0] <= 1e-3 < fewer[1]
    assert neighbours - fewest > 3  # "k − 3" would refuse most rounds of honest servers


def _chances_of_distinct(others: int, cycles: int) -> list[float]:
    """Inclusion and exclusion: exactly m of the others are in at least one of the pairs."""
    pairs = math.comb(others, 2)
    return [
        math.comb(others, m)
        * sum((-1) ** (m - j) * math.comb(m, j) * math.comb(j, 2) ** cycles for j in range(m + 1))
        / pairs**cycles
        for m in range(2 * cycles + 1)
    ]


def test_neighbours_are_drawn_uniformly() -> None:
    """Each pair is joined equally often, within 5 standard errors."""
    found = Design(4, 2, 0, False)
    times = 4000
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(times):
        graph = draw_graph(found, 12, RandomStream.insecure(seed))
        counts.update((own, other) for own in range(12) for other in graph[own] if own < other)
    chance = 1 - (1 - 2 / 11) ** 2  # in at least one of two cycles
    for pair in itertools.combinations(range(12), 2):
        assert abs(counts[pair] / times - chance) < 5 * math.sqrt(chance * (1 - chance) / times)


def test_more_neighbours_than_needed_can_be_asked_for() -> None:
    assert design(SecureSum(250, 20, neighbours=81), CLIENTS).neighbours == 82
    assert design(SecureSum(250, 20, neighbours=299), CLIENTS).complete
    with pytest.raises(ValueError, match="neighbours must be a whole number from 0 to 399"):
        SecureSum(250, 20, neighbours=400)


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
        graph = draw_graph(Design(2 * cycles, 0, 0, False), clients, RandomStream.insecure(seed))
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
        threshold = Design(holders, holders, colluders, True).threshold(holders)
        assert 2 * threshold > holders + colluders
        assert 2 * (threshold - 1) <= holders + colluders


def test_survivors_needed_are_those_that_always_suffice() -> None:
    assert survivors_needed(SecureSum(7, 1), 10) == 8  # t_s = 6, of others
    assert survivors_needed(SecureSum(3, 1), 10) == 7
    assert survivors_needed(RULES, CLIENTS) == 270


def test_what_no_graph_can_protect_is_refused() -> None:
    """Up to 400 clients the complete graph stands in."""
    assert design(SecureSum(honest=160, colluding=10), 300).complete
    with pytest.raises(ValueError, match="no graph of fewer than 400 neighbours"):
        design(SecureSum(honest=520, colluding=10), 1000)
    with pytest.raises(ValueError, match="at most 10,000 participants, got 10,001: draw fewer"):
        design(SecureSum(honest=9000, colluding=10), MOST_PARTICIPANTS + 1)
