"""θ is a replay of the rounds that were published, wherever a server died and came back."""

import itertools
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType
from flwr.clientapp import ClientApp

from flwr_ppsgd import PPSGD, Order, Poisson, Release, client_app
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract.targets import (
    SIZE,
    STEPS,
    USERS,
    Floats,
    Target,
    flat,
    strategy,
    target,
    user_of,
    zeros,
)

RELEASE = Release(Poisson(USERS, 0.5), clip_norm=1.0, noise_multiplier=1.0)
ROUNDS = 25


class Death(BaseException):
    """The server is gone, in the middle of what it was doing."""


class Machine:
    """The server's disk, which keeps what is on it at the moment of death and nothing later.

    Args:
        place: of the training and of the record outside.
    """

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = place / "disk" / "server"
        self._disk = place / "disk"
        self._at_death = place / "disk at death"
        monkeypatch.setenv("PPSGD_STATE_HOME", str(self._disk / "record"))

    def die(self) -> NoReturn:
        shutil.copytree(self._disk, self._at_death)
        raise Death

    def restart(self) -> None:
        shutil.rmtree(self._disk)
        self._at_death.rename(self._disk)


class History:
    """What was published, and at which θ each client was asked.

    A round that is run again takes the place of the one that was lost.
    """

    def __init__(self) -> None:
        self.rounds: dict[int, tuple[Floats, list[int]]] = {}  # w before it, and who took part
        self.visits: list[tuple[Floats, Floats]] = []  # θ as it was, and as it should have been
        self.last: dict[int, Floats] = {}  # θ of each user in the last evaluation
        self.asked: list[int] = []
        self._w = np.zeros(SIZE)

    def resume(self, round_: int, w: Floats) -> None:
        """A server goes on after this round: what came later counts for nothing."""
        for lost in [each for each in self.rounds if each > round_]:
            del self.rounds[lost]
        self._w = w

    def publish(self, round_: int, w: Floats) -> None:
        self.rounds[round_] = (self._w, self.asked)
        self.asked = []  # nobody is asked if nobody was drawn
        self._w = w

    def replayed(self, user: int, before: int) -> Floats:
        """θ after the published rounds before this one, each of which steps it once."""
        theta = np.zeros(SIZE)
        for round_ in sorted(self.rounds):
            w, cohort = self.rounds[round_]
            if round_ < before and user in cohort:
                theta = theta - STEPS.personal * (w + theta - target(user))
        return theta


class Watched(Target):
    """A learner that shows the test at which θ it is asked."""

    def __init__(self, user: int, history: History) -> None:
        super().__init__(target(user))
        self.user = user
        self.history = history

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:
        expected = self.history.replayed(self.user, order.round)
        self.history.visits.append((np.array(theta), expected))
        return super().gradients(w, theta, order)

    def evaluate(self, w: Floats, theta: Floats) -> dict[str, float]:
        self.history.last[self.user] = np.array(theta)
        return super().evaluate(w, theta)


class Mortal(InProcessGrid):
    """Nodes whose server may die after some of those who were asked have answered.

    Args:
        app: the app that every node runs.
        history: is told who was asked.
        fate: how many of so many answer before the server dies; None: it lives.
        die: ends the server.
        state_dir: where nodes keep θ; None: in their context alone.
    """

    def __init__(
        self,
        app: ClientApp,
        history: History,
        fate: Callable[[int], int | None],
        die: Callable[[], NoReturn],
        state_dir: Path | None,
    ) -> None:
        super().__init__(app, USERS)
        self.history = history
        self.fate = fate
        self.die = die
        for node in self.get_node_ids():
            if state_dir is not None:
                self.context(node).node_config["ppsgd-state-dir"] = str(state_dir)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Any:
        sent = list(messages)
        replies = super().send_and_receive(sent, timeout=timeout)
        if not sent or sent[0].metadata.message_type != MessageType.TRAIN:
            return replies
        self.history.asked = [self._user(message) for message in sent]
        answered = self.fate(len(sent))
        if answered is None:
            return replies
        list(itertools.islice(replies, answered))  # a client runs when its reply is read
        self.die()

    def _user(self, message: Message) -> int:
        return user_of(self.context(message.metadata.dst_node_id))


def serve(ppsgd: PPSGD, grid: InProcessGrid, history: History, after: Callable[[], None]) -> None:
    """Train; ``after`` is called after each publication, and may end the server."""
    first = True

    def look(round_: int, arrays: ArrayRecord) -> None:
        nonlocal first
        if first:
            history.resume(round_, flat(arrays))
        else:
            history.publish(round_, flat(arrays))
            after()
        first = False

    history.asked = []
    ppsgd.start(grid, zeros(), num_rounds=ROUNDS, evaluate_fn=look)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_theta_is_a_replay_of_the_published_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, on_disk: bool, every: int
) -> None:
    """The server dies at random: before, while and after clients answer, and after publication.

    With a checkpoint every third round it also goes back over rounds that were published.
    """
    dice = random.Random(seed)
    history = History()
    machine = Machine(tmp_path, monkeypatch)
    app = client_app(lambda context: Watched(user_of(context), history))
    state_dir = tmp_path / "devices" if on_disk else None

    def fate(asked: int) -> int | None:
        return dice.randrange(asked + 1) if dice.random() < 0.3 else None

    def after() -> None:
        if dice.random() < 0.2:
            machine.die()

    def server(**changes: object) -> PPSGD:
        return strategy(RELEASE, checkpoint_dir=machine.server, checkpoint_every=every, **changes)

    grid = Mortal(app, history, fate, machine.die, state_dir)
    deaths = 0
    done = False
    while not done:
        try:
            serve(server(), grid, history, after)
            done = True
        except Death:
            machine.restart()
            deaths += 1
        if on_disk and dice.random() < 0.5:  # the devices restart too, and know their disk alone
            grid = Mortal(app, history, fate, machine.die, state_dir)
    assert deaths > 3
    serve(server(evaluate_every=1), grid, history, after)
    assert set(history.last) == set(range(USERS))
    assert len(history.visits) > ROUNDS
    for user, theta in history.last.items():
        np.testing.assert_allclose(theta, history.replayed(user, ROUNDS + 1), rtol=1e-12)
    for theta, expected in history.visits:
        np.testing.assert_allclose(theta, expected, rtol=1e-12, atol=1e-15)


def test_a_message_that_comes_twice_steps_theta_once(tmp_path: Path) -> None:
    """The second answer is the first again, and the next round goes on from one step."""
    release = Release(Poisson(1, 1.0), clip_norm=9.0, noise_multiplier=0.0)

    def gradients(times: int) -> list[Floats]:
        """What a user sends in three rounds, each message of which comes so often."""
        ppsgd = strategy(release, checkpoint_dir=tmp_path / str(times))
        grid = InProcessGrid(client_app(learner_for_device), 1)
        sent = []
        for round_ in (1, 2, 3):
            messages = ppsgd.configure_train(round_, zeros(), ConfigRecord(), grid)
            replies = list(grid.send_and_receive(messages * times))
            sent += [flat(reply.content.array_records["gradient"]) for reply in replies]
            ppsgd.aggregate_train(round_, replies[:1])
        return sent

    np.testing.assert_array_equal(gradients(2), np.repeat(gradients(1), 2, axis=0))


def learner_for_device(context: Context) -> Target:
    return Target(target(user_of(context)))
