"""The ``ppsgd`` command. Parses, calls, prints."""

import enum
import json
import logging
import re
import signal
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from flwr.serverapp.strategy import Result
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from flwr_ppsgd.privacy import Ledger

if TYPE_CHECKING:
    from flwr_ppsgd.experiments.run import Experiment, Outcome
    from flwr_ppsgd.experiments.sweep import Best, Plan, Point

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # they can hold w or data
    help="Personalized-Private-SGD for Flower.",
)
console = Console()


class Engine(enum.StrEnum):
    """Where clients run."""

    process = "process"
    cohort = "cohort"
    flower = "flower"


def _show_list(wanted: bool) -> None:
    if wanted:
        from flwr_ppsgd.experiments.run import presets

        for name, what in presets().items():
            console.print(f"{name:24} {what}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit


Listed = Annotated[
    bool, typer.Option("--list", callback=_show_list, is_eager=True, help="Show the experiments that ship with this.")
]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="FILE", help="Users' rows: .npz, .csv, .parquet, TFF's .sqlite, flwrlabs/femnist."),
]
User = Annotated[str | None, typer.Option("--user", metavar="COLUMN", help="Whose row it is; default: user.")]
Target = Annotated[str | None, typer.Option("--target", metavar="COLUMN", help="What to predict; default: y.")]
Features = Annotated[str | None, typer.Option("--features", metavar="A,B,…", help="Default: all other numbers.")]
Test = Annotated[str | None, typer.Option("--test", metavar="COLUMN", help="1 for test rows; default: test.")]
Time = Annotated[str | None, typer.Option("--time", metavar="COLUMN", help="Each user's last rows are for testing.")]
Fraction = Annotated[float | None, typer.Option("--test-fraction", help="Of each user's rows; default 0.2.")]
Task = Annotated[str | None, typer.Option("--task", help="classification, regression, multi-label; or detected.")]
DATA_KEYS = {
    "data": "data", "user": "user-column", "target": "target-column", "features": "feature-columns",
    "test": "test-column", "time": "time-column", "test_fraction": "test-fraction", "task": "task",
}  # fmt: skip


def _about_data(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that stand for a command's options about data."""
    return {key: given[name] for name, key in DATA_KEYS.items() if given[name] is not None}


def _describe(experiment: "Experiment") -> None:
    if text := experiment.describe():
        console.print(text, highlight=False, markup=False, soft_wrap=True)


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
def run(  # noqa: PLR0917 - typer's own way
    experiment: Annotated[
        Path | None, typer.Argument(help="An experiment TOML, or a name of --list; default: the synthetic problem.")
    ] = None,
    data: Data = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    engine: Annotated[
        Engine, typer.Option(help="Clients in this process, whole cohorts at once, or `flwr run`.")
    ] = Engine.process,
    out: Annotated[Path | None, typer.Option(help="Output directory; default: a new one under runs/.")] = None,
    user: User = None,
    target: Target = None,
    features: Features = None,
    test: Test = None,
    time: Time = None,
    test_fraction: Fraction = None,
    task: Task = None,
    _: Listed = False,
) -> None:
    """Train once and write w, the measures, the privacy statement and a picture."""
    overrides = _about_data(locals()) | _overrides(settings or []) | ({} if rounds is None else {"rounds": rounds})
    from flwr_ppsgd.experiments import run as experiments

    chosen = experiments.Experiment.load(experiment, overrides)
    out = out or experiments.free_directory(experiment.stem if experiment else Path(chosen.data).stem)
    experiments.check_free(out)
    _describe(chosen)
    if engine is Engine.flower:
        from flwr_ppsgd.experiments import flwr_run as flower

        flower.run(chosen, out)
        stopped = False
    else:
        stopped = _run_here(chosen, out, experiments.run_as_cohort if engine is Engine.cohort else experiments.run)
    trained = _report(out)
    if stopped:
        raise typer.Exit(130)
    if not trained:
        raise RuntimeError("the budget max-epsilon pays for no round at all: raise it, or noise-multiplier")


def _run_here(experiment: "Experiment", out: Path, train: Callable[..., "Outcome"]) -> bool:
    from flwr_ppsgd.experiments import run as experiments
    from flwr_ppsgd.results.plots import draw_run

    with progress_bar() as progress:
        outcome = train(experiment, progress_hook(progress, "training", experiment.rounds))
    experiments.save(outcome, out, draw_run)
    return outcome.stopped


@app.command()
def sweep(  # noqa: PLR0917 - typer's own way
    experiment: Annotated[
        Path | None, typer.Argument(help="An experiment TOML in which some settings are lists, or a name of --list.")
    ] = None,
    data: Data = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the rows; the same one again resumes.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, or give a list.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Blocks at a time; default: the cores.")] = None,
    memory: Annotated[str | None, typer.Option(help="Limit, as in 8GB; default: half of what is free.")] = None,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Spread the blocks over a Ray cluster.")] = None,
    user: User = None,
    target: Target = None,
    features: Features = None,
    test: Test = None,
    time: Time = None,
    test_fraction: Fraction = None,
    task: Task = None,
    _: Listed = False,
) -> None:
    """Train a whole grid of settings side by side; interrupted, the same command goes on from there."""
    overrides = _about_data(locals()) | _overrides(settings or [])
    from flwr_ppsgd.experiments.sweep import CAVEAT, Sweep
    from flwr_ppsgd.experiments.workers import run_sweep

    grid, limit = Sweep.load(experiment, overrides), _bytes(memory)
    out = out or Path("runs") / (experiment.stem if experiment else Path(data).stem if data else "sweep")
    _describe(grid.base)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with progress_bar("setting-rounds") as progress:
            run_sweep(grid, out, SweepBar(progress, grid.base.rounds), memory=limit, jobs=jobs, ray=ray)
    except KeyboardInterrupt:
        console.print(f"Interrupted. Finished blocks are in {out}/: the same command goes on from there.")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    console.print(f"Rows: {out}/rows.jsonl   Figures: ppsgd plot {out}", highlight=False, soft_wrap=True)
    console.print(CAVEAT, highlight=False)


@app.command()
def plot(directory: Annotated[Path, typer.Argument(help="The directory of a sweep.")]) -> None:
    """Draw Figure 1 (a panel for each noise level) and Figure 2, and tell the best setting for each ε."""
    from flwr_ppsgd.experiments.outputs import read_config, read_rows
    from flwr_ppsgd.results.figures import draw_sweep

    read_config(directory)
    rows = read_rows(directory)
    if not rows:
        raise ValueError(f"{directory}: no setting is finished yet: run ppsgd sweep --out {directory}")
    table, written = draw_sweep(rows, directory)
    console.print(table, highlight=False, markup=False, soft_wrap=True)
    console.print(f"Written: {', '.join(map(str, written))}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="The directory of a sweep or of a run.")]) -> None:
    """Write one self-contained page: what was run, the guarantee in words, figures, best settings, rows."""
    from flwr_ppsgd.results.page import write_report

    console.print(f"Written: {write_report(directory)}", highlight=False, markup=False, soft_wrap=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _bytes(size: str | None) -> int | None:
    """``8GB``, ``500MB`` or a number of bytes."""
    if size is None:
        return None
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    found = re.fullmatch(r"([0-9.]+)\s*([KMGT]?B?)", size.strip().upper())
    try:
        return int(float(found[1]) * units[found[2]]) if found else int(size)
    except (ValueError, KeyError):
        raise ValueError(f"--memory {size}: write it as 8GB or 500MB") from None


class SweepBar:
    """Settings × rounds, time left and the best measure so far."""

    def __init__(self, progress: Progress, rounds: int) -> None:
        self._progress, self._rounds = progress, rounds
        self._sizes: list[int] = []
        self._done: dict[int, int] = {}
        self._best: dict[int, Best] = {}

    def begin(self, chosen: "Plan", missing: "Sequence[Sequence[Point]]") -> None:
        self._progress.console.print(str(chosen), highlight=False, soft_wrap=True)
        self._sizes = [len(block) for block in missing]
        finished = sum(map(len, chosen.blocks)) - sum(self._sizes)
        self._start = finished * self._rounds
        total = self._start + sum(self._sizes) * self._rounds
        self._task = self._progress.add_task("sweep", total=total, completed=self._start, state="")

    def show(self, block: int, round_: int, best: "Best | None") -> None:
        from flwr_ppsgd.experiments.sweep import best_among

        self._done[block] = self._sizes[block] * round_
        leading = best_among([*self._best.values(), *([best] if best else [])])
        if leading:
            self._best[block] = leading
        shown = "best so far: {} {:.4g}".format(*leading) if leading else ""
        self._progress.update(self._task, completed=self._start + sum(self._done.values()), state=shown)


def _report(out: Path) -> int:
    """Print the statement and what was written where; the number of rounds that were trained."""
    privacy = json.loads((out / "privacy.json").read_text(encoding="utf-8"))
    console.print(privacy["statement"], highlight=False, markup=False)
    names = ", ".join(sorted(path.name for path in out.iterdir()))
    console.print(f"Written: {out}/ ({names})", highlight=False, markup=False, soft_wrap=True)
    return int(privacy["rounds_trained"])


@app.command()
def audit(
    experiment: Annotated[Path | None, typer.Argument(help="An experiment TOML; default: synthetic.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the picture goes; default: none is drawn.")] = None,
) -> None:
    """Measure, with canaries on a strategy of their own, the noise that these settings really give."""
    from flwr_ppsgd.audit import audit as measure
    from flwr_ppsgd.experiments.run import Experiment
    from flwr_ppsgd.server.message_api import PPSGD

    logging.getLogger("flwr").setLevel(logging.ERROR)  # withheld replies are part of it
    chosen = Experiment.load(experiment, _overrides(settings or []))
    flat = {key: value for key, value in chosen.to_flat().items() if key not in ("max-epsilon", "checkpoint-dir")}
    found = measure(lambda: PPSGD.from_config(flat), chosen.rounds)
    console.print(found.in_words(), highlight=False, markup=False)
    if out is not None:
        from flwr_ppsgd.results.plots import audit_picture

        audit_picture(found, out)
        console.print(f"Picture: {out}", highlight=False, soft_wrap=True)
    if found.verdict != "conforms":
        raise RuntimeError(f"the audit's verdict is {found.verdict}")


@app.command()
def plan(
    experiment: Annotated[Path | None, typer.Argument(help="An experiment TOML to take numbers from.")] = None,
    *,
    population: Annotated[int | None, typer.Option(help="Enrolled users, N.")] = None,
    rate: Annotated[float | None, typer.Option(help="Chance to take part in a round, q.")] = None,
    cohort_size: Annotated[int | None, typer.Option(help="Exactly so many users a round, instead of a rate.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds, T.")] = None,
    passes: Annotated[float | None, typer.Option(help="Passes over each user's samples, instead of rounds.")] = None,
    samples_per_user: Annotated[float | None, typer.Option(help="Samples a user has, for --passes.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples a user draws in a round, m.")] = None,
    dimension: Annotated[int | None, typer.Option(help="Shared parameters, d.")] = None,
    delta: Annotated[float | None, typer.Option(help="δ, well below 1/population.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="The ε that all rounds together may cost.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="z, instead of an ε or to compare.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="C; default 1, the unit of length.")] = None,
    gradient_std: Annotated[float | None, typer.Option(help="σ of a sample's gradient at the optimum.")] = None,
    smoothness: Annotated[float | None, typer.Option(help="L; 2R² for the squared loss.")] = None,
    distance: Annotated[float | None, typer.Option(help="Length of the users' common optimum, ‖v‖.")] = None,
    spread: Annotated[float | None, typer.Option(help="How far users' optima lie from it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Before training: noise for an ε, rounds, signal to noise, and which α the theory would start with."""
    from flwr_ppsgd import plan as planning

    given = {key: value for key, value in locals().items() if key not in ("experiment", "as_json", "planning")}
    flat = planning.gather(experiment, given)
    if sys.stdin.isatty() and not as_json:
        flat = planning.ask(flat, typer.prompt)
    question = planning.Question.read(flat)
    made = planning.make(question)
    text = json.dumps(made.as_data(), ensure_ascii=False, indent=2) if as_json else planning.in_words(question, made)
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@app.command("client-report")
def client_report(state_dir: Annotated[Path, typer.Argument(help="The node config's ppsgd-state-dir.")]) -> None:
    """On a client: which runs it took part in, what left the machine, and what is promised."""
    from flwr_ppsgd.client import sent as disclosure

    console.print(disclosure.client_report(state_dir), highlight=False, markup=False, soft_wrap=True)


def progress_bar(unit: str = "rounds") -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} " + unit),
        TextColumn("{task.fields[state]}"), TimeRemainingColumn(), console=console,
    )  # fmt: skip


def progress_hook(progress: Progress, label: str, rounds: int) -> Any:
    """A callback that shows the round, ε and the latest measure."""
    task = progress.add_task(label, total=rounds, state="")

    def show(round_: int, result: Result, ledger: Ledger) -> None:
        evaluated = result.evaluate_metrics_clientapp
        measures = dict(evaluated[max(evaluated)]) if evaluated else {}
        shown = "  ".join(f"{name} {value:.4g}" for name, value in list(measures.items())[:2])
        progress.update(task, completed=round_, state=f"ε ≤ {ledger.quick_epsilon():.3g}  {shown}")

    return show


def _overrides(settings: list[str]) -> dict[str, Any]:
    """``--set clip-norm=1.5`` as TOML values; a bare word is a string, ``inf`` is a number."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: write it as KEY=VALUE")
        value = re.sub(r"(?<![\w.])\.(?=\d)", "0.", value)  # .2 is a number to a person, though not to TOML
        try:
            parsed = tomllib.loads(f"value = {value}")
        except tomllib.TOMLDecodeError:
            parsed = {}
        values[key.strip()] = parsed["value"] if list(parsed) == ["value"] else _plain(value)
    return values


def _plain(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def main() -> None:
    """Bad settings are one line on the error stream and exit status 2; work that could not be done is exit status 1."""
    try:
        app()
    except (ValueError, RuntimeError, OSError) as error:
        print(f"ppsgd: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)


if __name__ == "__main__":
    main()
