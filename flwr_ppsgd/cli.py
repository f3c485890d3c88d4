"""The ``ppsgd`` command. Parses, calls, prints."""

import logging
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from flwr.serverapp.strategy import Result
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from flwr_ppsgd.privacy import Ledger

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Personalized-Private-SGD for Flower.")
console = Console()


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"flwr_ppsgd {version('flwr-ppsgd')}")
        raise typer.Exit


@app.callback()
def ppsgd(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train personal models with user-level joint differential privacy."""
    logging.getLogger("flwr").setLevel(logging.WARNING)


@app.command()
def run(
    experiment: Annotated[
        Path | None, typer.Argument(help="An experiment TOML; default: the synthetic problem.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    out: Annotated[Path | None, typer.Option(help="Output directory; default: a new one under runs/.")] = None,
) -> None:
    """Train once and write w, the measures, the privacy statement and a picture."""
    from flwr_ppsgd.simulation import experiment as experiments

    overrides = {**_overrides(settings or []), **({} if rounds is None else {"rounds": rounds})}
    chosen = experiments.Experiment.load(experiment, overrides)
    out = out or experiments.free_directory(experiment.stem if experiment else chosen.data)
    experiments.check_free(out)
    with progress_bar() as progress:
        outcome = experiments.run(chosen, progress_hook(progress, "training", chosen.rounds))
    experiments.save(outcome, out, draw)
    console.print(outcome.strategy.privacy_statement(), highlight=False, markup=False)
    console.print(
        f"Written: {out}/ (config.toml, metrics.jsonl, privacy.json, model.npz, learning.png)", highlight=False
    )
    if outcome.stopped:
        raise typer.Exit(130)


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} rounds"),
        TextColumn("{task.fields[state]}"), TimeRemainingColumn(), console=console,
    )  # fmt: skip


def progress_hook(progress: Progress, label: str, rounds: int) -> Any:
    """A callback that shows the round, ε and the latest measure."""
    task = progress.add_task(label, total=rounds, state="")

    def show(round_: int, result: Result, ledger: Ledger) -> None:
        evaluated = result.evaluate_metrics_clientapp
        measures = dict(evaluated[max(evaluated)]) if evaluated else {}
        shown = "  ".join(f"{name} {value:.4g}" for name, value in measures.items())
        progress.update(task, completed=round_, state=f"ε ≤ {ledger.quick_epsilon():.3g}  {shown}")

    return show


def draw(outcome: Any, directory: Path) -> None:
    """The picture of one run."""
    from flwr_ppsgd.plots import learning_curves

    if not outcome.rows:
        return
    measure = next(name for name in outcome.rows[0] if name not in ("round", "epsilon"))
    alpha = f"αQ = {outcome.experiment.alpha_q:g}"
    footnote = "Measured on the users' own data: outside the guarantee."
    learning_curves({alpha: outcome.rows}, measure, directory / "learning.png", "Personalized-Private-SGD", footnote)


def _overrides(settings: list[str]) -> dict[str, Any]:
    """``--set clip-norm=1.5`` as TOML values; a bare word is a string, ``inf`` is a number."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: write it as KEY=VALUE")
        try:
            values[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            values[key.strip()] = value
    return values


def main() -> None:
    """Bad input is one line on the error stream and exit status 2."""
    try:
        app()
    except ValueError as error:
        print(f"ppsgd: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
