"""The ``ppsgd`` command. Parses, calls, prints.

Here are the commands for a federation; those of the laboratory are in ``lab.commands``, which is
loaded when one of them is asked for. Nothing heavy is imported before a command needs it: help and
lists answer at once.
"""

import inspect
import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import click
import typer
from rich.console import Console
from typer.core import TyperArgument, TyperGroup
from typer.models import ArgumentInfo

LABORATORY = ("experiments", "look", "run", "sweep", "plot", "predict", "report", "audit")
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it
console = Console()


class Commands(TyperGroup):
    """The commands of a federation, and those of the laboratory, which are loaded on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, the laboratory's first."""
        return [*LABORATORY, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command, with the help texts of its arguments.

        click 8.5 has a help text for arguments itself, and sets it to nothing after typer 0.20 has
        set it. So it is taken once more from where it was written.
        """
        command = super().get_command(ctx, cmd_name)
        if cmd_name in LABORATORY:
            from flwr_ppsgd.lab import commands

            command = typer.main.get_group(commands.app).get_command(ctx, cmd_name)
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


def show(text: str) -> None:
    """Print text as it is, however wide the terminal."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def typed_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were typed."""
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
def plan(
    experiment: Annotated[
        Path | None, typer.Argument(help="A TOML file to take numbers from.")
    ] = None,
    *,
    population: Annotated[int | None, typer.Option(help="N, the number of enrolled users.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="The ε that everything together may cost.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ, well below 1/population.")] = None,
    dimension: Annotated[
        int | None, typer.Option(help="d, the number of shared parameters.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="q, a user's chance to take part in a round; default: everyone does."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="T, the number of rounds; default: by the recipe.")
    ] = None,
    secure_honest: Annotated[
        int | None,
        typer.Option(help="h of a secure sum: the honest clients that stay in a round."),
    ] = None,
    secure_colluding: Annotated[
        int | None, typer.Option(help="t of a secure sum: the clients that may collude.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Before training: the noise and rounds that an ε pays for, and what would change them."""
    typed = typed_options(locals())
    from flwr_ppsgd.plan import Plan
    from flwr_ppsgd.settings import override, read_toml, with_keys

    flat = {} if experiment is None else with_keys(read_toml(experiment))
    options = {key: value for key, value in typed.items() if key not in ("experiment", "as_json")}
    made = Plan.read(override(flat, with_keys(options)))
    if as_json:
        show(json.dumps(made.as_data(), ensure_ascii=False, indent=2))
    else:
        show(made.text())


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
    show(reports.describe(directories))


@app.command()
def status(
    directory: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for monitoring.")] = False,
) -> None:
    """How a training does, while it runs too: rounds, ε, replies, the last error, the disk."""
    from flwr_ppsgd.server.reports import status_of, status_text

    found = status_of(directory)
    if as_json:
        show(json.dumps(found, ensure_ascii=False, indent=2))
    else:
        show(status_text(found))


@app.command()
def budget(
    directory: Annotated[Path, typer.Argument(help="Where the budget is kept.")],
    *,
    epsilon: Annotated[float, typer.Option(help="ε of all trainings of one population together.")],
    delta: Annotated[float, typer.Option(help="δ, below 1/population.")],
    everyone: Annotated[
        bool,
        typer.Option(
            "--everyone", help="Nobody is ever sampled (rate 1): the filter is then exact."
        ),
    ] = False,
) -> None:
    """Fix one budget for several trainings, before the first; trainings join by budget-dir."""
    from flwr_ppsgd.server import reports
    from flwr_ppsgd.server.budget import new_budget

    new_budget(directory, epsilon, delta, "gaussian" if everyone else "rdp")
    show(reports.describe([directory]))


@app.command("client-report")
def client_report(
    state_dir: Annotated[Path, typer.Argument(help="The node config's ppsgd-state-dir.")],
) -> None:
    """On a client: which runs it took part in, what left the machine, and what is promised."""
    from flwr_ppsgd.client import report

    show(report.client_report(state_dir))


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

    show(check_connection(address, root_certificates, key))


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
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed"
        print(f"ppsgd: {missing}: pip install 'flwr-ppsgd[lab]'", file=sys.stderr)
        sys.exit(1)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"ppsgd: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)


if __name__ == "__main__":
    main()
