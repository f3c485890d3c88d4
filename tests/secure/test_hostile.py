"""Clients and servers that do not keep to the protocol: the right sum or none, never a vector."""

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_ppsgd import SecureSum
from flwr_ppsgd.secure.coordinator import Coordinator, NoSumError
from flwr_ppsgd.secure.graph import design, survivors_needed
from flwr_ppsgd.secure.messages import (
    Partners,
    PublicKeys,
    Revealed,
    Roster,
    Shares,
    bitmap,
    members_of,
)
from flwr_ppsgd.secure.participant import Keyed, ProtocolError, Session
from flwr_ppsgd.secure.shamir import join
from tests.support.secure import SESSION, Play, played, some_vectors

RULES = SecureSum(honest=4, colluding=1)
ALL = range(7)


def ready(size: int = 3) -> Play:
    """A round before exchange 3."""
    play = Play(RULES, some_vectors(7, size))
    play.keys(ALL)
    play.shares(ALL)
    return play


# --- hostile clients


@pytest.mark.parametrize(("liars", "summed"), [(1, True), (2, False)])
def test_forged_shares_are_left_out_and_others_are_used(liars: int, summed: bool) -> None:
    """t_s = 4 of 6 holders, one of whom is gone: one liar leaves 4 to each secret, two leave 3."""
    play = ready()
    play.mask(range(6))  # 6 is gone: its mask key is needed too
    survivors = members_of(play.server.survivors()[0], 7)
    for node in range(6):
        shares = dict(play.masked[node].reveal(survivors, RULES).shares)
        if node < liars:  # each gives somebody else's share
            shares = dict(zip(shares, reversed(list(shares.values())), strict=True))
        assert play.server.take_revealed(node, Revealed(shares).to_bytes())
    if summed:
        assert np.array_equal(play.total(), play.vectors[:6].sum(axis=0))
    else:
        with pytest.raises(NoSumError, match="cannot be unmasked: 3 shares where 4 are needed"):
            play.total()


def test_one_liar_is_put_up_with() -> None:
    play = ready()
    play.mask(ALL)
    survivors = members_of(play.server.survivors()[0], 7)
    for node in ALL:
        revealed = play.masked[node].reveal(survivors, RULES)
        if node == 3:
            revealed = Revealed(dict.fromkeys(revealed.shares, b"\x01" * 33))
        assert play.server.take_revealed(node, revealed.to_bytes())
    assert np.array_equal(play.total(), play.vectors.sum(axis=0))


def test_shares_of_the_wrong_secret_give_no_sum() -> None:
    """A client whose shares do not give its seed: nobody's vector shows, and there is no sum."""
    play = Play(RULES, some_vectors(7, 3))
    play.keys(ALL)
    rosters = play.server.rosters()
    for node in ALL:
        roster = Roster.from_bytes(rosters[node])
        play.shared[node], shares = play.keyed[node].share(roster, RULES)
        if node == 2:
            shares = dataclasses.replace(shares, seed_hash=bytes(32))
        assert play.server.take_shares(node, shares.to_bytes())
    play.mask(ALL)
    play.reveal(ALL)
    with pytest.raises(NoSumError, match="client 2 gave shares that are not of its seed"):
        play.total()


def test_shares_of_another_key_give_no_sum_if_that_client_is_gone() -> None:
    play = Play(RULES, some_vectors(7, 3))
    play.keys(ALL)
    liar = dataclasses.replace(play.keyed[2], mask=Keyed.new(SESSION).mask)
    play.keyed[2] = liar  # shares another key than the one it sent
    play.shares(ALL)
    play.mask([node for node in ALL if node != 2])
    play.reveal(ALL)
    with pytest.raises(NoSumError, match="client 2 gave shares that are not of its key"):
        play.total()


def test_shares_that_cannot_be_opened_cost_one_holder_only() -> None:
    play = Play(RULES, some_vectors(7, 3))
    play.keys(ALL)
    rosters = play.server.rosters()
    for node in ALL:
        roster = Roster.from_bytes(rosters[node])
        play.shared[node], shares = play.keyed[node].share(roster, RULES)
        if node == 2:
            broken = dataclasses.replace(shares.portions[5], sealed=bytes(82))
            shares = Shares(shares.seed_hash, {**shares.portions, 5: broken})
        assert play.server.take_shares(node, shares.to_bytes())
    play.mask(ALL)
    play.reveal(ALL)
    assert np.array_equal(play.total(), play.vectors.sum(axis=0))


def test_a_client_that_answers_twice_counts_once() -> None:
    play = Play(RULES, some_vectors(7, 3))
    play.keys(ALL)
    assert not play.server.take_keys(0, Keyed.new(SESSION).message.to_bytes())
    sent = play.shares(ALL)
    assert not play.server.take_shares(0, sent[0])
    masked = play.mask(ALL)
    assert not play.server.take_masked(0, masked[0])
    revealed = play.reveal(ALL)
    assert not play.server.take_revealed(0, revealed[0])
    assert np.array_equal(play.total(), play.vectors.sum(axis=0))


def test_strangers_and_dropouts_are_not_heard() -> None:
    play = Play(RULES, some_vectors(7, 3))
    play.keys(range(6))
    sent = play.shares(range(5))
    assert not play.server.take_shares(6, sent[0])
    masked = play.mask(range(5))
    assert not play.server.take_masked(5, masked[0])  # sent keys, and no shares
    assert not play.server.take_masked(6, masked[0])
    revealed = play.reveal(range(5))
    assert not play.server.take_revealed(5, revealed[0])
    assert np.array_equal(play.total(), play.vectors[:5].sum(axis=0))


def test_a_vector_of_another_form_is_a_dropout() -> None:
    play = ready()
    named = play.server.partners()
    for node in ALL:
        partners = Partners.from_bytes(named[node], 7)
        after, words = play.shared[node].masked(partners, RULES, play.vectors[node])
        play.masked[node] = after
        if node == 0:
            assert not play.server.take_masked(node, words[:2])
        elif node == 1:
            assert not play.server.take_masked(node, words.astype(np.float64))
        else:
            assert play.server.take_masked(node, words)
    play.reveal(ALL)
    assert np.array_equal(play.total(), play.vectors[2:].sum(axis=0))


@pytest.mark.parametrize("keys", [b"", bytes(64), bytes(63), b"\x01" * 64])
def test_keys_that_are_none_are_not_passed_on(keys: bytes) -> None:
    server = Coordinator[int](RULES, SESSION, 3)
    assert not server.take_keys(0, keys)


def test_a_copied_key_is_not_passed_on() -> None:
    server = Coordinator[int](RULES, SESSION, 3)
    keys = Keyed.new(SESSION).message
    assert server.take_keys(0, keys.to_bytes())
    assert not server.take_keys(1, keys.to_bytes())
    other = Keyed.new(SESSION).message
    assert not server.take_keys(1, PublicKeys(other.channel, keys.mask).to_bytes())
    assert not server.take_keys(1, PublicKeys(other.channel, other.channel).to_bytes())
    assert server.take_keys(1, other.to_bytes())


def test_shares_for_others_than_the_neighbours_are_a_dropout() -> None:
    play = Play(RULES, some_vectors(7, 3))
    play.keys(ALL)
    roster = Roster.from_bytes(play.server.rosters()[0])
    _, shares = play.keyed[0].share(roster, RULES)
    fewer = dict(list(shares.portions.items())[1:])
    assert not play.server.take_shares(0, Shares(shares.seed_hash, fewer).to_bytes())
    own = {**shares.portions, 0: shares.portions[1]}
    assert not play.server.take_shares(0, Shares(shares.seed_hash, own).to_bytes())


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    play = Play(RULES, some_vectors(5, 3))
    play.keys(range(5))
    play.server.rosters()
    assert not play.server.take_shares(0, data)
    for read in (Roster.from_bytes, PublicKeys.from_bytes):
        assert _refuses_or_reads(lambda read=read: read(data))  # type: ignore[misc]
    for kind in (Shares, Partners, Revealed):
        assert _refuses_or_reads(lambda kind=kind: kind.from_bytes(data, 5))  # type: ignore[misc]


def _refuses_or_reads(read: Callable[[], object]) -> bool:
    try:
        read()
    except ValueError as error:
        return "cannot be read" in str(error)
    return True


def test_every_cut_and_flipped_message_is_a_dropout_or_harmless() -> None:
    """100 rounds in which one message of one client is damaged at random."""
    source = random.Random(1)
    sums = 0
    for _ in range(100):
        vectors = some_vectors(6, 2)
        play = Play(RULES, vectors)
        play.keys(range(6))
        rosters = play.server.rosters()
        for node in range(6):
            roster = Roster.from_bytes(rosters[node])
            play.shared[node], shares = play.keyed[node].share(roster, RULES)
            data = shares.to_bytes()
            play.server.take_shares(node, _damaged(data, source) if node == 0 else data)
        sent = play.mask(range(6))
        named = members_of(play.server.survivors()[1], 6)
        for node in sent:
            data = play.masked[node].reveal(named, RULES).to_bytes()
            play.server.take_revealed(node, _damaged(data, source) if node == 1 else data)
        try:
            total = play.total()
        except NoSumError:
            continue
        sums += 1
        assert np.array_equal(total, vectors[sorted(sent)].sum(axis=0))
    assert sums > 20


def _damaged(data: bytes, source: random.Random) -> bytes:
    changed = bytearray(data)
    if source.random() < 0.3:
        return bytes(changed[: source.randrange(len(changed))])
    changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
    return bytes(changed)


# --- hostile servers


def test_two_survivor_lists_never_give_both_secrets_of_anybody() -> None:
    """One half is told that 6 survived, the other half that 6 is gone; one client colludes."""
    play = ready()
    play.mask(ALL)
    with_six = frozenset(ALL)
    without = frozenset(range(6))
    threshold = 4  # the smallest above (6 + 1)/2: 6 holders, one of whom may collude
    for told_first in range(6):
        seeds = {}
        keys = {}
        for node in range(6):
            if node < told_first:
                seeds[node] = play.masked[node].reveal(with_six, RULES).shares[6]
            else:
                keys[node] = play.masked[node].reveal(without, RULES).shares[6]
        colluder = play.masked[0].held[6]
        seeds[0] = colluder[:33]
        keys[0] = colluder[33:]
        assert min(len(seeds), len(keys)) < threshold
        with pytest.raises(ValueError, match="are needed"):
            join(min(seeds, keys, key=len), threshold)


def test_lists_that_differ_never_unmask_one_client_alone() -> None:
    """Random lists of at least m names, all resolved: the sum is of at least 2m − n ≥ t + 2."""
    source = random.Random(5)
    n, rules = 9, SecureSum(honest=5, colluding=2)
    needed = survivors_needed(rules, n)
    threshold = design(rules, n).threshold(n - 1)
    honest = range(2, n)
    resolved = 0
    for _ in range(20_000):
        favoured = source.sample(range(n), source.randint(2, n))
        lists = {}
        for own in honest:
            named = {own, *(favoured if source.random() < 0.6 else ())}
            others = source.sample([v for v in range(n) if v not in named], n - len(named))
            named |= set(others[: max(0, needed - len(named))])
            lists[own] = named
        sums, known = _opened_by(lists, n, threshold, colluders=2)
        if sums | known == set(range(n)) and sums:
            resolved += 1
            assert len(sums) >= 2 * needed - n >= rules.colluding + 2
    assert resolved > 100


def _opened_by(
    lists: dict[int, set[int]], n: int, threshold: int, colluders: int
) -> tuple[set[int], set[int]]:
    """Whose seed, and whose mask key, the answers to these lists give."""
    seeds = set()
    keys = set()
    for owner in range(n):
        answers = [owner in named for holder, named in lists.items() if holder != owner]
        both = colluders - (owner < colluders)
        if sum(answers) + both >= threshold:
            seeds.add(owner)
        if len(answers) - sum(answers) + both >= threshold:
            keys.add(owner)
    assert not seeds & keys
    return seeds, keys


def test_a_client_never_reveals_both_shares_of_anybody() -> None:
    play = ready()
    play.mask(ALL)
    survivors = frozenset(range(6))
    shares = play.masked[0].reveal(survivors, RULES).shares
    for owner, share in shares.items():
        of_seed = play.masked[0].held[owner][:33]
        of_key = play.masked[0].held[owner][33:]
        assert share == (of_seed if owner in survivors else of_key)


def refused(text: str) -> "pytest.RaisesExc[ProtocolError]":
    return pytest.raises(ProtocolError, match=text)


def test_too_few_survivors_are_refused() -> None:
    play = ready()
    play.mask(ALL)
    with refused("4 survivors, fewer than 5"):
        play.masked[0].reveal(frozenset(range(4)), RULES)
    with refused("survivors without this client"):
        play.masked[0].reveal(frozenset(range(1, 7)), RULES)


def test_survivors_who_gave_no_shares_are_refused() -> None:
    play = Play(RULES, some_vectors(7, 3))
    play.keys(ALL)
    play.shares(range(6))
    play.mask(range(6))
    with refused("survivors who had not given shares"):
        play.masked[0].reveal(frozenset(ALL), RULES)


def test_too_few_members_are_refused_before_anything_is_masked() -> None:
    play = ready()
    named = Partners.from_bytes(play.server.partners()[0], 7)

    def asked(members: set[int]) -> None:
        sealed = {other: named.sealed[other] for other in members - {0}}
        partners = Partners(frozenset(members), sealed)
        play.shared[0].masked(partners, RULES, play.vectors[0])

    asked(set(ALL))
    with refused("masks among 4 clients, fewer than 5"):
        asked(set(range(4)))
    with refused("masks for a sum without this client"):
        asked(set(range(1, 7)))


def test_too_few_neighbours_are_refused_even_if_there_are_enough_members() -> None:
    """h + t = 4 of 9 are enough members, and t_s = 5 neighbours are not there."""
    rules = SecureSum(honest=3, colluding=1)
    play = Play(rules, some_vectors(9, 3))
    play.keys(range(9))
    play.shares(range(4))
    with refused("masks with 3 neighbours, fewer than 5"):
        play.mask(range(4))


def test_shares_that_are_left_out_are_noticed() -> None:
    play = ready()
    named = Partners.from_bytes(play.server.partners()[0], 7)
    fewer = {other: sealed for other, sealed in named.sealed.items() if other != 3}
    with refused("shares that are not those of U2"):
        play.shared[0].masked(Partners(named.members, fewer), RULES, play.vectors[0])


def test_rosters_that_would_not_protect_are_refused() -> None:
    play = Play(RULES, some_vectors(7, 3))
    play.keys(ALL)
    roster = Roster.from_bytes(play.server.rosters()[0])
    keyed = play.keyed[0]
    fewer = dict(list(roster.neighbours.items())[1:])
    with refused("5 neighbours where everybody is one"):
        keyed.share(Roster(0, 7, fewer), RULES)
    with refused("a sum of 4 clients, fewer than 5"):
        keyed.share(Roster(0, 4, dict(list(roster.neighbours.items())[:3])), RULES)
    twice = {**roster.neighbours, 1: roster.neighbours[2]}
    with refused("a public key that comes twice"):
        keyed.share(Roster(0, 7, twice), RULES)
    mirror = {**roster.neighbours, 1: keyed.message}
    with refused("a public key that comes twice"):
        keyed.share(Roster(0, 7, mirror), RULES)
    zero = {**roster.neighbours, 1: PublicKeys(bytes(32), roster.neighbours[1].mask)}
    with pytest.raises(ProtocolError, match="public key of a neighbour is none"):
        keyed.share(Roster(0, 7, zero), RULES)


def test_more_neighbours_than_are_drawn_are_refused() -> None:
    """A server that makes everybody a neighbour of one client lowers nobody's threshold."""
    rules = SecureSum(honest=42, colluding=1, failure=1e-6)
    keys = {place: Keyed.new(SESSION).message for place in range(1, 50)}
    with refused("49 neighbours where"):
        Keyed.new(SESSION).share(Roster(0, 50, keys), rules)
    with refused("1 neighbours for 2 shares"):
        Keyed.new(SESSION).share(Roster(0, 50, {1: keys[1]}), rules)


def test_two_sets_of_members_give_a_sum_that_is_noise() -> None:
    """The keys of masks depend on U₂: a server that names two sets gets no mask off."""
    play = ready(size=2000)
    named = play.server.partners()
    for node in ALL:
        partners = Partners.from_bytes(named[node], 7)
        if node == 0:
            sealed = {other: partners.sealed[other] for other in range(1, 6)}
            partners = Partners(frozenset(range(6)), sealed)
        after, words = play.shared[node].masked(partners, RULES, play.vectors[node])
        play.masked[node] = after
        assert play.server.take_masked(node, words)
    with refused("survivors who had not given shares"):
        play.masked[0].reveal(frozenset(ALL), RULES)
    play.reveal(range(1, 7))
    counts = np.bincount(play.total().view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 6 * np.sqrt(2 * 255)


def test_a_share_of_one_session_is_none_in_another() -> None:
    """Exchange 2 replayed in another round: no holder can open it."""
    play = ready()
    other = Session(7, 3, 1, 6)
    shared = play.shared[0]
    again = dataclasses.replace(shared, session=other)
    named = Partners.from_bytes(play.server.partners()[0], 7)
    after, _ = again.masked(named, RULES, play.vectors[0])
    assert not after.held


def test_exchanges_out_of_order_are_a_fault_of_the_program() -> None:
    play = Play(RULES, some_vectors(7, 3))
    with pytest.raises(RuntimeError, match="the sum is at KEYS, not at MASKED"):
        play.server.take_masked(0, np.zeros(3, np.uint64))
    play.keys(ALL)
    play.shares(ALL)
    with pytest.raises(RuntimeError, match="the sum is at SHARES, not at KEYS"):
        play.server.rosters()


def test_a_member_beyond_the_last_participant_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        members_of(b"\x80", 7)
    assert members_of(bitmap({0, 6}, 7), 7) == {0, 6}
    played(RULES, some_vectors(7, 1), [ALL] * 4)
