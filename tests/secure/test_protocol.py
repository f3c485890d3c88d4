"""The sum of the survivors bit for bit, whoever drops out; and nothing else is seen."""

import dataclasses
import itertools
import random

import numpy as np
import pytest

from flwr_ppsgd import SecureSum
from flwr_ppsgd.noise import Coins
from flwr_ppsgd.secure.coordinator import Coordinator, NoSumError
from flwr_ppsgd.secure.graph import design
from flwr_ppsgd.secure.masks import subtract_mask
from flwr_ppsgd.secure.messages import Partners, hash_of
from flwr_ppsgd.secure.participant import Keyed, Masked, Session, Shared, own_key, pair_key
from tests.support.secure import SESSION, Play, played, some_vectors

RULES = SecureSum(honest=4, colluding=1)
ALL = range(7)


def test_without_dropouts_it_is_the_sum() -> None:
    vectors = some_vectors(7, 50)
    play = played(RULES, vectors, [ALL, ALL, ALL, ALL])
    assert np.array_equal(play.total(), vectors.sum(axis=0))
    assert play.server.counted == 7


def test_the_sum_of_large_vectors_spans_several_blocks() -> None:
    vectors = some_vectors(7, 70_001)
    play = played(RULES, vectors, [ALL, ALL, range(1, 7), range(2, 7)])
    assert np.array_equal(play.total(), vectors[1:].sum(axis=0))


def test_thousands_of_dropout_patterns_give_the_survivors_sum_or_none() -> None:
    """At most two of seven gone before the end: always the sum. More: the sum, or nothing."""
    source = random.Random(0)
    sums = 0
    lost = 0
    for seed in range(25):
        vectors = some_vectors(7, 3, seed)
        play = Play(RULES, vectors)
        play.keys(ALL)
        sent = {1: {node: play.keyed[node].message.to_bytes() for node in ALL}}
        sent[2] = play.shares(sorted(source.sample(ALL, source.choice([7, 7, 6, 5]))))
        masked = play.mask(ALL)
        for _ in range(100):
            outcome = _end(play, sent, masked, source)
            sums += outcome
            lost += not outcome
    assert sums > 1000
    assert lost > 200


def _end(
    play: Play,
    sent: dict[int, dict[int, bytes]],
    masked: dict[int, np.ndarray[tuple[int], np.dtype[np.uint64]]],
    source: random.Random,
) -> bool:
    """The last two exchanges with a dropout pattern of its own; whether there was a sum."""
    third = sorted(source.sample(sorted(masked), source.randint(len(masked) - 2, len(masked))))
    server = Coordinator[int](RULES, SESSION, 3)
    for node, keys in sent[1].items():
        assert server.take_keys(node, keys)
    server.rosters()
    for node, shares in sent[2].items():
        assert server.take_shares(node, shares)
    server.partners()
    for node in third:
        assert server.take_masked(node, masked[node])
    if len(third) < RULES.least:
        with pytest.raises(NoSumError, match="5 are needed"):
            server.survivors()
        return False
    server.survivors()
    fourth = sorted(source.sample(third, source.randint(len(third) - 2, len(third))))
    for node in fourth:
        answer = play.masked[node].reveal(frozenset(third), RULES)
        assert server.take_revealed(node, answer.to_bytes())
    try:
        total = server.total()
    except NoSumError:
        assert len(fourth) < RULES.least
        return False
    assert np.array_equal(total, play.vectors[third].sum(axis=0))
    return True


@pytest.mark.parametrize("seed", range(3))
def test_a_random_graph_gives_the_same_sum(seed: int) -> None:
    rules = SecureSum(honest=42, colluding=1, failure=1e-6)
    assert not design(rules, 50).complete
    source = random.Random(seed)
    vectors = some_vectors(50, 20, seed)
    stay: list[list[int]] = [list(range(50))]
    for gone in (1, 2, 2):
        stay.append(sorted(source.sample(stay[-1], len(stay[-1]) - gone)))
    play = played(rules, vectors, list(stay))
    assert np.array_equal(play.total(), vectors[stay[2]].sum(axis=0))


@pytest.mark.parametrize("exchange", range(4))
def test_too_few_at_any_exchange_give_no_sum(exchange: int) -> None:
    stay = [list(ALL)] * 4
    for later in range(exchange, 4):
        stay[later] = list(range(4))
    with pytest.raises(NoSumError):
        played(RULES, some_vectors(7, 3), list(stay)).total()


def test_sums_wrap_without_a_loss_below_2_to_the_63() -> None:
    vectors = np.full((5, 2), 2**60)
    vectors[:, 1] *= -1
    rules = SecureSum(honest=4, colluding=1)
    five = range(5)
    assert np.array_equal(
        played(rules, vectors, [five, five, five, five]).total(), vectors.sum(axis=0)
    )


def test_states_survive_being_written_down() -> None:
    """A Flower client is a new process for every message."""
    vectors = some_vectors(5, 4)
    play = Play(RULES, vectors)
    play.keys(range(5))
    play.keyed = {
        node: Keyed.from_flat(SESSION, state.to_flat()) for node, state in play.keyed.items()
    }
    play.shares(range(5))
    play.shared = {
        node: Shared.from_flat(SESSION, state.to_flat()) for node, state in play.shared.items()
    }
    play.mask(range(5))
    play.masked = {
        node: Masked.from_flat(SESSION, state.to_flat()) for node, state in play.masked.items()
    }
    play.reveal(range(5))
    assert np.array_equal(play.total(), vectors.sum(axis=0))


def test_no_state_shows_a_secret_and_the_last_has_none_of_its_own() -> None:
    play = Play(RULES, some_vectors(5, 4))
    play.keys(range(5))
    play.shares(range(5))
    play.mask(range(5))
    secrets = [play.shared[0].seed, play.keyed[0].mask.private, play.keyed[0].channel.private]
    for state in (play.keyed[0], play.shared[0], play.masked[0]):
        shown = repr(state)
        assert not any(repr(secret) in shown for secret in secrets)
    kept = b"".join(play.masked[0].to_flat().values())
    assert not any(secret in kept for secret in secrets)


def test_what_the_server_sees_holds_no_secret_and_no_vector() -> None:
    vectors = some_vectors(6, 8)
    play = played(RULES, vectors, [range(6), range(6), range(5), range(5)])
    everything = b"".join(play.seen[: 6 + 6 + 5])  # before anybody reveals anything
    for node in range(6):
        assert play.shared[node].seed not in everything
        assert play.keyed[node].mask.private not in everything
    for row in vectors:
        for value in row:
            assert int(value).to_bytes(8, "little", signed=True) not in everything


def test_masked_vectors_of_two_worlds_look_alike() -> None:
    """Zeros and huge gradients: the server's view is uniform in both, byte by byte (χ²)."""
    for x in (0, 2**50, -1):
        counts = np.zeros((8, 256))
        words = []
        for _ in range(3):
            play = Play(RULES, np.full((5, 4000), x))
            play.keys(range(5))
            play.shares(range(5))
            words += list(play.mask(range(5)).values())
        data = np.concatenate(words).view(np.uint8).reshape(-1, 8)
        for place in range(8):
            counts[place] = np.bincount(data[:, place], minlength=256)
        expected = len(data) / 256
        statistics = ((counts - expected) ** 2 / expected).sum(axis=1)
        assert np.all(np.abs(statistics - 255) < 6 * np.sqrt(2 * 255))


def test_masks_differ_between_clients_sessions_and_sets_of_members() -> None:
    """The same x under the same keys, for every U₂ and session: no two words agree."""
    vectors = np.zeros((6, 5), np.int64)
    play = Play(RULES, vectors)
    play.keys(range(6))
    play.shares(range(6))
    shared = play.shared[0]
    named = Partners.from_bytes(play.server.partners()[0], 6)
    seen = []
    for members in (frozenset(range(6)), frozenset(range(5))):
        sealed = {other: named.sealed[other] for other in members - {0}}
        partners = Partners(members, sealed)
        for session in (SESSION, Session(7, 3, 1, 6), Session(7, 3, 2, 5), Session(8, 3, 1, 5)):
            again = dataclasses.replace(shared, session=session)
            _, words = again.masked(partners, RULES, vectors[0])
            seen.append(words)
    for one, other in itertools.combinations(seen, 2):
        assert not np.any(one == other)


def test_the_servers_memory_of_vectors_does_not_grow_with_the_cohort() -> None:
    play = Play(RULES, some_vectors(7, 10_000))
    play.keys(ALL)
    play.shares(ALL)
    play.mask(ALL)
    arrays = [value for value in vars(play.server).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == 8 * 10_000


def test_secret_coins_draw_the_graph() -> None:
    assert isinstance(Coordinator[int](RULES, SESSION, 1).coins, Coins)
    rules = SecureSum(honest=42, colluding=1, failure=1e-6)
    graphs = []
    for _ in range(2):
        server = Coordinator[int](rules, SESSION, 1)
        for node in range(50):
            server.take_keys(node, Keyed.new(SESSION).message.to_bytes())
        server.rosters()
        graphs.append(server._graph)
    assert graphs[0] != graphs[1]


def test_the_keys_of_masks_depend_on_everything_that_they_are_for() -> None:
    """HKDF(secret; training, run, start, round, part, u, v, hash of U₂), each label of its own."""
    sessions = [
        SESSION,
        Session(8, 3, 1, 5),
        Session(7, 4, 1, 5),
        Session(7, 3, 2, 5),
        Session(7, 3, 1, 6),
        Session(7, 3, 1, 5, "vote"),
    ]
    secrets = [b"a" * 32, b"b" * 32]
    hashes = [hash_of(range(5), 6), hash_of(range(6), 6), hash_of(range(5), 7)]
    pairs = [(0, 1), (0, 2), (1, 2), (1, 12), (11, 2)]
    keys = [
        pair_key(secret, session, places, members)
        for secret, session, places, members in itertools.product(secrets, sessions, pairs, hashes)
    ]
    keys += [
        own_key(secret, session, place, members)
        for secret, session, place, members in itertools.product(secrets, sessions, (0, 1), hashes)
    ]
    assert len(set(keys)) == len(keys)
    assert pair_key(secrets[0], SESSION, (2, 1), hashes[0]) == pair_key(
        secrets[0], SESSION, (1, 2), hashes[0]
    )


def test_a_clients_own_mask_hides_it_from_all_its_neighbours_together() -> None:
    """Whoever knows every shared mask still sees uniform words, until the seed is revealed."""
    play = Play(RULES, np.zeros((5, 20_000), np.int64))
    play.keys(range(5))
    play.shares(range(5))
    words = play.mask(range(5))[0].copy()
    members = hash_of(range(5), 5)
    for other in range(1, 5):
        secret = play.keyed[other].mask.secret_with(play.keyed[0].mask.public)
        subtract_mask(words, pair_key(secret, SESSION, (0, other), members))
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 6 * np.sqrt(2 * 255)
    subtract_mask(words, own_key(play.shared[0].seed, SESSION, 0, members))
    assert not np.any(words)
