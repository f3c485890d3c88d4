"""Rounds with a secure sum."""

import functools
import time
import tracemalloc

import numpy as np
from flwr.app import ArrayRecord, Context

from flwr_ppsgd import PPSGD, Poisson, Release, SecureSum, Steps, client_app
from flwr_ppsgd.learner import Minibatches, generator
from flwr_ppsgd.models.additive_linear import AdditiveLinear, Matrix
from flwr_ppsgd.noise import Coins, secure_input
from flwr_ppsgd.secure.coordinator import Coordinator
from flwr_ppsgd.secure.protocol import KeysSent, Partners, Roster
from flwr_ppsgd.secure.terms import Session, Terms
from flwr_ppsgd.simulation import InProcessGrid
from simulations.benchmarks.measuring import median_ratio, seconds, show
from simulations.benchmarks.workload import BATCH, CLASSES, CLIP_NORM, DELTA, LARGE, SAMPLES


def show_secure() -> None:
    everyone = SecureSum(honest=95, colluding=2)
    name = "j. a round / a plain one, 100 clients, 10^4×10, minibatch 10"
    show(name, secure_ratio(everyone), at_most=40)
    show(
        "j. seconds of CPU per client and round at 10^6, 32 neighbours",
        secure_client_seconds(LARGE, neighbours=32),
        at_most=1,
    )
    many, few_bytes = (secure_server_bytes(clients) for clients in (40, 20))
    show("j. peak memory of the sum at 10^6, 40 clients / 20", many / few_bytes, at_most=1.1)


WIDE = 10**5


SECURE_CLIENTS = 100


def session_of(release: Release) -> Session:
    return Session(Terms.of(release, None), training=1, run=1, start=1, round=1)


@functools.cache
def wide_rows() -> tuple[Matrix, Matrix]:
    """Rows of x, which all users share to save memory, and classes as one-hot rows."""
    source = generator("wide")
    x = source.normal(size=(SAMPLES, WIDE // CLASSES))
    return x, np.eye(CLASSES)[source.integers(CLASSES, size=SAMPLES)]


def wide_learner(context: Context) -> AdditiveLinear:
    """An additive linear model with softmax and 10^5 coordinates."""
    x, y = wide_rows()
    user = int(context.node_config["partition-id"])
    batches = Minibatches(x, y, BATCH, seed=1, user=user)
    return AdditiveLinear(batches, WIDE // CLASSES, CLASSES, loss="softmax")


def secure_ratio(rules: SecureSum, repetitions: int = 2) -> float:
    """CPU of a round with a secure sum over that of a plain round; both in this process."""

    def round_with(aggregation: SecureSum | None) -> float:
        cohort = Poisson(SECURE_CLIENTS, 1.0)
        release = Release(cohort, CLIP_NORM, 1.0, aggregation=aggregation)
        steps = Steps(shared=0.1, personal=0.1)
        server = PPSGD(release=release, steps=steps, delta=DELTA)
        grid = InProcessGrid(client_app(wide_learner), SECURE_CLIENTS)
        moments: list[float] = []
        server.start(
            grid,
            ArrayRecord([np.zeros(WIDE)]),
            num_rounds=2,
            on_round=lambda *_: moments.append(time.process_time()),
        )
        return moments[-1] - moments[-2]

    return median_ratio((round_with(rules), round_with(None)) for _ in range(repetitions))


def secure_client_seconds(size: int, neighbours: int) -> float:
    """What one client works in all four exchanges, with as many neighbours as there are others."""
    rules = SecureSum(honest=neighbours - 1, colluding=2)
    release = Release(Poisson(neighbours + 1, 1.0), CLIP_NORM, 1.0, aggregation=rules)
    session = session_of(release)
    vector = np.full(size, 1e-6)
    keyed = [KeysSent.new(session) for _ in range(neighbours + 1)]
    server = Coordinator[int](session, size)
    for node, state in enumerate(keyed):
        server.take_keys(node, state.public.to_bytes())
    rosters = {node: Roster.from_bytes(data) for node, data in server.rosters().items()}
    sent = [state.share(rosters[node]) for node, state in enumerate(keyed)]
    for node, (_, shares) in enumerate(sent):
        server.take_shares(node, shares.to_bytes())
    partners = Partners.from_bytes(server.partners()[0], len(keyed))

    def one_client() -> None:
        KeysSent.new(session)
        shared, _ = keyed[0].share(rosters[0])
        x = secure_input(vector, size, release, None, Coins.secret())
        masked, _ = sent[0][0].mask_vector(partners, x)
        masked.reveal(partners.members)
        assert shared.roster.place == 0

    return min(seconds(one_client) for _ in range(3))


def secure_server_bytes(clients: int) -> int:
    """The most memory that the server's part of a sum of 10^6 takes."""
    rules = SecureSum(honest=clients - 2, colluding=0)
    session = session_of(Release(Poisson(clients, 1.0), CLIP_NORM, 1.0, aggregation=rules))
    keyed = [KeysSent.new(session) for _ in range(clients)]
    words = np.zeros(LARGE, np.uint64)
    tracemalloc.start()
    server = Coordinator[int](session, LARGE)
    for node, state in enumerate(keyed):
        server.take_keys(node, state.public.to_bytes())
    rosters = server.rosters()
    for node, state in enumerate(keyed):
        _, shares = state.share(Roster.from_bytes(rosters[node]))
        server.take_shares(node, shares.to_bytes())
    server.partners()
    for node in range(clients):
        server.take_masked(node, words)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak
