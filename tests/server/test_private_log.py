"""What only the operator may see: in a file for its owner alone, and never in Flower's log."""

import inspect
import json
import logging
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.server import ServerApp, ServerAppComponents, server
from flwr.server.workflow import default_workflows

from flwr_ppsgd import client_app
from flwr_ppsgd.client.legacy_api import PPSGDClient
from flwr_ppsgd.server import private_log
from flwr_ppsgd.server.legacy_api import COHORT_SIZES
from flwr_ppsgd.server.private_log import NAME, PrivateLog, RoundFacts
from flwr_ppsgd.server.rounds import NobodyUsableError
from flwr_ppsgd.simulation import InProcessGrid
from tests.server.test_legacy_api import legacy
from tests.support.toy import release, strategy, toy_learner, w0

POPULATION = 30
SETTINGS: dict[str, Any] = {"release": release(POPULATION, rate=0.5, z=1.0), "delta": 1e-3}


def lines(directory: Path) -> list[dict[str, Any]]:
    return list(private_log.entries(directory))


def failing_often(message: Message, context: Context) -> Message:
    """Two of three clients fail, and say who they are."""
    place = int(context.node_config["partition-id"])
    if place % 3:
        raise RuntimeError(f"I am user {place} and took part")
    return client_app(toy_learner)(message, context)


def train(directory: Path, app: Callable[[Message, Context], Message]) -> None:
    ppsgd = strategy(**SETTINGS, checkpoint_dir=directory, evaluate_every=2)
    grid = InProcessGrid(app, POPULATION)  # type: ignore[arg-type]
    ppsgd.start(grid, w0(), num_rounds=4)


class Unwell(PPSGDClient):
    """One that fails in two of three users."""

    def __init__(self, context: Context) -> None:
        super().__init__(toy_learner(context), context)
        self.place = int(context.node_config["partition-id"])

    def fit(self, *given: Any) -> Any:
        if self.place % 3:
            raise RuntimeError(f"I am user {self.place} and took part")
        return super().fit(*given)

    def evaluate(self, *given: Any) -> Any:
        if self.place % 3:
            raise RuntimeError(f"I am user {self.place} and was asked")
        return super().evaluate(*given)


def well(context: Context) -> Client:
    return PPSGDClient(toy_learner(context), context).to_client()


def unwell(context: Context) -> Client:
    return Unwell(context).to_client()


def train_legacy(directory: Path, client_fn: Callable[[Context], Client]) -> None:
    ppsgd = legacy(**SETTINGS, checkpoint_dir=directory, evaluate_every=2)
    app = ServerApp(
        server_fn=lambda _: ServerAppComponents(strategy=ppsgd, config=ppsgd.server_config(4))
    )
    grid = InProcessGrid(ClientApp(client_fn=client_fn), POPULATION)
    app(grid, grid.context(grid.get_node_ids()[0]))


TRAININGS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "message": (
        lambda place: train(place, client_app(toy_learner)),
        lambda place: train(place, failing_often),
    ),
    "legacy": (
        lambda place: train_legacy(place, well),
        lambda place: train_legacy(place, unwell),
    ),
}


@pytest.mark.parametrize("api", TRAININGS)
def test_the_log_is_the_same_whoever_took_part_and_whatever_they_replied(
    api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two trainings by secret coins, so with other cohorts; in the second most clients fail."""
    said = []
    for place, run in zip(("one", "two"), TRAININGS[api], strict=True):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="flwr"):
            run(tmp_path / place)
        text = "\n".join(caplog.messages).replace(str(tmp_path / place), "DIRECTORY")
        text = re.sub(r"in [0-9.]+s|, [0-9.e-]+\)", "TIME", text)  # how long it took
        said.append(re.sub(r"'?(distance|loss)'?.*", "MEASURE", text))  # evaluation is outside
    assert "epsilon" in said[0]
    assert said[0] == said[1]
    failed = sum(sum(entry.get("zeros", {}).values()) for entry in lines(tmp_path / "two"))
    assert failed > 4, "the operator sees it"


def test_the_lines_of_flower_about_cohort_sizes_are_those_that_are_kept_out() -> None:
    """A Flower that words them in another way fails here."""
    for module in (server, default_workflows):
        source = inspect.getsource(module)
        found = re.findall(r'"((?:configure|aggregate)_\w+: [^"]*%s[^"]*)"', source)
        assert len(found) == 4, module
        assert all(line.startswith(COHORT_SIZES) for line in found), found


def test_the_file_is_for_its_owner_alone_and_names_nobody(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        train(tmp_path, failing_often)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
    rounds = [entry for entry in lines(tmp_path) if "round" in entry]
    assert [entry["round"] for entry in rounds] == [1, 2, 3, 4]
    assert all(entry["zeros"].keys() <= {"client error"} for entry in rounds)
    assert any("I am user" in entry["first_failure"] for entry in rounds)


def test_without_a_directory_facts_are_at_debug_level_unless_the_seed_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    facts = RoundFacts(3, 0, {"client error": 2, "missing": 1}, "out of data")
    with caplog.at_level(logging.DEBUG, logger="flwr.ppsgd"):
        for secret in (True, False):
            PrivateLog(None, secret).note_round(facts)
    expected = (
        "server-private: round=3 replies=0 zeros=3 client-error=2 missing=1; the first: out of data"
    )
    assert caplog.messages == [expected, expected]
    assert [record.levelname for record in caplog.records] == ["DEBUG", "WARNING"]


def test_a_torn_line_costs_no_other_line(tmp_path: Path) -> None:
    own = PrivateLog(tmp_path, secret=True)
    own.note_problem("one")
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'{"time": 1.0, "prob')
    own.note_problem("two")
    own.note_problem("three\x1b[31m\nin colour")
    assert [entry["problem"] for entry in lines(tmp_path)] == ["one", "two", "three?[31m in colour"]


@pytest.mark.parametrize("kept", [True, False])
def test_what_ended_a_run_is_noted_and_its_text_names_no_client(kept: bool, tmp_path: Path) -> None:
    """Without a directory there is no other place for what the clients said."""

    def failing(*_: object) -> Message:
        raise RuntimeError("I am user 7")

    ppsgd = strategy(**SETTINGS, checkpoint_dir=tmp_path if kept else None)
    grid = InProcessGrid(failing, POPULATION)  # type: ignore[arg-type]
    with pytest.raises(NobodyUsableError) as caught:
        ppsgd.start(grid, w0(), num_rounds=9)
    assert ("user 7" in str(caught.value)) != kept
    assert (f"ppsgd status {tmp_path}" in str(caught.value)) == kept
    if kept:
        assert lines(tmp_path)[-1]["error"].startswith("NobodyUsableError: in rounds")
        assert "user 7" in json.dumps(lines(tmp_path)[0])


def test_what_ended_a_legacy_run_is_noted_too(tmp_path: Path) -> None:
    ppsgd = legacy(checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="without being configured"):
        ppsgd.aggregate_fit(1, [], [])
    assert lines(tmp_path)[-1]["error"].startswith("ValueError: round 1 was aggregated")


def test_a_training_that_is_refused_is_noted_where_there_was_one(tmp_path: Path) -> None:
    used = tmp_path / "used"
    train(used, client_app(toy_learner))
    other = {**SETTINGS, "delta": 1e-4}
    with pytest.raises(ValueError, match="other privacy settings"):
        strategy(**other, checkpoint_dir=used)
    assert lines(used)[-1]["error"].startswith("ValueError: ")
    assert "delta was 0.001 and is 0.0001" in lines(used)[-1]["error"]
    (tmp_path / "journal.jsonl").write_text("nonsense\n")
    with pytest.raises(ValueError, match="is damaged"):
        strategy(**SETTINGS, checkpoint_dir=tmp_path)
    assert not (tmp_path / NAME).exists()
