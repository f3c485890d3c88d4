"""The commands of the laboratory: parse options, call the laboratory, print.

Nothing heavy is imported before a command needs it, so that help and lists appear at once.
"""

import enum
import logging
import re
import signal
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flwr_ppsgd.cli import INTERRUPTED, show, typed_options

if TYPE_CHECKING:
    from flwr_ppsgd.lab.experiment import Experiment

MOST_EXTENSIONS = 3  # of a grid, in one command
UNITS = ["", "K", "M", "G", "T"]  # of bytes, each 1000 of the one before

SETTINGS = {  # keys of --set and of an experiment file, by topic
    "Training": "method population rate cohort-size cohort-mean rounds passes step alpha-q "
    "clip-norm total-batch average sparse replies batch-size",
    "Privacy": "epsilon delta noise-multiplier max-epsilon budget-dir insecure-seed secure-honest "
    "secure-colluding secure-failure secure-neighbours",
    "Data": "data data-checksum schema schema-checksum users min-train user-column target-column "
    "test-column time-column feature-columns exclude-columns categorical-columns text-columns "
    "encoding impute test-fraction task data-seed features",
    "Model": "model loss bias scale target-shift representation "
    "representation-features representation-seed",
    "Measuring": "evaluate-every evaluations select-on validation-fraction baselines "
    "fine-tune-steps drop-exhausted precision",
    "Server": "enrolled min-online wait-timeout round-timeout checkpoint-dir checkpoint-every",
}
DATA_KEYS = {  # the keys of options about a file
    "schema": "schema",
    "user": "user-column",
    "target": "target-column",
    "task": "task",
    "exclude": "exclude-columns",
    "categorical": "categorical-columns",
    "impute": "impute",
}
SETTINGS_HELP = "\n\n".join(
    ["Keys of --set, as in an experiment file:"]
    + [f"{topic}: {', '.join(keys.split())}." for topic, keys in SETTINGS.items()]
)

app = typer.Typer()


class EngineName(enum.StrEnum):
    """Where clients run."""

    process = "process"
    cohort = "cohort"
    flower = "flower"


SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated."),
]
FILES = "Users' rows: .csv, .parquet, .npz, TFF's .sqlite, flwrlabs/femnist."
DataOption = Annotated[str | None, typer.Option("--data", metavar="FILE", help=FILES)]
DeltaOption = Annotated[
    float | None,
    typer.Option(help="δ, well below 1 over the number of users; must be given with --data."),
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", help="Show what was found in the data, and the statement.")
]
# options for the most frequent keys about data
SchemaOption = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="What is public about the rows, from look --write."),
]
UserOption = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Names the user; default: user.")
]
TargetOption = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="What to predict; default: y.")
]
TaskOption = Annotated[
    str | None, typer.Option(metavar="TASK", help="classification, regression or multi-label.")
]
ExcludeOption = Annotated[
    str | None, typer.Option(metavar="A,B,…", help="Columns that are not used.")
]
CategoricalOption = Annotated[
    str | None, typer.Option(metavar="A,B,…", help="Columns of categories.")
]
ImputeOption = Annotated[
    str | None, typer.Option(metavar="RULE", help="For gaps: drop (the row), zero or own-mean.")
]


@app.command()
def experiments() -> None:
    """List the experiments that ship with this package."""
    from flwr_ppsgd.lab.presets import presets

    for name, what in presets().items():
        show(f"{name:24} {what}")


@app.command()
def look(  # noqa: PLR0917 - typer's own way
    data: Annotated[str, typer.Argument(metavar="FILE", help=FILES)],
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write down what a run takes to be public, to read and correct."
        ),
    ] = None,
    settings: SetOption = None,
    schema: SchemaOption = None,
    user: UserOption = None,
    target: TargetOption = None,
    task: TaskOption = None,
    exclude: ExcludeOption = None,
    categorical: CategoricalOption = None,
    impute: ImputeOption = None,
) -> None:
    """Before anything else: users, rows, features, scales, gaps, the task, trivial answers."""
    from flwr_ppsgd.lab import inspect as looking
    from flwr_ppsgd.lab.problem import AUTO_REPRESENTATION, Problem
    from flwr_ppsgd.lab.schema import OWN_MEAN, write_schema

    flat: dict[str, Any] = {"data": data}
    if not schema:
        flat |= {"impute": OWN_MEAN, "representation": AUTO_REPRESENTATION}
    flat |= _data_keys(schema=schema, user=user, target=target, task=task)
    flat |= _data_keys(exclude=exclude, categorical=categorical, impute=impute)
    problem = Problem.of(flat | _overrides(settings)).with_checksums()
    seen = problem.as_by_default()
    show(looking.data_report(problem.per_user(), seen.per_user()))
    if write is not None:
        write_schema(seen.written_schema(), write, Path(data).name)
        show(f"Written: {write}. Read it, correct it, then: --schema {write}")


@app.command(epilog=SETTINGS_HELP)
def run(  # noqa: PLR0917 - typer's own way
    experiment: Annotated[
        Path | None,
        typer.Argument(
            help="A TOML file, or a name that `ppsgd experiments` lists; default: synthetic."
        ),
    ] = None,
    data: DataOption = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="ε that everything together may cost; must be given with --data."),
    ] = None,
    delta: DeltaOption = None,
    rounds: Annotated[int | None, typer.Option(help="The number of rounds.")] = None,
    settings: SetOption = None,
    engine: Annotated[
        EngineName,
        typer.Option(
            help="process: secret noise, with the guarantee. cohort: faster, a simulation without "
            "any guarantee. flower: `flwr run`."
        ),
    ] = EngineName.process,
    out: Annotated[
        Path | None, typer.Option(help="Output directory; default: a new one under runs/.")
    ] = None,
    verbose: VerboseOption = False,
    schema: SchemaOption = None,
    user: UserOption = None,
    target: TargetOption = None,
    task: TaskOption = None,
    exclude: ExcludeOption = None,
    categorical: CategoricalOption = None,
    impute: ImputeOption = None,
) -> None:
    """Train once and write w, the measures, the privacy statement and a picture."""
    from flwr_ppsgd.lab import screen
    from flwr_ppsgd.lab.experiment import Experiment
    from flwr_ppsgd.lab.outputs import check_free, free_directory, read_run

    overrides = typed_options({"data": data})
    overrides |= _data_keys(schema=schema, user=user, target=target, task=task)
    overrides |= _data_keys(exclude=exclude, categorical=categorical, impute=impute)
    overrides |= _overrides(settings)
    overrides |= typed_options({"epsilon": epsilon, "delta": delta, "rounds": rounds})
    chosen = Experiment.load(experiment, overrides)
    if out is None:
        out = free_directory(experiment.stem if experiment else Path(chosen.problem.data).stem)
    check_free(out)
    if not verbose:  # flwr sets the level of its log when it is imported
        logging.getLogger("flwr").setLevel(logging.WARNING)
    screen.show_lines(screen.data_lines(chosen))
    if verbose:
        show(chosen.describe())
    stopped = _train_and_save(chosen, out, engine)
    saved = read_run(out)
    screen.show_lines(screen.outcome_lines(chosen, saved))
    if verbose:
        show("\n".join(saved.statement))
        names = ", ".join(sorted(path.name for path in out.iterdir()))
        show(f"Written: {out}/ ({names})")
    screen.show_lines(screen.next_lines(chosen, out), unbroken=True)
    if stopped:
        raise typer.Exit(INTERRUPTED)
    if not saved.rounds_trained:
        raise RuntimeError(
            "the budget max-epsilon pays for no round at all: raise it, or noise-multiplier"
        )


def _train_and_save(experiment: "Experiment", out: Path, engine: EngineName) -> bool:
    """Train, write the output directory, and return whether the user has stopped the run."""
    from flwr_ppsgd.lab import flwr_run, screen
    from flwr_ppsgd.lab import run as running
    from flwr_ppsgd.lab.outputs import save

    if engine is EngineName.flower:
        flwr_run.run_with_flower(experiment, out)
        return False
    train = running.run_as_cohort if engine is EngineName.cohort else running.run
    with screen.progress_bar(transient=True) as progress:
        hook = screen.progress_hook(progress, "training", experiment.training.rounds)
        outcome = train(experiment, hook)
    save(outcome, out)
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
    data: DataOption = None,
    delta: DeltaOption = None,
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
        typer.Option(
            "--extend", help="Widen the grid where a best setting is at its end, up to three times."
        ),
    ] = False,
    schema: SchemaOption = None,
    user: UserOption = None,
    target: TargetOption = None,
) -> None:
    """Train a whole grid of settings side by side. If it is interrupted, run the command again."""
    from flwr_ppsgd.lab.outputs import CONFIG, ROWS, RUNS, read_config, read_rows
    from flwr_ppsgd.lab.problem import SYNTHETIC
    from flwr_ppsgd.lab.screen import data_lines, progress_bar, show_lines, sweep_hook
    from flwr_ppsgd.lab.summary import summarise
    from flwr_ppsgd.lab.sweep import Sweep
    from flwr_ppsgd.lab.workers import run_sweep

    overrides = _data_keys(schema=schema, user=user, target=target) | _overrides(settings)
    grid = Sweep.load(experiment, overrides | typed_options({"data": data, "delta": delta}))
    limit = _memory_limit(memory)
    if out is None:
        name = "sweep" if data is None else f"{Path(data).stem}-sweep"
        out = RUNS / (name if experiment is None else experiment.stem)
    if extend and (out / CONFIG).exists():
        grid = grid.with_more_values(read_config(out))
    show_lines([*data_lines(grid.base), *(("", note) for note in grid.base.training_notes())])
    if grid.base.problem.data != SYNTHETIC and not grid.base.trivial():
        raise ValueError(
            f"{grid.base.problem.data}: there are no test rows, so settings cannot be compared: "
            "mark some, or add --set test-fraction=0.2"
        )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with progress_bar("setting-rounds") as progress:
            hook = sweep_hook(progress)
            run_sweep(grid, out, hook, memory=limit, jobs=jobs, extend=extend)
            found = summarise(read_rows(out))
            for _extension in range(MOST_EXTENSIONS if extend else 0):
                if found.edges.empty:
                    break
                beyond = found.edges.groupby("key")["beyond"].agg(list).to_dict()
                grid = grid.with_more_values(beyond)
                run_sweep(grid, out, hook, memory=limit, jobs=jobs, extend=True)
                found = summarise(read_rows(out))
    except KeyboardInterrupt:
        show(f"Interrupted. Finished blocks are in {out}/: the same command goes on from there.")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    show(found.text())
    delta = grid.base.training.delta
    show(f"Every ε is at δ = {delta:g}.   Rows: {out}/{ROWS}   Figures: ppsgd plot {out}")


def _memory_limit(size: str | None) -> int | None:
    """``8GB``, ``500MB`` or a number of bytes."""
    if size is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", size.strip().upper())
    if found is None:
        raise ValueError(f"--memory {size}: write it as 8GB or 500MB")
    unit: int = 1000 ** UNITS.index(found[2])
    return int(float(found[1]) * unit)


@app.command()
def plot(
    directory: Annotated[Path, typer.Argument(help="The directory of a sweep.")],
    kinds: Annotated[
        str, typer.Option("--format", metavar="pdf,png,svg", help="Formats of pictures.")
    ] = "png",
) -> None:
    """Draw the figures of a sweep, with their numbers as CSV, and print the best settings."""
    from flwr_ppsgd.checks import one_of
    from flwr_ppsgd.lab.figures import PICTURE_FORMATS, draw_sweep
    from flwr_ppsgd.lab.outputs import finished_rows, read_config

    formats = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    for kind in formats:
        one_of("--format", kind, PICTURE_FORMATS)
    config = read_config(directory)
    table, written = draw_sweep(finished_rows(directory), directory, formats)
    show(table)
    names = ", ".join(str(path) for path in written)
    show(f"Every ε is at δ = {config.get('delta')}.   Written: {names}")


@app.command("predict")
def predict_rows(
    directory: Annotated[Path, typer.Argument(help="The directory of a run.")],
    data: Annotated[Path, typer.Option("--data", metavar="FILE", help="New rows.")],
    out: Annotated[Path, typer.Option(help="Where predictions go.")] = Path("predictions.csv"),
    schema: SchemaOption = None,
    user: UserOption = None,
) -> None:
    """Predict by personal models: of users who took part, or made for new ones with known rows."""
    from flwr_ppsgd.database import PRIVATE_FILE
    from flwr_ppsgd.lab import disk
    from flwr_ppsgd.lab.predict import predict_file

    if out.exists():
        raise ValueError(f"{out} is there already: choose another file with --out")
    found = predict_file(directory, data, user, schema)
    text = found.to_csv(index=False, lineterminator="\n")
    disk.write_text(out, text, mode=PRIVATE_FILE)
    counts = found["model"].value_counts().items()
    words = ", ".join(f"{count:,} {model}" for model, count in counts)
    show(f"Written: {out} ({len(found):,} rows: {words}). For its users' eyes alone.")


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="The directory of a sweep or of a run.")],
) -> None:
    """Write one self-contained page: what was run, the guarantee, best settings, figures, rows."""
    from flwr_ppsgd.lab.html_report import write_report

    show(f"Written: {write_report(directory)}")


@app.command()
def audit(
    experiment: Annotated[
        Path | None, typer.Argument(help="A TOML file; default: the synthetic problem.")
    ] = None,
    settings: SetOption = None,
) -> None:
    """Send canaries through a strategy and measure the noise that these settings really give."""
    from flwr_ppsgd import audit as conformance
    from flwr_ppsgd.lab.experiment import Experiment
    from flwr_ppsgd.server.strategy import PPSGD

    logging.getLogger("flwr").setLevel(logging.ERROR)  # withheld replies are part of it
    training = Experiment.load(experiment, _overrides(settings)).training
    flat = training.to_flat()
    for key in ("max-epsilon", "checkpoint-dir", "budget-dir", "enrolled", "evaluate-every"):
        flat.pop(key, None)
    release = training.release()
    found = conformance.audit(
        lambda: PPSGD.from_config(flat, release=release, max_epsilon=None), training.rounds
    )
    show(found.in_words())
    if found.verdict != "conforms":
        raise RuntimeError(f"the audit's verdict is {found.verdict}")


def _data_keys(**options: str | None) -> dict[str, Any]:
    """The flat keys of options about a file."""
    return typed_options({DATA_KEYS[name]: value for name, value in options.items()})


def _overrides(settings: list[str] | None) -> dict[str, Any]:
    """``--set clip-norm=1.5`` as TOML values; a bare word is a string, ``inf`` is a number."""
    values: dict[str, Any] = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: write it as KEY=VALUE")
        values[key.strip()] = _toml_value(value)
    return values


def _toml_value(text: str) -> Any:
    """A TOML value, a number or a text; ``.2`` is a number too, although not in TOML."""
    text = re.sub(r"(?<![\w.])\.(?=\d)", "0.", text)
    try:
        parsed = tomllib.loads(f"value = {text}")
        if list(parsed) == ["value"]:
            return parsed["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return float(text)
    except ValueError:
        return text
