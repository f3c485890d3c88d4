"""The ``ppsgd`` command. Parses, calls, prints.

Nothing heavy is imported before a command needs it: help and lists answer at once.
"""

import enum
import inspect
import json
import logging
import re
import signal
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import click
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from typer.core import TyperArgument, TyperGroup
from typer.models import ArgumentInfo

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Result

    from flwr_ppsgd.lab.block import Best, Plan
    from flwr_ppsgd.lab.experiment import Experiment
    from flwr_ppsgd.lab.rows import Point
    from flwr_ppsgd.lab.run import Outcome, Watch
    from flwr_ppsgd.lab.screen import Line
    from flwr_ppsgd.ledger import Ledger

MOST_EXTENSIONS = 3  # of a grid, in one command
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it
LABEL_WIDTH = 11
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
console = Console()


class Commands(TyperGroup):
    """The commands, with the help texts of their arguments.

    click 8.5 has a help text for arguments itself, and sets it to nothing after typer 0.20 has set
    it. So it is taken once more from where it was written.
    """

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.callback is not None:
            hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
            for parameter in command.params:
                if isinstance(parameter, TyperArgument):
                    parameter.help = _written_help(hints[str(parameter.name)])
        return command


def _written_help(hint: Any) -> str | None:
    """The help text in the annotation of an argument."""
    for note in getattr(hint, "__metadata__", ()):
        if isinstance(note, ArgumentInfo):
            return note.help
    return None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # they can hold w or data
    help="Personalized-Private-SGD for Flower.",
)


class Engine(enum.StrEnum):
    """Where clients run."""

    process = "process"
    cohort = "cohort"
    flower = "flower"


def _no_list(wanted: bool) -> None:
    if wanted:
        raise ValueError("--list is a command of its own: type `ppsgd experiments`")


NoList = Annotated[bool, typer.Option("--list", callback=_no_list, is_eager=True, hidden=True)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated."),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="FILE",
        help="Users' rows: .npz, .csv, .parquet, TFF's .sqlite, flwrlabs/femnist.",
    ),
]
User = Annotated[
    str | None,
    typer.Option("--user", metavar="COLUMN", help="Names the user of a row; default: user."),
]
Target = Annotated[
    str | None,
    typer.Option("--target", metavar="COLUMN", help="What to predict; default: y."),
]
Features = Annotated[
    str | None,
    typer.Option("--features", metavar="A,B,…", help="Default: all other columns of numbers."),
]
Test = Annotated[
    str | None,
    typer.Option("--test", metavar="COLUMN", help="1 marks test rows; default: test."),
]
Time = Annotated[
    str | None,
    typer.Option("--time", metavar="COLUMN", help="Each user's last rows are for testing."),
]
Fraction = Annotated[
    float | None,
    typer.Option("--test-fraction", help="Share of each user's rows for testing; default: 0.2."),
]
Task = Annotated[
    str | None,
    typer.Option(
        "--task", help="classification, regression or multi-label; default: it is detected."
    ),
]

Exclude = Annotated[
    str | None, typer.Option("--exclude", metavar="A,B,…", help="Columns that are not used.")
]
Categorical = Annotated[
    str | None,
    typer.Option(
        "--categorical", metavar="A,B,…", help="Columns of categories: one-hot, hashed where many."
    ),
]
Text = Annotated[
    str | None,
    typer.Option("--text", metavar="A,B,…", help="Columns of text: shares of hashed words."),
]
Sep = Annotated[
    str | None, typer.Option("--sep", metavar="CHARACTER", help="Separates values; default: ,")
]
Encoding = Annotated[
    str | None, typer.Option("--encoding", metavar="NAME", help="Of a .csv; default: utf-8.")
]
Impute = Annotated[
    str | None,
    typer.Option(
        "--impute",
        metavar="RULE",
        help="For gaps: drop (the row), zero or own-mean; default: refuse.",
    ),
]


def _show(text: str) -> None:
    """Print text as it is, however wide the terminal."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _show_lines(lines: "Iterable[Line]", *, unbroken: bool = False) -> None:
    """Print labels and texts in two columns, broken between words on a terminal.

    Args:
        lines: a label and a text each.
        unbroken: never break them: they are to be copied.
    """
    width = sys.maxsize if unbroken or not console.is_terminal else console.width
    for label, text in lines:
        first = f"{label:{LABEL_WIDTH}} "
        indent = " " * len(first)
        _show(
            textwrap.fill(
                text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False
            )
        )


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """What was typed."""
    return {key: value for key, value in values.items() if value is not None}


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"flwr_ppsgd {version('flwr-ppsgd')}")
        raise typer.Exit


@app.callback()
def ppsgd(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train personal models with user-level joint differential privacy."""


@app.command()
def experiments() -> None:
    """List the experiments that ship with this package."""
    from flwr_ppsgd.lab.presets import presets

    for name, what in presets().items():
        _show(f"{name:24} {what}")


@app.command()
def look(  # noqa: PLR0917 - typer's own way
    data: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Users' rows: .npz, .csv, .parquet, TFF's .sqlite, flwrlabs/femnist.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Means and deviations to review; default: FILE's name-standardise.csv."),
    ] = None,
    user: User = None,
    target: Target = None,
    features: Features = None,
    test: Test = None,
    time: Time = None,
    test_fraction: Fraction = None,
    task: Task = None,
    exclude: Exclude = None,
    categorical: Categorical = None,
    text: Text = None,
    sep: Sep = None,
    encoding: Encoding = None,
    impute: Impute = None,
) -> None:
    """Before anything else: users, rows, features, scales, gaps, the task, trivial answers."""
    about_data = _about_data(locals())
    from flwr_ppsgd.lab.data import look as looking
    from flwr_ppsgd.lab.problem import Problem

    problem = Problem.of(about_data).found()
    raw = problem.per_user()
    _show(looking.report(raw, problem.as_by_default().per_user()))
    out = out or Path(f"{Path(data).stem}-standardise.csv")
    if looking.write_review(raw, out):
        _show(f"Written, to review: {out} (public numbers in it: --set standardise={out})")


@app.command()
def run(  # noqa: PLR0917 - typer's own way
    experiment: Annotated[
        Path | None,
        typer.Argument(
            help="A TOML file, or a name that `ppsgd experiments` lists; default: synthetic."
        ),
    ] = None,
    data: Data = None,
    settings: Set = None,
    rounds: Annotated[int | None, typer.Option(help="The number of rounds.")] = None,
    engine: Annotated[
        Engine,
        typer.Option(
            help="process: clients in this process. cohort: whole cohorts at once. flower: "
            "`flwr run`."
        ),
    ] = Engine.process,
    out: Annotated[
        Path | None, typer.Option(help="Output directory; default: a new one under runs/.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option(help="Show what was found in the data, every round, the statement.")
    ] = False,
    user: User = None,
    target: Target = None,
    features: Features = None,
    test: Test = None,
    time: Time = None,
    test_fraction: Fraction = None,
    task: Task = None,
    exclude: Exclude = None,
    categorical: Categorical = None,
    text: Text = None,
    sep: Sep = None,
    encoding: Encoding = None,
    impute: Impute = None,
    _: NoList = False,
) -> None:
    """Train once and write w, the measures, the privacy statement and a picture."""
    about_data = _about_data(locals())
    overrides = about_data | _overrides(settings or []) | _given({"rounds": rounds})
    from flwr_ppsgd.lab import screen
    from flwr_ppsgd.lab.experiment import Experiment
    from flwr_ppsgd.lab.outputs import check_free, free_directory, read_run

    chosen = Experiment.load(experiment, overrides)
    if out is None:
        out = free_directory(experiment.stem if experiment else Path(chosen.problem.data).stem)
    check_free(out)
    if not verbose:  # flwr sets the level of its log when it is imported
        logging.getLogger("flwr").setLevel(logging.WARNING)
    _show_lines(screen.data_lines(chosen))
    if verbose:
        _describe(chosen)
    stopped = _train(chosen, out, engine)
    saved = read_run(out)
    _show_lines(screen.outcome_lines(chosen, out, saved))
    if verbose:
        _show("\n".join(saved.statement))
        names = ", ".join(sorted(path.name for path in out.iterdir()))
        _show(f"Written: {out}/ ({names})")
    _show_lines(screen.next_lines(chosen, out), unbroken=True)
    if stopped:
        raise typer.Exit(INTERRUPTED)
    if not saved.rounds_trained:
        raise RuntimeError(
            "the budget max-epsilon pays for no round at all: raise it, or noise-multiplier"
        )


ABOUT_DATA = {  # a command's options about data, and the settings that they stand for
    "data": "data",
    "user": "user-column",
    "target": "target-column",
    "features": "feature-columns",
    "test": "test-column",
    "time": "time-column",
    "test_fraction": "test-fraction",
    "task": "task",
    "exclude": "exclude-columns",
    "categorical": "categorical-columns",
    "text": "text-columns",
    "sep": "separator",
    "encoding": "encoding",
    "impute": "impute",
}


def _about_data(typed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a command's options about data stand for."""
    return _given({key: typed[option] for option, key in ABOUT_DATA.items()})


def _describe(experiment: "Experiment") -> None:
    text = experiment.describe()
    if text:
        _show(text)


def _train(experiment: "Experiment", out: Path, engine: Engine) -> bool:
    """Write the output directory; whether the user has stopped the run."""
    if engine is Engine.flower:
        from flwr_ppsgd.lab import flwr_run
        from flwr_ppsgd.lab.results.figures import draw_run

        flwr_run.run(experiment, out)
        draw_run(out)
        return False
    from flwr_ppsgd.lab import run as running

    if engine is Engine.cohort:
        return _run_here(experiment, out, running.run_as_cohort)
    return _run_here(experiment, out, running.run)


def _run_here(
    experiment: "Experiment", out: Path, train: "Callable[[Experiment, Watch], Outcome]"
) -> bool:
    from flwr_ppsgd.lab.outputs import save
    from flwr_ppsgd.lab.results.figures import draw_run

    with progress_bar(transient=True) as progress:
        hook = progress_hook(progress, "training", experiment.training.rounds)
        outcome = train(experiment, hook)
    save(outcome, out, draw_run)
    return outcome.stopped


@app.command()
def sweep(  # noqa: PLR0917 - typer's own way
    experiment: Annotated[
        Path | None,
        typer.Argument(
            help="A TOML file in which some settings are lists, or a name that `ppsgd experiments` "
            "lists; default: sweep."
        ),
    ] = None,
    data: Data = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Output directory. Give the same one again to resume a sweep."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, or give a list."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="The number of blocks at a time; default: one for each core."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Limit, as in 8GB; default: half of what is free.")
    ] = None,
    extend: Annotated[
        bool,
        typer.Option(help="Widen the grid where a best setting is at its end, up to three times."),
    ] = False,
    user: User = None,
    target: Target = None,
    features: Features = None,
    test: Test = None,
    time: Time = None,
    test_fraction: Fraction = None,
    task: Task = None,
    exclude: Exclude = None,
    categorical: Categorical = None,
    text: Text = None,
    sep: Sep = None,
    encoding: Encoding = None,
    impute: Impute = None,
    _: NoList = False,
) -> None:
    """Train a whole grid of settings side by side. If it is interrupted, run the command again."""
    about_data = _about_data(locals())
    overrides = about_data | _overrides(settings or [])
    from flwr_ppsgd.lab.outputs import CONFIG, ROWS, RUNS, read_config, read_rows
    from flwr_ppsgd.lab.problem import SYNTHETIC
    from flwr_ppsgd.lab.results.summary import summarise
    from flwr_ppsgd.lab.rows import CAVEAT
    from flwr_ppsgd.lab.sweep import Sweep
    from flwr_ppsgd.lab.workers import run_sweep

    grid = Sweep.load(experiment, overrides)
    limit = _bytes(memory)
    if out is None:
        source = experiment or Path(data or "sweep")
        out = RUNS / source.stem
    if extend and (out / CONFIG).exists():
        grid = grid.united(read_config(out))
    _describe(grid.base)
    if grid.base.problem.data != SYNTHETIC and not grid.base.trivial():
        raise ValueError(
            f"{grid.base.problem.data}: there are no test rows, so settings cannot be compared: "
            "mark some, or add --test-fraction 0.2"
        )
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with progress_bar("setting-rounds") as progress:
            watch = SweepBar(progress, grid.base.training.rounds)
            run_sweep(grid, out, watch, memory=limit, jobs=jobs, extend=extend)
            found = summarise(read_rows(out))
            for _extension in range(MOST_EXTENSIONS if extend else 0):
                if not found.edges:
                    break
                grid = grid.extended(found.edges)
                run_sweep(grid, out, watch, memory=limit, jobs=jobs, extend=True)
                found = summarise(read_rows(out))
    except KeyboardInterrupt:
        console.print(
            f"Interrupted. Finished blocks are in {out}/: the same command goes on from there."
        )
        raise typer.Exit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    for line in found.edge_words():
        _show(line)
    _show(f"Rows: {out}/{ROWS}   Figures: ppsgd plot {out}")
    console.print(CAVEAT, highlight=False)
    _show(found.count())


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _bytes(size: str | None) -> int | None:
    """``8GB``, ``500MB`` or a number of bytes."""
    if size is None:
        return None
    found = re.fullmatch(r"([0-9.]+)\s*([KMGT]?B?)", size.strip().upper())
    try:
        return int(float(found[1]) * UNITS[found[2]]) if found else int(size)
    except (ValueError, KeyError):
        raise ValueError(f"--memory {size}: write it as 8GB or 500MB") from None


@app.command()
def plot(
    directory: Annotated[Path, typer.Argument(help="The directory of a sweep.")],
    kinds: Annotated[
        str, typer.Option("--format", metavar="pdf,png,svg", help="Formats of pictures.")
    ] = "png",
) -> None:
    """Draw the figures of a sweep, with their numbers as CSV, and print the best settings."""
    from flwr_ppsgd.checks import one_of
    from flwr_ppsgd.lab.outputs import finished_rows, read_config
    from flwr_ppsgd.lab.results.figures import PICTURE_FORMATS, draw_sweep

    formats = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    for kind in formats:
        one_of("--format", kind, PICTURE_FORMATS)
    read_config(directory)
    table, written = draw_sweep(finished_rows(directory), directory, formats)
    _show(table)
    _show(f"Written: {', '.join(str(path) for path in written)}")


@app.command("predict")
def predict_rows(
    directory: Annotated[Path, typer.Argument(help="The directory of a run.")],
    data: Annotated[Path, typer.Option("--data", metavar="FILE", help="New rows.")],
    user: User = None,
    out: Annotated[Path, typer.Option(help="Where predictions go.")] = Path("predictions.csv"),
) -> None:
    """Predict by personal models: of users who took part, or made for new ones with known rows."""
    from flwr_ppsgd.lab.outputs import write_predictions
    from flwr_ppsgd.lab.predict import predict

    if out.exists():
        raise ValueError(f"{out} is there already: choose another file with --out")
    found = predict(directory, data, user)
    write_predictions(out, found)
    counts: dict[str, int] = {}
    for one in found:
        counts[one.model] = counts.get(one.model, 0) + 1
    words = ", ".join(f"{count:,} {model}" for model, count in counts.items())
    _show(f"Written: {out} ({len(found):,} rows: {words}). For its users' eyes alone.")


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="The directory of a sweep or of a run.")],
) -> None:
    """Write one self-contained page: what was run, the guarantee, best settings, figures, rows."""
    from flwr_ppsgd.lab.results.page import write_report

    _show(f"Written: {write_report(directory)}")


@app.command()
def audit(
    experiment: Annotated[
        Path | None, typer.Argument(help="A TOML file; default: the synthetic problem.")
    ] = None,
    settings: Set = None,
    out: Annotated[
        Path | None, typer.Option(help="The picture to write; default: none is drawn.")
    ] = None,
) -> None:
    """Send canaries through a strategy and measure the noise that these settings really give."""
    from flwr_ppsgd import audit as auditing
    from flwr_ppsgd.lab.experiment import Experiment
    from flwr_ppsgd.server.strategy import PPSGD

    logging.getLogger("flwr").setLevel(logging.ERROR)  # withheld replies are part of it
    training = Experiment.load(experiment, _overrides(settings or [])).training
    flat = training.to_flat()
    for key in ("max-epsilon", "checkpoint-dir", "budget-dir", "enrolled"):
        flat.pop(key, None)
    release = training.release()
    found = auditing.audit(
        lambda: PPSGD.from_config(flat, release=release, max_epsilon=None), training.rounds
    )
    console.print(found.in_words(), highlight=False, markup=False)
    if out is not None:
        auditing.draw(found, out)
        console.print(f"Picture: {out}", highlight=False, soft_wrap=True)
    if found.verdict != "conforms":
        raise RuntimeError(f"the audit's verdict is {found.verdict}")


@app.command()
def plan(
    experiment: Annotated[
        Path | None, typer.Argument(help="A TOML file to take numbers from.")
    ] = None,
    *,
    population: Annotated[int | None, typer.Option(help="N, the number of enrolled users.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="q, a user's chance to take part in a round.")
    ] = None,
    cohort_size: Annotated[
        int | None, typer.Option(help="The exact number of users per round, instead of a rate.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="T, the number of rounds.")] = None,
    passes: Annotated[
        float | None, typer.Option(help="Passes over each user's samples, instead of rounds.")
    ] = None,
    samples_per_user: Annotated[
        float | None, typer.Option(help="The number of samples per user, for --passes.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="m, the number of samples a user draws per round.")
    ] = None,
    dimension: Annotated[
        int | None, typer.Option(help="d, the number of shared parameters.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ, well below 1/population.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="The ε that all rounds together may cost.")
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="z, instead of an ε or to compare.")
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="C; default: 1, the unit of length.")
    ] = None,
    gradient_std: Annotated[
        float | None, typer.Option(help="σ of one sample's gradient at the optimum.")
    ] = None,
    smoothness: Annotated[float | None, typer.Option(help="L; 2R² for the squared loss.")] = None,
    distance: Annotated[
        float | None, typer.Option(help="‖v‖, the length of the users' common optimum.")
    ] = None,
    spread: Annotated[
        float | None, typer.Option(help="How far the users' optima are from the common one.")
    ] = None,
    secure_honest: Annotated[
        int | None,
        typer.Option(help="h of a secure sum: the honest clients that stay in a round."),
    ] = None,
    secure_colluding: Annotated[
        int | None, typer.Option(help="t of a secure sum: the clients that may collude.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="Take N, d, n and L from users' rows."),
    ] = None,
    user: User = None,
    target: Target = None,
    features: Features = None,
    test: Test = None,
    time: Time = None,
    test_fraction: Fraction = None,
    task: Task = None,
    exclude: Exclude = None,
    categorical: Categorical = None,
    text: Text = None,
    sep: Sep = None,
    encoding: Encoding = None,
    impute: Impute = None,
) -> None:
    """Before training: what an ε buys. N, ε and δ are enough; options of the paper add its α."""
    typed = dict(locals())
    about_data = _about_data(typed)
    others = {"experiment", "as_json", *ABOUT_DATA}
    given = {name: value for name, value in typed.items() if name not in others}
    from flwr_ppsgd.lab import plan as planning
    from flwr_ppsgd.lab import recipe_plan

    flat = planning.gather(experiment, given)
    automatic = recipe_plan.is_asked(flat, given)
    if data is not None:
        flat = {**_seen_for_plan(about_data, automatic=automatic, quiet=as_json), **flat}
    ask = sys.stdin.isatty() and not as_json
    if automatic:
        if ask:
            flat = planning.ask(flat, typer.prompt, recipe_plan.missing)
        simple = recipe_plan.RecipeQuestion.read(flat)
        found = recipe_plan.make(simple)
        _show_plan(found.as_data(), recipe_plan.in_words(simple, found), as_json)
    else:
        if ask:
            flat = planning.ask(flat, typer.prompt)
        question = planning.Question.read(flat)
        made = planning.make(question)
        _show_plan(made.as_data(), planning.in_words(question, made), as_json)


def _show_plan(data: Mapping[str, Any], words: str, as_json: bool) -> None:
    _show(json.dumps(data, ensure_ascii=False, indent=2) if as_json else words)


def _seen_for_plan(
    about_data: Mapping[str, Any], *, automatic: bool, quiet: bool
) -> dict[str, Any]:
    """The numbers that a plan takes from users' rows, and a line on what that means."""
    from flwr_ppsgd.lab.data.features import LOOKED
    from flwr_ppsgd.lab.data.look import numbers_for_plan
    from flwr_ppsgd.lab.problem import Problem
    from flwr_ppsgd.lab.recipe_plan import SEEN

    seen = Problem.of(about_data).found().as_by_default().per_user()
    found = numbers_for_plan(seen)
    public = f"From {about_data['data']}: N = {found['population']:,} users"
    if not automatic:
        public += f" and d = {found['dimension']:,} parameters"
    public += ", taken to be public."
    looked = (
        f" n = {found['samples-per-user']:.3g} samples per user and "
        f"L = {found['smoothness']:.3g}: {LOOKED}."
    )
    if not quiet:
        _show(public if automatic else public + looked)
    if automatic:
        return {"task": seen.task, **{key: found[key] for key in SEEN}}
    return found


@app.command()
def ledger(
    directories: Annotated[
        list[Path],
        typer.Argument(help="Checkpoint directories, or directories of budgets."),
    ],
    add: Annotated[
        int | None,
        typer.Option(metavar="N", help="Add N charges that are known to have happened."),
    ] = None,
    reason: Annotated[str, typer.Option(help="How it is known: written into the store.")] = "",
    backup: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Copy to a new file, while a training runs too."),
    ] = None,
) -> None:
    """Show and check what was charged; with several directories, what they cost together."""
    from flwr_ppsgd.server import reports

    if (add is not None or backup is not None) and len(directories) != 1:
        rule = "--add and --backup need one directory"
        raise ValueError(f"{rule}, got {len(directories)}: name one of them")
    if add is not None:
        reports.add_charges(directories[0], add, reason)
    if backup is not None:
        reports.back_up(directories[0], backup)
    _show(reports.describe(directories))


@app.command()
def status(
    directory: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for monitoring.")] = False,
) -> None:
    """How a training does, while it runs too: rounds, ε, replies, the last error, the disk."""
    from flwr_ppsgd.server.reports import status_of, status_text

    found = status_of(directory)
    if as_json:
        _show(json.dumps(found, ensure_ascii=False, indent=2))
    else:
        _show(status_text(found))


@app.command()
def budget(
    directory: Annotated[Path, typer.Argument(help="Where the budget is kept.")],
    *,
    epsilon: Annotated[float, typer.Option(help="ε of all trainings of one population together.")],
    delta: Annotated[float, typer.Option(help="δ, below 1/population.")],
    everyone: Annotated[
        bool,
        typer.Option(help="Nobody is ever sampled (rate 1): the filter is then exact."),
    ] = False,
) -> None:
    """Fix one budget for several trainings, before the first; trainings join by budget-dir."""
    from flwr_ppsgd.server import reports
    from flwr_ppsgd.server.budget import new_budget

    new_budget(directory, epsilon, delta, "gaussian" if everyone else "rdp")
    _show(reports.describe([directory]))


@app.command("client-report")
def client_report(
    state_dir: Annotated[Path, typer.Argument(help="The node config's ppsgd-state-dir.")],
) -> None:
    """On a client: which runs it took part in, what left the machine, and what is promised."""
    from flwr_ppsgd.client import report

    _show(report.client_report(state_dir))


@app.command("check-node")
def check_node(
    address: Annotated[str, typer.Argument(help="HOST:PORT of the proxy, or of the SuperLink.")],
    *,
    root_certificates: Annotated[
        Path, typer.Option(help="The certificate authority that the SuperNode trusts.")
    ],
    key: Annotated[Path, typer.Option(help="The SuperNode's private key.")],
) -> None:
    """On a client: would the SuperLink let this SuperNode in? One line that says why not."""
    from flwr_ppsgd.client.check_node import check_connection

    _show(check_connection(address, root_certificates, key))


class SweepBar:
    """Settings × rounds, time left and the best measure so far.

    Args:
        progress: where to show it.
        rounds: the planned number of rounds.
    """

    def __init__(self, progress: Progress, rounds: int) -> None:
        self._progress = progress
        self._rounds = rounds
        self._sizes: list[int] = []
        self._done: dict[int, int] = {}
        self._best: dict[int, Best] = {}

    def begin(self, chosen: "Plan", missing: "Sequence[Sequence[Point]]") -> None:
        """The blocks that are going to be run."""
        self._progress.console.print(str(chosen), highlight=False, soft_wrap=True)
        self._sizes = [len(block) for block in missing]
        every = sum(len(block) for block in chosen.blocks)
        self._start = (every - sum(self._sizes)) * self._rounds
        total = every * self._rounds
        self._task = self._progress.add_task("sweep", total=total, completed=self._start, state="")

    def show(self, block: int, round_: int, best: "Best | None") -> None:
        """A block has come to this round."""
        from flwr_ppsgd.lab.block import best_among

        self._done[block] = self._sizes[block] * round_
        if best is not None:
            self._best[block] = best
        leading = best_among(list(self._best.values()))
        state = ""
        if leading is not None:
            measure, value = leading
            state = f"best now, of one seed: {measure} {value:.4g}"
        completed = self._start + sum(self._done.values())
        self._progress.update(self._task, completed=completed, state=state)


def progress_bar(unit: str = "rounds", *, transient: bool = False) -> Progress:
    """A bar with what is done, in this unit, and the time left.

    Args:
        unit: what is counted.
        transient: it is wiped away at the end, and only a terminal shows it.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} " + unit),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
        console=console,
        transient=transient,
        disable=transient and not console.is_terminal,
    )


def progress_hook(progress: Progress, label: str, rounds: int) -> "Watch":
    """A callback that shows the round, ε and the latest measures."""
    from flwr_ppsgd.statement import rounded_up

    task = progress.add_task(label, total=rounds, state="")

    def show(round_: int, result: "Result", ledger: "Ledger") -> None:
        spent = f"ε ≤ {rounded_up(ledger.quick_epsilon())}"
        if ledger.insecure_rounds:
            spent = "NO GUARANTEE"
        progress.update(task, completed=round_, state=f"{spent}  {_latest(result)}")

    return show


def _latest(result: "Result") -> str:
    """The first two measures of the last evaluation, in words."""
    evaluated = result.evaluate_metrics_clientapp
    if not evaluated:
        return ""
    measures = list(evaluated[max(evaluated)].items())
    return "  ".join(f"{name} {value:.4g}" for name, value in measures[:2])


def _overrides(settings: list[str]) -> dict[str, Any]:
    """``--set clip-norm=1.5`` as TOML values; a bare word is a string, ``inf`` is a number."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: write it as KEY=VALUE")
        values[key.strip()] = _value(value)
    return values


def _value(text: str) -> Any:
    """A TOML value. ``.2`` is a number to a person, though not to TOML."""
    text = re.sub(r"(?<![\w.])\.(?=\d)", "0.", text)
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return _plain(text)
    return parsed["value"] if list(parsed) == ["value"] else _plain(text)


def _plain(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def main() -> None:
    """Bad settings end in one line and exit status 2, work that could not be done in status 1."""
    try:
        sys.exit(app(standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError:  # the help is on the screen
        sys.exit(2)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "ppsgd"
        print(f"ppsgd: {error.format_message()} See {command} --help.", file=sys.stderr)
        sys.exit(2)
    except click.Abort:
        print("ppsgd: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"ppsgd: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)


if __name__ == "__main__":
    main()
