"""Accuracy against ε for a Flower app whose run config has ``strategy`` and ``epsilon``.

    python simulations/apps/compare.py simulations/apps/quickstart --nodes 100

Every strategy trains at every ε, all clients in this process. What is drawn is the mean over users
of what the clients measure in the last evaluation, and as lines what own rows alone reach
(``local_…``) if clients report it. A strategy whose name is in ``--not-private`` has no ε and is
drawn as a line too. The app stays as it is: nothing has to be added to it.
"""

import os

# read when numpy is imported: many small matrices are slower on several threads
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import csv
import importlib
import logging
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from matplotlib import pyplot as plt

from flwr_ppsgd.simulation import InProcessGrid, LazyReplies

LOCAL = "local_"
OUTSIDE = "Means over users' own test rows: outside the guarantee."


@dataclass(frozen=True)
class App:
    """A Flower app, imported.

    Args:
        server: its ServerApp.
        client: its ClientApp.
        config: its run config.
    """

    server: ServerApp
    client: ClientApp
    config: UserConfig

    @classmethod
    def load(cls, directory: Path) -> "App":
        """As its pyproject.toml says."""
        with (directory / "pyproject.toml").open("rb") as file:
            settings = tomllib.load(file)["tool"]["flwr"]["app"]
        sys.path.insert(0, str(directory.resolve()))
        components = settings["components"]
        server = _attribute(components["serverapp"])
        client = _attribute(components["clientapp"])
        return cls(server, client, settings["config"])

    def measures(self, nodes: int, changes: UserConfig) -> dict[str, float]:
        """What the clients measure in the last evaluation of one training."""
        config = {**self.config, **changes}
        grid = MeasuringGrid(self.client, nodes, config)
        context = Context(
            run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config
        )
        self.server(grid, context)
        return grid.measures


def _attribute(reference: str) -> Any:
    """What "package.module:name" refers to."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


class MeasuringGrid(InProcessGrid):
    """An InProcessGrid that keeps the means of the last evaluation, whatever the strategy."""

    measures: dict[str, float]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> LazyReplies:
        """The replies; if they are to an evaluation, their means are kept."""
        sent = list(messages)
        replies = super().send_and_receive(sent, timeout=timeout)
        if sent and sent[0].metadata.message_type == "evaluate":
            records = [record for reply in replies for record in _metrics(reply)]
            if records:
                self.measures = means(records)
        return replies


def _metrics(reply: Message) -> list[Mapping[str, Any]]:
    return list(reply.content.metric_records.values()) if reply.has_content() else []


def means(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each measure over users, weighted by ``num-examples``."""
    weights = [float(record.get("num-examples", 1)) for record in records]
    total = sum(weights)
    return {
        name: sum(w * float(record[name]) for w, record in zip(weights, records, strict=True))
        / total
        for name in records[0]
        if name != "num-examples"
    }


Points = dict[str, dict[float, dict[str, float]]]  # measures by strategy and ε


def compare(
    app: App,
    nodes: int,
    strategies: Sequence[str],
    epsilons: Sequence[float],
    not_private: Sequence[str],
) -> Points:
    """Train under every strategy at every ε; once if a strategy is not private."""
    found: Points = {}
    for strategy in strategies:
        found[strategy] = {}
        for epsilon in epsilons[:1] if strategy in not_private else epsilons:
            changes: UserConfig = {"strategy": strategy, "epsilon": epsilon, "population": nodes}
            found[strategy][epsilon] = app.measures(nodes, changes)
            print(f"{strategy:14} epsilon {epsilon:g}: {_in_words(found[strategy][epsilon])}")
    return found


def _in_words(measures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in measures.items())


def draw(found: Points, measure: str, not_private: Sequence[str], path: Path) -> None:
    """A curve for each strategy with an ε; level lines for those without, and for own rows."""
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for strategy, by_epsilon in found.items():
        values = [measures[measure] for measures in by_epsilon.values()]
        if strategy in not_private:
            axes.axhline(values[0], linestyle=":", color="0.5")
            axes.annotate(
                f"{strategy}, not private",
                (1.0, values[0]),
                xycoords=("axes fraction", "data"),
                xytext=(-3, 3),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color="0.4",
            )
        else:
            axes.plot(list(by_epsilon), values, marker="o", label=strategy)
    alone = [
        measures[LOCAL + measure]
        for by_epsilon in found.values()
        for measures in by_epsilon.values()
        if LOCAL + measure in measures
    ]
    if alone:
        axes.axhline(alone[-1], linestyle="--", color="0.3", label="own rows alone")
    axes.set(xscale="log", xlabel="ε", ylabel=f"{measure}, mean over users")
    ticks = sorted({epsilon for by_epsilon in found.values() for epsilon in by_epsilon})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.margins(y=0.1)  # room for the labels of level lines
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.supxlabel(OUTSIDE, fontsize=8, color="0.3")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write(found: Points, path: Path) -> None:
    """All measures, a line each."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["strategy", "epsilon", "measure", "value"])
        for strategy, by_epsilon in found.items():
            for epsilon, measures in by_epsilon.items():
                for name, value in measures.items():
                    table.writerow([strategy, epsilon, name, value])


def main(given: Sequence[str] | None = None) -> Points:
    """Train, draw, and write the numbers beside the picture."""
    parser = argparse.ArgumentParser(prog="compare.py", description=__doc__.partition("\n")[0])
    parser.add_argument("app", type=Path, help="the directory of the app's pyproject.toml")
    parser.add_argument("--nodes", type=int, default=100, help="also the run config's population")
    parser.add_argument(
        "--strategies", nargs="+", default=["ppsgd", "ppsgd-alpha", "fedavg-dp", "fedavg"]
    )
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.5, 1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--not-private", nargs="*", default=["fedavg", "fedprox"])
    parser.add_argument("--measure", default="accuracy")
    parser.add_argument("--picture", type=Path, default=Path("runs") / "compare.png")
    options = parser.parse_args(given)
    if not (options.app / "pyproject.toml").is_file():
        parser.error(f"{options.app} has no pyproject.toml: give the directory of a Flower app")
    logging.getLogger("flwr").setLevel(logging.WARNING)
    app = App.load(options.app)
    found = compare(app, options.nodes, options.strategies, options.epsilons, options.not_private)
    draw(found, options.measure, options.not_private, options.picture)
    write(found, options.picture.with_suffix(".csv"))
    print(f"Picture: {options.picture}")
    return found


if __name__ == "__main__":
    main()
