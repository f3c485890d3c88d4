"""The sum of the survivors bit for bit, whoever drops out or lies; otherwise no sum."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd import SecureSum
from flwr_ppsgd.secure.coordinator import Coordinator, NoSumError
from flwr_ppsgd.secure.crypto import Words
from flwr_ppsgd.secure.graph import design
from flwr_ppsgd.secure.protocol import KeysSent, PublicKeys, Roster, Shares, members_of, pack_parts
from tests.support.secure import Play, played, ready, session_of, some_vectors

RULES = SecureSum(honest=4, colluding=1)
SPARSE = SecureSum(honest=190, colluding=1, failure=1e-6)
ALL = range(7)
SESSION = session_of(RULES, 7)

# --- dropouts


def test_thousands_of_dropout_patterns_give_the_survivors_sum_or_none() -> None:
    """At most two of seven gone before the end: always the sum. More: the sum, or nothing."""
    source = random.Random(0)
    sums = 0
    lost = 0
    for seed in range(25):
        play = Play(RULES, some_vectors(7, 3, seed))
        play.keys(ALL)
        shares = play.shares(sorted(source.sample(ALL, source.choice([7, 7, 6, 5]))))
        masked = play.mask(ALL)
        for _ in range(100):
            outcome = ends_with_sum(play, shares, masked, source)
            sums += outcome
            lost += not outcome
    assert sums > 1000
    assert lost > 200


def ends_with_sum(
    play: Play, shares: dict[int, bytes], masked: dict[int, Words], source: random.Random
) -> bool:
    """The last two exchanges with a dropout pattern of its own; whether there was a sum."""
    third = sorted(source.sample(sorted(masked), source.randint(len(masked) - 2, len(masked))))
    server = Coordinator[int](play.session, 3)
    for node in ALL:
        assert server.take_keys(node, play.keyed[node].public.to_bytes())
    server.rosters()
    for node, data in shares.items():
        assert server.take_shares(node, data)
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
        answer = play.masked[node].reveal(frozenset(third))
        assert server.take_revealed(node, pack_parts(answer))
    try:
        total = server.total()
    except NoSumError:
        assert len(fourth) < RULES.least
        return False
    assert np.array_equal(total, play.vectors[third].sum(axis=0))
    return True


def test_a_random_graph_gives_the_same_sum() -> None:
    assert not design(SPARSE, 210).complete
    source = random.Random(0)
    vectors = some_vectors(210, 20)
    stay: list[list[int]] = [list(range(210))]
    for gone in (3, 5, 5):
        stay.append(sorted(source.sample(stay[-1], len(stay[-1]) - gone)))
    play = played(SPARSE, vectors, list(stay))
    assert np.array_equal(play.total(), vectors[stay[2]].sum(axis=0))


def test_sums_wrap_without_a_loss_below_2_to_the_63() -> None:
    vectors = np.full((7, 2), 2**60)
    vectors[:, 1] *= -1
    total = played(RULES, vectors, [ALL, ALL, ALL, ALL]).total()
    assert np.array_equal(total, vectors.sum(axis=0))


def test_memory_for_vectors_does_not_grow_with_the_cohort() -> None:
    play = ready(RULES, 7, 10_000)
    play.mask(ALL)
    arrays = [value for value in vars(play.server).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == 8 * 10_000


def test_secret_bits_draw_the_graph() -> None:
    session = session_of(SPARSE, 210)
    keys = [KeysSent.new(session).public.to_bytes() for _ in range(210)]
    rosters = []
    for _ in range(2):
        server = Coordinator[int](session, 1)
        for node, data in enumerate(keys):
            assert server.take_keys(node, data)
        rosters.append(server.rosters())
    assert rosters[0] != rosters[1]


def test_exchanges_out_of_order_are_a_fault_of_the_program() -> None:
    play = Play(RULES, some_vectors(7, 3))
    with pytest.raises(RuntimeError, match="the sum is at KEYS, not at MASKED"):
        play.server.take_masked(0, np.zeros(3, np.uint64))
    play.keys(ALL)
    play.shares(ALL)
    with pytest.raises(RuntimeError, match="the sum is at SHARES, not at KEYS"):
        play.server.rosters()


# --- hostile clients


@pytest.mark.parametrize(("liars", "summed"), [(1, True), (2, False)])
def test_forged_shares_are_left_out_and_others_are_used(liars: int, summed: bool) -> None:
    """t_s = 4 of 6 holders, one of whom is gone: one liar leaves 4 to each secret, two leave 3."""
    play = ready(RULES, 7)
    play.mask(range(6))  # 6 is gone: its mask key is needed too
    survivors = members_of(play.server.survivors()[0], 7)
    for node in range(6):
        shares = play.masked[node].reveal(survivors)
        if node < liars:  # each gives somebody else's share
            shares = dict(zip(shares, reversed(list(shares.values())), strict=True))
        assert play.server.take_revealed(node, pack_parts(shares))
    if summed:
        assert np.array_equal(play.total(), play.vectors[:6].sum(axis=0))
    else:
        with pytest.raises(NoSumError, match="cannot be unmasked: 4 shares are needed, got 3"):
            play.total()


def share_with_a_change(play: Play, change: Callable[[Shares], Shares]) -> None:
    """Everybody's shares, of which client 2 changes its own."""
    rosters = play.server.rosters()
    for node in ALL:
        play.shared[node], shares = play.keyed[node].share(Roster.from_bytes(rosters[node]))
        sent = change(shares) if node == 2 else shares
        assert play.server.take_shares(node, sent.to_bytes())


@pytest.mark.parametrize("gone", [False, True])
def test_shares_of_another_secret_give_no_sum(gone: bool) -> None:
    """A client whose shares give neither its seed nor its mask key."""
    play = Play(RULES, some_vectors(7, 3))
    play.keys(ALL)
    if gone:  # shares another key than the one whose public half it sent
        play.keyed[2] = replace(play.keyed[2], mask=KeysSent.new(SESSION).mask)
    seed: dict[str, Any] = {} if gone else {"seed_hash": bytes(32)}
    share_with_a_change(play, lambda shares: replace(shares, **seed))
    play.mask([node for node in ALL if node != 2] if gone else ALL)
    play.reveal(ALL)
    with pytest.raises(NoSumError, match="client 2 gave shares of something else"):
        play.total()


def test_shares_that_cannot_be_opened_cost_one_holder_only() -> None:
    play = Play(RULES, some_vectors(7, 3))
    play.keys(ALL)

    def damaged(shares: Shares) -> Shares:
        broken = shares.portions[5]._replace(sealed=bytes(82))
        return Shares(shares.seed_hash, {**shares.portions, 5: broken})

    share_with_a_change(play, damaged)
    play.mask(ALL)
    play.reveal(ALL)
    assert np.array_equal(play.total(), play.vectors.sum(axis=0))


def test_strangers_dropouts_and_second_vectors_are_ignored() -> None:
    play = Play(RULES, some_vectors(7, 3))
    play.keys(range(6))
    sent = play.shares(range(5))
    assert not play.server.take_shares(6, sent[0])
    masked = play.mask(range(5))
    assert not play.server.take_masked(5, masked[0])  # sent keys, and no shares
    assert not play.server.take_masked(6, masked[0])
    assert not play.server.take_masked(0, masked[0])
    revealed = play.reveal(range(5))
    assert not play.server.take_revealed(5, revealed[0])
    assert np.array_equal(play.total(), play.vectors[:5].sum(axis=0))


@pytest.mark.parametrize("keys", [b"", bytes(64), bytes(63), b"\x01" * 64])
def test_unusable_keys_are_not_passed_on(keys: bytes) -> None:
    assert not Coordinator[int](SESSION, 3).take_keys(0, keys)


def test_a_copied_key_is_not_passed_on() -> None:
    server = Coordinator[int](SESSION, 3)
    keys = KeysSent.new(SESSION).public
    assert server.take_keys(0, keys.to_bytes())
    assert not server.take_keys(1, keys.to_bytes())
    other = KeysSent.new(SESSION).public
    assert not server.take_keys(1, PublicKeys(other.channel, keys.mask).to_bytes())
    assert not server.take_keys(1, PublicKeys(other.channel, other.channel).to_bytes())
    assert server.take_keys(1, other.to_bytes())


def test_shares_for_others_than_the_neighbours_are_a_dropout() -> None:
    play = Play(RULES, some_vectors(7, 3))
    play.keys(ALL)
    roster = Roster.from_bytes(play.server.rosters()[0])
    _, shares = play.keyed[0].share(roster)
    fewer = dict(list(shares.portions.items())[1:])
    assert not play.server.take_shares(0, Shares(shares.seed_hash, fewer).to_bytes())
    own = {**shares.portions, 0: shares.portions[1]}
    assert not play.server.take_shares(0, Shares(shares.seed_hash, own).to_bytes())
