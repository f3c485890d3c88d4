"""What a client sends, and what it refuses to a server that lies: never one vector alone."""

import contextlib
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flwr_ppsgd import SecureSum
from flwr_ppsgd.secure.crypto import SHARE_SIZE, KeyPair, Words, add_mask, join
from flwr_ppsgd.secure.graph import design, survivors_needed
from flwr_ppsgd.secure.protocol import (
    KeysSent,
    Partners,
    PublicKeys,
    Roster,
    Shares,
    SharesSent,
    VectorSent,
    bitmap,
    members_hash,
    members_of,
    own_key,
    pair_key,
    unpack_parts,
)
from tests.support.secure import Play, ready, session_of, some_vectors

RULES = SecureSum(honest=4, colluding=1)
ALL = range(7)
SESSION = session_of(RULES, 7)


def refused(text: str) -> "pytest.RaisesExc[ValueError]":
    return pytest.raises(ValueError, match=text)


def look_random(words: Words) -> bool:
    """Every byte is as frequent as any other (χ² with 255 degrees of freedom)."""
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    return bool(abs(((counts - expected) ** 2 / expected).sum() - 255) < 6 * np.sqrt(2 * 255))


# --- what leaves a client


def test_what_the_server_sees_holds_no_secret_and_no_vector() -> None:
    play = Play(RULES, some_vectors(6, 8))
    play.keys(range(6))
    play.shares(range(6))
    play.mask(range(5))
    everything = b"".join(play.seen)
    for node in range(6):
        assert play.shared[node].seed not in everything
        assert play.keyed[node].mask.private not in everything
    for value in play.vectors.flat:
        assert int(value).to_bytes(8, "little", signed=True) not in everything


def test_a_clients_own_mask_hides_it_from_all_its_neighbours_together() -> None:
    """Whoever knows every shared mask still sees uniform words, until the seed is revealed."""
    play = Play(RULES, np.zeros((5, 20_000), np.int64))
    play.keys(range(5))
    play.shares(range(5))
    words = play.mask(range(5))[0].copy()
    members = members_hash(range(5), 5)
    for other in range(1, 5):
        secret = play.keyed[other].mask.secret_with(play.keyed[0].mask.public)
        add_mask(words, pair_key(secret, play.session, (0, other), members), sign=-1)
    assert look_random(words)
    add_mask(words, own_key(play.shared[0].seed, play.session, 0, members), sign=-1)
    assert not np.any(words)


def test_the_keys_of_masks_depend_on_everything_that_they_are_for() -> None:
    """HKDF(secret; label of the session, u, v, hash of U₂), each of its own."""
    sessions = [SESSION, replace(SESSION, round=6), session_of(SecureSum(3, 1), 7)]
    secrets = [b"a" * 32, b"b" * 32]
    hashes = [members_hash(range(5), 6), members_hash(range(6), 6), members_hash(range(5), 7)]
    pairs = [(0, 1), (0, 2), (1, 2), (1, 12), (11, 2)]
    keys = [pair_key(*each) for each in itertools.product(secrets, sessions, pairs, hashes)]
    keys += [own_key(*each) for each in itertools.product(secrets, sessions, (0, 1), hashes)]
    assert len(set(keys)) == len(keys)
    mirrored = pair_key(secrets[0], SESSION, (1, 0), hashes[0])
    assert mirrored == pair_key(secrets[0], SESSION, (0, 1), hashes[0])


def test_no_state_shows_a_secret_and_the_last_has_none_of_its_own() -> None:
    play = ready(RULES, 7)
    play.mask(ALL)
    secrets = [play.shared[0].seed, play.keyed[0].mask.private, play.keyed[0].channel.private]
    for state in (play.keyed[0], play.shared[0], play.masked[0]):
        assert not any(repr(secret) in repr(state) for secret in secrets)
    kept = b"".join(play.masked[0].to_flat().values())
    assert not any(secret in kept for secret in secrets)


def test_states_survive_being_written_down() -> None:
    """A Flower client is a new process for every message."""
    play = Play(RULES, some_vectors(7, 4))
    steps: list[tuple[Any, Any, Any]] = [
        (play.keys, play.keyed, KeysSent),
        (play.shares, play.shared, SharesSent),
        (play.mask, play.masked, VectorSent),
    ]
    for step, states, kind in steps:
        step(ALL)
        for node in ALL:
            states[node] = kind.from_flat(play.session, states[node].to_flat())
    play.reveal(ALL)
    assert np.array_equal(play.total(), play.vectors.sum(axis=0))


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    readers: list[Callable[[bytes], object]] = [
        Roster.from_bytes,
        PublicKeys.from_bytes,
        lambda data: Shares.from_bytes(data, 5),
        lambda data: Partners.from_bytes(data, 5),
        lambda data: unpack_parts(data, SHARE_SIZE, 5),
        lambda data: members_of(data, 5),
    ]
    for read in readers:
        with contextlib.suppress(ValueError):
            read(data)


def test_a_member_beyond_the_last_participant_is_malformed() -> None:
    with refused("malformed"):
        members_of(b"\x80", 7)
    assert members_of(bitmap({0, 6}, 7), 7) == {0, 6}


# --- a server that names other survivors to each client


def test_a_client_never_reveals_both_shares_of_anybody() -> None:
    play = ready(RULES, 7)
    play.mask(ALL)
    survivors = frozenset(range(6))
    for owner, share in play.masked[0].reveal(survivors).items():
        of_seed = play.masked[0].held[owner][:SHARE_SIZE]
        of_key = play.masked[0].held[owner][SHARE_SIZE:]
        assert share == (of_seed if owner in survivors else of_key)


def secrets_opened_by(
    play: Play, lists: dict[int, frozenset[int]], colluders: int
) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Seeds and mask keys that a server can join from its clients' answers to these lists."""
    of_seed: dict[int, dict[int, bytes]] = {place: {} for place in play.masked}
    of_key: dict[int, dict[int, bytes]] = {place: {} for place in play.masked}
    for holder, named in lists.items():
        for owner, share in play.masked[holder].reveal(named).items():
            (of_seed if owner in named else of_key)[owner][holder] = share
    for holder in range(colluders):
        for owner, both in play.masked[holder].held.items():
            of_seed[owner][holder] = both[:SHARE_SIZE]
            of_key[owner][holder] = both[SHARE_SIZE:]
    return joined(play, of_seed), joined(play, of_key)


def joined(play: Play, shares: dict[int, dict[int, bytes]]) -> dict[int, bytes]:
    found = design(play.rules, len(play.masked))
    secrets = {}
    for owner, own in shares.items():
        threshold = found.threshold(len(play.shared[owner].roster.neighbours))
        if len(own) >= threshold:
            secrets[owner] = join(own, threshold)
    return secrets


def test_lists_that_differ_never_unmask_one_client_alone() -> None:
    """Random lists, t = 2 clients collude: what can be summed are at least t + 2 vectors.

    A sum over S needs the seeds of S and the mask keys of all others.
    """
    source = random.Random(5)
    n, rules = 9, SecureSum(honest=3, colluding=2)
    play = ready(rules, n)
    play.mask(range(n))
    needed = survivors_needed(rules, n)
    resolved = 0
    for _ in range(1500):
        favoured = source.sample(range(n), source.randint(2, n))
        lists = {}
        for own in range(2, n):
            named = {own, *(favoured if source.random() < 0.7 else ())}
            others = source.sample([each for each in range(n) if each not in named], n - len(named))
            lists[own] = frozenset(named | set(others[: max(0, needed - len(named))]))
        seeds, keys = secrets_opened_by(play, lists, colluders=2)
        assert not seeds.keys() & keys.keys()
        if seeds and len(seeds) + len(keys) == n:
            resolved += 1
            assert len(seeds) >= rules.colluding + 2
    assert resolved > 100


def read_alone(play: Play, words: Words) -> NDArray[np.int64] | None:
    """x₀, by telling the neighbours of client 0's neighbours that these are gone; None if it fails.

    Each client is told that as many of the neighbours that it shares with client 0 are gone as its
    least number of survivors allows.
    """
    members = frozenset(play.masked)
    near = play.shared[0].roster.neighbours.keys()
    spare = len(members) - survivors_needed(play.rules, len(members))
    lists = {}
    for own in sorted(members):
        shared_with = sorted((near & play.shared[own].roster.neighbours.keys()) - {own, 0})
        turned = shared_with[own % max(len(shared_with), 1) :] + shared_with
        lists[own] = members - set(turned[: min(spare, len(shared_with))])
    seeds, keys = secrets_opened_by(play, lists, colluders=0)
    if 0 not in seeds or not near <= keys.keys():
        return None
    found = words.copy()
    members_label = members_hash(members, len(members))
    add_mask(found, own_key(seeds[0], play.session, 0, members_label), sign=-1)
    for other in near:
        secret = KeyPair(keys[other]).secret_with(play.keyed[0].mask.public)
        add_mask(found, pair_key(secret, play.session, (0, other), members_label), sign=-1)
    return found.view(np.int64)


def lied_to(rules: SecureSum, clients: int) -> tuple[Play, NDArray[np.int64] | None]:
    play = ready(rules, clients)
    words = play.mask(range(clients))
    return play, read_alone(play, words[0])


def test_with_a_complete_graph_a_server_that_lies_about_survivors_reads_nobody() -> None:
    """A hundred clients, of whom nineteen may drop out."""
    _, found = lied_to(SecureSum(honest=80, colluding=1, failure=1e-6), 100)
    assert found is None


def test_with_a_random_graph_such_a_server_reads_one_client() -> None:
    """Why the graph is complete wherever it can be, and what the statement says beyond it."""
    play, found = lied_to(SecureSum(honest=170, colluding=1, failure=1e-6), 210)
    assert found is not None
    assert np.array_equal(found, play.vectors[0])


def test_too_few_or_wrong_survivors_are_refused() -> None:
    play = ready(RULES, 7)
    play.mask(ALL)
    with refused("4 survivors, fewer than 5"):
        play.masked[0].reveal(frozenset(range(4)))
    with refused("survivors without this client"):
        play.masked[0].reveal(frozenset(range(1, 7)))
    with refused("survivors who had not given shares"):
        play.masked[0].reveal(frozenset(range(8)))


# --- a server that tells some clients other terms


def test_clients_under_other_terms_cannot_read_each_others_shares_or_masks() -> None:
    """Clients 0 to 2 are told h = 3 instead of 4: no share opens between them and the others."""
    play = Play(RULES, some_vectors(7, 2000))
    play.keys(ALL)
    other = session_of(SecureSum(honest=3, colluding=1), 7)
    for node in range(3):
        play.keyed[node] = replace(play.keyed[node], session=other)
    play.shares(ALL)
    play.mask(ALL)
    assert play.masked[0].held.keys() == {1, 2}
    assert play.masked[6].held.keys() == {3, 4, 5}
    total = np.zeros(2000, np.uint64)
    for words in play.seen[14:]:
        total += np.frombuffer(words, np.uint64)
    members = members_hash(ALL, 7)
    for node, state in play.shared.items():  # even if all seeds were known
        add_mask(total, own_key(state.seed, state.session, node, members), sign=-1)
    assert look_random(total)


# --- a server that names other participants


def roster(clients: int, neighbours: int) -> Roster:
    """Of client 0, with so many neighbours."""
    keys = {place: KeysSent.new(SESSION).public for place in range(1, neighbours + 1)}
    return Roster(0, clients, keys)


def test_no_sum_has_more_participants_than_are_enrolled() -> None:
    """Population 40: with 60 participants the graph may be sparse, and x₀ be read alone."""
    client = KeysSent.new(session_of(SecureSum(honest=30, colluding=2), 40))
    with refused("a sum of 60 clients where 40 are enrolled"):
        client.share(roster(60, 4))
    with refused("38 neighbours where the terms ask for all 39 others"):
        client.share(roster(40, 38))
    client.share(roster(40, 39))


def test_a_million_participants_are_refused_before_any_work() -> None:
    rules = SecureSum(honest=1 << 19, colluding=1)
    data = Roster(0, 1 << 20, {}).to_bytes()
    with refused("malformed message of a secure sum: 1048576 participants"):
        KeysSent.new(session_of(rules, 1 << 20)).share(Roster.from_bytes(data))


def test_a_random_graph_has_neither_fewer_nor_more_neighbours_than_can_be_drawn() -> None:
    rules = SecureSum(honest=190, colluding=1, failure=1e-6)
    found = design(rules, 210)
    assert not found.complete
    client = KeysSent.new(session_of(rules, 210))
    expected = f"ask for {found.fewest} to {found.neighbours}"
    for neighbours in (0, 1, found.fewest - 1, found.neighbours + 1, 209):
        with refused(f"{neighbours} neighbours where the terms {expected}"):
            client.share(roster(210, neighbours))
    client.share(roster(210, found.fewest))
    client.share(roster(210, found.neighbours))


def test_rosters_that_would_not_protect_are_refused() -> None:
    play = Play(RULES, some_vectors(7, 3))
    play.keys(ALL)
    neighbours = Roster.from_bytes(play.server.rosters()[0]).neighbours
    client = play.keyed[0]
    with refused("a sum of 4 clients, fewer than 5"):
        client.share(roster(4, 3))
    for copied in (neighbours[2], client.public):
        with refused("a public key comes twice"):
            client.share(Roster(0, 7, {**neighbours, 1: copied}))
    zero = {**neighbours, 1: PublicKeys(bytes(32), neighbours[1].mask)}
    with refused("public key is invalid"):
        client.share(Roster(0, 7, zero))


def test_too_few_members_are_refused_before_anything_is_masked() -> None:
    play = ready(RULES, 7)
    named = Partners.from_bytes(play.server.partners()[0], 7)

    def mask(members: set[int]) -> None:
        sealed = {other: named.sealed[other] for other in members - {0}}
        play.shared[0].mask_vector(Partners(frozenset(members), sealed), play.vectors[0])

    mask(set(ALL))
    with refused("masks among 4 clients, fewer than 5"):
        mask(set(range(4)))
    with refused("masks for a sum without this client"):
        mask(set(range(1, 7)))
    fewer = {other: sealed for other, sealed in named.sealed.items() if other != 3}
    with refused("the shares are not those of U2"):
        play.shared[0].mask_vector(Partners(named.members, fewer), play.vectors[0])


def test_too_few_neighbours_are_refused_even_if_there_are_enough_members() -> None:
    """h + t = 4 of 9 are enough members, and t_s = 5 neighbours are not there."""
    play = Play(SecureSum(honest=3, colluding=1), some_vectors(9, 3))
    play.keys(range(9))
    play.shares(range(4))
    with refused("masks with 3 neighbours, fewer than 5"):
        play.mask(range(4))


def test_two_sets_of_members_give_a_sum_that_is_noise() -> None:
    """The keys of masks depend on U₂: a server that names two sets gets no mask off."""
    play = ready(RULES, 7, 2000)
    named = play.server.partners()
    for node in ALL:
        partners = Partners.from_bytes(named[node], 7)
        if node == 0:
            sealed = {other: partners.sealed[other] for other in range(1, 6)}
            partners = Partners(frozenset(range(6)), sealed)
        play.masked[node], words = play.shared[node].mask_vector(partners, play.vectors[node])
        assert play.server.take_masked(node, words)
    with refused("survivors who had not given shares"):
        play.masked[0].reveal(frozenset(ALL))
    play.reveal(range(1, 7))
    assert look_random(play.total().view(np.uint64))


def test_a_share_of_one_session_cannot_be_opened_in_another() -> None:
    """Exchange 2 replayed in another round: no holder can open it."""
    play = ready(RULES, 7)
    again = replace(play.shared[0], session=replace(play.session, round=6))
    named = Partners.from_bytes(play.server.partners()[0], 7)
    after, _ = again.mask_vector(named, play.vectors[0])
    assert not after.held
