"""One self-contained page about a sweep or a run: what was run, the guarantee, figures, rows.

Nothing here trains. The page holds its figures and its rows; it needs no network, no script and no
font of its own.
"""

import base64
import gzip
import html
import math
import struct
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flwr_ppsgd.lab.outputs import (
    METRICS,
    PICTURE,
    ROWS,
    finished_rows,
    is_run,
    planned_settings,
    read_config,
    read_run,
    read_selection,
    write_page,
)
from flwr_ppsgd.lab.results.figures import cost_words, draw_figures
from flwr_ppsgd.lab.results.summary import TRIVIAL_WORDS, Summary, summarise
from flwr_ppsgd.lab.rows import CAVEAT, GRID, RunRow, SweepRow
from flwr_ppsgd.statement import OUTSIDE, rounded_up

MOST_EMBEDDED = 8_000_000  # bytes of compressed rows in a page; beyond, it only names the file
READABLE = 2.65  # pixels of a figure per pixel of a small screen at which its text can be read
PNG = b"\x89PNG"
PNG_HEAD = 24  # bytes, of which the last 8 are width and height
EPSILONS = ("epsilon", "deployed_epsilon")
EMPTY_TAGS = ("img", "meta")
NAMES = {
    "epsilon": "ε guaranteed",
    "deployed_epsilon": "ε of a deployment",
    "noise-multiplier": "noise z",
    "alpha-q": "αQ",
    "clip-norm": "clip norm C",
    "excess_risk": "excess risk",
    "precision_at_1": "precision@1",
    "rmse": "RMSE",
    "insecure-seed": "seed",
    "delta": "δ",
}
FIGURES = {
    "figure-1": (
        "Figure 1. The measure against rounds: a panel for each noise multiplier z, a curve for "
        "each αQ with its best step at each round, ε along the top."
    ),
    "figure-2": (
        "Figure 2. The measure at the end of training against ε: local learning, global learning, "
        "each αQ between them with its best step, and in grey the best over αQ."
    ),
    "methods": (
        "Every method. The measure at the end of training against ε, each with its best setting; "
        "without noise, and without features."
    ),
    "users": (
        "Users. What each user gains against local learning, in the order of the gain: above 0 a "
        "user is better off than alone."
    ),
    "learning": "The measure against rounds, ε along the top.",
}
BEST_CAPTION = (
    "The best setting for each noise level at the end of training, beside local and global learning"
)
SIMULATED = (
    "NO GUARANTEE: this is a simulation. Its noise comes from a known seed and is summed in "
    "floating point; it protects nobody. ε says what a deployment of the same setting would cost."
)
WOULD_PROMISE = (
    "A deployment would promise each user: everybody else together, even pooling their data and "
    "personal models, learns no more about your data than (ε, {})-joint differential privacy "
    "allows. ε is for zero-out neighbours: a user contributes nothing instead. For replace-one "
    "neighbours, the paper's definition, it is larger; ppsgd plan prints by how much. Local "
    "learning (α = 0) publishes nothing: its ε is 0."
)
NOT_AMPLIFIED = "Cohorts have a fixed size: no amplification by sampling is claimed."
MEASURED = "The measures come from the users' own data. They are outside the guarantee."


class Html(str):
    """Text that is already escaped."""

    __slots__ = ()


def tag(name: str, /, *inside: str, **attributes: str | int) -> Html:
    """An element.

    Args:
        name: of the element.
        inside: what it holds; whatever is not :class:`Html` is escaped.
        attributes: a trailing underscore in a name is dropped (``class_``).
    """
    opening = name
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        opening += f' {attribute}="{html.escape(str(value))}"'
    if name in EMPTY_TAGS:
        return Html(f"<{opening}>")
    content = "".join(_escaped(text) for text in inside)
    return Html(f"<{opening}>{content}</{name}>")


def _escaped(text: str) -> str:
    return text if isinstance(text, Html) else html.escape(text)


def write_report(directory: Path) -> Path:
    """``report.html`` in the directory of a sweep or of a run."""
    config = read_config(directory)
    if is_run(directory):
        kind = "Run"
        parts = _about_run(directory, config)
    else:
        kind = "Sweep"
        parts = _about_sweep(directory, config)
    title = f"{kind}: {directory.resolve().name}"
    return write_page(directory, _page(title, [*parts, _settings(config)]))


def _about_sweep(directory: Path, config: Mapping[str, Any]) -> list[Html]:
    rows = finished_rows(directory)
    found = summarise(rows)
    with tempfile.TemporaryDirectory() as drawn:
        pictures = [path for path in draw_figures(found, Path(drawn)) if path.suffix == ".png"]
        figures = [_figure(path) for path in pictures]
    cells = [choice.cells() for choice in found.table]
    what = f"{len(rows)} rows, one for each setting and evaluated round"
    return [
        _what_was_swept(directory, config, rows),
        _section("What is guaranteed", *_sweep_guarantee(config), class_="guarantee"),
        _section("Best settings", _table(cells, BEST_CAPTION), *_remarks(directory, found)),
        _section("Figures", *figures),
        _section("Rows", _link(directory / ROWS, what)),
    ]


def _remarks(directory: Path, found: Summary) -> list[Html]:
    """On which rows settings were chosen, what lies at the end of the grid, what choosing costs."""
    lines = [
        "" if found.every else found.count(),
        found.chosen_on(),
        *found.edge_words(),
        *found.trivial_words(),
        *found.worse_words(),
        *(cost_words(cost) for cost in read_selection(directory)),
    ]
    return [tag("p", line) for line in lines if line]


def _what_was_swept(directory: Path, config: Mapping[str, Any], rows: Sequence[SweepRow]) -> Html:
    last = max(row.round for row in rows)
    settings = [row for row in rows if row.point.method not in TRIVIAL_WORDS]
    finished = sum(row.is_last(last) for row in settings)
    diverged = len({row.point for row in rows if row.diverged})
    planned = planned_settings(directory)
    if planned is None:
        planned = finished
    lists = [key for key in GRID if isinstance(config.get(key), list)]
    grid = ", ".join(f"{len(config[key])} of {_name(key)}" for key in lists)
    text = f"{planned} settings of Personalized-Private-SGD"
    text += f": {grid}. " if grid else ". "
    text += f"{_who(config)}, {last} rounds, δ = {_shown(config.get('delta'))}."
    if finished < planned:
        text += f" {finished} of them are finished; this page is about those."
    if diverged:
        text += f" {diverged} diverged and are left out."
    return tag("p", text, class_="lead")


def _who(config: Mapping[str, Any]) -> str:
    """Which data, how many users, and how a cohort is drawn."""
    rate = config.get("rate", 1.0)
    drawn = "all" if rate == 1 else f"each with chance {_shown(rate)}"
    if "cohort-size" in config:
        drawn = f"exactly {config['cohort-size']}"
    data = Path(str(config.get("data", "unknown"))).name
    return f"Data: {data}. Users: {_shown(config.get('population'))}, {drawn} in each round"


def _sweep_guarantee(config: Mapping[str, Any]) -> list[Html]:
    """What ε would promise for one setting, and why nothing is promised here."""
    delta = _shown(config.get("delta"))
    paragraphs = [SIMULATED, CAVEAT, WOULD_PROMISE.format(delta)]
    if "cohort-size" in config:
        paragraphs.append(NOT_AMPLIFIED)
    paragraphs.append(MEASURED)
    outside = [tag("li", text) for text in OUTSIDE]
    return [
        *[tag("p", text) for text in paragraphs],
        tag("p", "What no ε covers:"),
        tag("ul", *outside),
    ]


def _about_run(directory: Path, config: Mapping[str, Any]) -> list[Html]:
    run = read_run(directory)
    lead = f"{run.rounds_trained} rounds of Personalized-Private-SGD. {_who(config)}."
    statement = [tag("p", line) for line in run.statement]
    parts = [
        tag("p", lead, class_="lead"),
        _section("What is guaranteed", *statement, class_="guarantee"),
    ]
    if (directory / PICTURE).exists():
        parts.append(_section("Figure", _figure(directory / PICTURE)))
    if run.rows:
        cells = [_cells(row) for row in run.rows]
        parts.append(_section("At the end", _table(cells[-1:], "The last evaluated round")))
        caption = "Every evaluated round"
        every = tag("details", tag("summary", caption), _table(cells, caption))
        what = f"{len(cells)} rows, one for each evaluated round"
        parts.append(_section("Rows", every, _link(directory / METRICS, what)))
    return parts


def _cells(row: RunRow) -> dict[str, float]:
    own = {
        "round": row.round,
        "epsilon": row.epsilon,
        "deployed_epsilon": row.deployed_epsilon,
    }
    return {**row.measures, **own}


def _section(heading: str, *inside: str, **attributes: str) -> Html:
    return tag("section", tag("h2", heading), *inside, **attributes)


def _figure(path: Path) -> Html:
    """A PNG inside the page. On a small screen it scrolls in its frame and stays readable."""
    data = path.read_bytes()
    if not data.startswith(PNG) or len(data) < PNG_HEAD:
        raise ValueError(
            f"{path}: not a PNG picture: restore it, or remove it and the page goes without"
        )
    width, height = struct.unpack(">II", data[PNG_HEAD - 8 : PNG_HEAD])
    text = FIGURES.get(path.stem, _name(path.stem))
    image = tag(
        "img",
        src=_data_url("image/png", data),
        alt=text,
        width=width,
        height=height,
        style=f"min-width:{round(width / READABLE)}px",
    )
    return tag("figure", _scrolling(image, text), tag("figcaption", text))


def _scrolling(inside: Html, label: str) -> Html:
    """A frame that can be scrolled sideways, by the keyboard too."""
    return tag("div", inside, class_="scroll", role="region", tabindex=0, aria_label=label)


def _table(rows: Sequence[Mapping[str, Any]], caption: str) -> Html:
    """A column for each key, ε first."""
    if not rows:
        return tag("p", "There is nothing to compare yet.")
    keys = sorted(rows[0], key=lambda key: key not in EPSILONS)
    names = [tag("th", _name(key), scope="col") for key in keys]
    body = []
    for row in rows:
        cells = [tag("td", _shown(row.get(key), key)) for key in keys]
        body.append(tag("tr", *cells))
    table = tag("table", tag("thead", tag("tr", *names)), tag("tbody", *body))
    return tag("figure", tag("figcaption", caption), _scrolling(table, caption))


def _settings(config: Mapping[str, Any]) -> Html:
    rows = []
    for key, value in config.items():
        if value != "":
            cells = [tag("th", key, scope="row"), tag("td", _shown(value, key))]
            rows.append(tag("tr", *cells))
    table = tag("table", tag("tbody", *rows), class_="settings")
    by = f"By flwr_ppsgd {version('flwr-ppsgd')}, with these settings:"
    return _section("What was run", tag("p", by), _scrolling(table, "Settings"))


def _link(path: Path, what: str) -> Html:
    """Rows beside the page, and a copy in it."""
    packed = gzip.compress(path.read_bytes(), mtime=0)
    beside = tag("a", path.name, href=path.name)
    if len(packed) > MOST_EMBEDDED:
        return tag("p", f"{what}: ", beside, " beside this page.")
    name = f"{path.name}.gz"
    size = math.ceil(len(packed) / 1000)
    inside = tag("a", name, href=_data_url("application/gzip", packed), download=name)
    return tag(
        "p", f"{what}: ", beside, " beside this page, or ", inside, f" ({size} kB) from within."
    )


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _name(key: str) -> str:
    """A key for a reader."""
    return NAMES.get(key, key.replace("-", " ").replace("_", " "))


def _shown(value: Any, key: str = "") -> str:
    """A value for a reader: four digits, ∞ and – as such, the ends of αQ by name, ε rounded up."""
    if isinstance(value, list):
        return ", ".join(_shown(item, key) for item in value)
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return _shown_number(value, key)
    return str(value)


def _shown_number(value: float, key: str) -> str:
    if key == "alpha-q" and value == 0:
        return "0 (local)"
    if math.isinf(value):
        return "∞ (global)" if key == "alpha-q" else "∞"
    if key in EPSILONS:
        return rounded_up(value)
    return f"{value:.4g}"


def _page(title: str, parts: Iterable[str]) -> str:
    viewport = tag("meta", name="viewport", content="width=device-width, initial-scale=1")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        viewport,
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    body = tag("body", tag("main", tag("h1", title), *parts))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #5a5a5a; --page: #fff; --line: #d8d8d8;
  --warn: #b34700; --tint: #f6f6f4; --link: #005a9c; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e8e8e6; --soft: #a8a8a4; --page: #181818; --line: #404040;
  --warn: #ff9d5c; --tint: #222220; --link: #7fbdf0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
p, ul { max-width: 44rem; }
a { color: var(--link); }
.lead { font-size: 1.1rem; }
.guarantee { border-left: .3rem solid var(--warn); background: var(--tint);
  padding: .1rem 1rem .6rem; }
.guarantee h2 { margin-top: .8rem; }
.guarantee p:first-of-type { font-weight: 600; }
.scroll { overflow-x: auto; background:
  linear-gradient(to right, var(--page) 40%, transparent) left / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--page) 40%, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to right, var(--line), transparent) left / 1rem 100% no-repeat scroll,
  linear-gradient(to left, var(--line), transparent) right / 1rem 100% no-repeat scroll; }
.scroll:focus-visible { outline: .15rem solid var(--link); outline-offset: .15rem; }
figure { margin: .5rem 0 2rem; }
img { display: block; width: 100%; height: auto; background: #fff; }
figure img { max-width: fit-content; }
figcaption { color: var(--soft); font-size: .9rem; margin: .4rem 0; max-width: 44rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; }
thead th { border-bottom-width: 2px; white-space: nowrap; }
td { white-space: nowrap; }
.settings th, .settings td { text-align: left; white-space: normal; }
.settings th { font-weight: 400; color: var(--soft); white-space: nowrap; }
summary { cursor: pointer; }
@media print {
  :root { color-scheme: light; --ink: #000; --soft: #444; --page: #fff; --line: #bbb;
    --warn: #666; --tint: #fff; --link: #000; }
  @page { margin: 15mm; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  .scroll { overflow: visible; background: none; }
  thead th, td { white-space: normal; }
  img { min-width: 0 !important; max-height: 190mm; object-fit: contain; object-position: left; }
  figure, tr, .guarantee { break-inside: avoid; }
  h2 { break-after: avoid; }
  th, td { padding: .2rem .4rem; }
}
"""
