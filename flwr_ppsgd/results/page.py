"""One self-contained page about a sweep or a run: what was run, the guarantee in words, figures, tables, rows.

Nothing here trains. The page holds its figures and its rows; it needs no network, no script and no font of its own.
"""

import base64
import csv
import decimal
import gzip
import html
import json
import math
import struct
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flwr_ppsgd.experiments.outputs import PLAN, ROWS, read_config, read_rows, replace_text
from flwr_ppsgd.experiments.sweep import CAVEAT, GRID, Row, is_last
from flwr_ppsgd.promise import OUTSIDE
from flwr_ppsgd.results.figures import draw_sweep

PAGE, METRICS, PRIVACY, PICTURE = "report.html", "metrics.jsonl", "privacy.json", "learning.png"
MOST_EMBEDDED = 8_000_000  # bytes of compressed rows that a page carries; beyond, it only names the file
CEILING = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING)  # ε is never shown smaller than it is
READABLE = 2.65  # pixels of a figure for each one of a small screen, below which its text cannot be read

NAMES = {
    "epsilon": "ε", "noise-multiplier": "noise z", "alpha-q": "αQ", "clip-norm": "clip norm C", "excess_risk":
    "excess risk", "precision_at_1": "precision@1", "rmse": "RMSE", "insecure-seed": "seed", "delta": "δ",
}  # fmt: skip
FIGURES = {
    "figure-1": "Figure 1. The measure against rounds: a panel for each noise multiplier z, a curve for each αQ with "
    "its best step at each round, ε along the top.",
    "figure-2": "Figure 2. The measure at the end of training against ε: local learning, global learning, each αQ "
    "between them with its best step, and in grey the best over αQ.",
    "learning": "The measure against rounds, ε along the top.",
}
TABLES = {"best": "The best setting for each noise level at the end of training, beside local and global learning"}


class Html(str):
    """Text that is already escaped."""

    __slots__ = ()


def tag(name: str, /, *inside: str, **attributes: str | int) -> Html:
    """An element. Whatever is not :class:`Html` is escaped; a trailing underscore in a name is dropped (``class_``)."""
    opened = "".join(f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(v))}"' for key, v in attributes.items())
    if name in ("img", "meta"):
        return Html(f"<{name}{opened}>")
    return Html(f"<{name}{opened}>{''.join(map(_escaped, inside))}</{name}>")


def _escaped(text: str) -> str:
    return text if isinstance(text, Html) else html.escape(text)


def write_report(directory: Path) -> Path:
    """``report.html`` in the directory of a sweep or of a run; it appears complete or not at all."""
    config = read_config(directory)
    is_run = (directory / PRIVACY).exists()
    parts = _about_run(directory, config) if is_run else _about_sweep(directory, config)
    title = f"{'Run' if is_run else 'Sweep'}: {directory.resolve().name}"
    replace_text(directory / PAGE, _page(title, [*parts, _settings(config)]))
    return directory / PAGE


def _about_sweep(directory: Path, config: Mapping[str, Any]) -> list[Html]:
    rows = read_rows(directory)
    if not rows:
        raise ValueError(f"{directory}: no setting is finished yet: run ppsgd sweep --out {directory}")
    with tempfile.TemporaryDirectory() as drawn:
        try:
            _, written = draw_sweep(rows, Path(drawn))
        except ValueError as error:
            raise ValueError(str(error).replace(drawn, str(directory))) from None
        except (KeyError, TypeError, StopIteration) as error:
            raise ValueError(f"{directory / ROWS}: not the rows of a sweep ({error!r}): restore the file") from None
        figures = [_figure(path) for path in written if path.suffix == ".png"]
        tables = [_csv_table(path) for path in written if path.suffix == ".csv"]
    return [
        _what_was_swept(directory, config, rows),
        _section("What is guaranteed", *_sweep_guarantee(config), class_="guarantee"),
        _section("Best settings", *tables),
        _section("Figures", *figures),
        _section("Rows", _link(directory / ROWS, f"{len(rows)} rows, one for each setting and evaluated round")),
    ]


def _what_was_swept(directory: Path, config: Mapping[str, Any], rows: Sequence[Row]) -> Html:
    last = max(row["round"] for row in rows)
    finished, diverged = sum(is_last(row, last) for row in rows), sum(bool(row.get("diverged")) for row in rows)
    planned = _planned(directory / PLAN, finished)
    grid = [f"{len(config[key])} of {_name(key)}" for key in GRID if isinstance(config.get(key), list)]
    lines = [f"{planned} settings of Personalized-Private-SGD", f": {', '.join(grid)}" if grid else "", ". "]
    lines += [_who(config), f", {last} rounds, δ = {_shown(config.get('delta'))}."]
    if finished < planned:
        lines.append(f" {finished} of them are finished; this page is about those.")
    if diverged:
        lines.append(f" {diverged} diverged and are left out.")
    return tag("p", "".join(lines), class_="lead")


def _planned(path: Path, finished: int) -> int:
    """How many settings the sweep was to run; where that is not known, those that did."""
    try:
        return sum(len(block) for block in json.loads(path.read_text(encoding="utf-8"))["blocks"])
    except (OSError, ValueError, KeyError, TypeError):
        return finished


def _who(config: Mapping[str, Any]) -> str:
    rate = config.get("rate", 1.0)
    drawn = "all" if rate == 1 else f"each with chance {_shown(rate)}"
    if "cohort-size" in config:
        drawn = f"exactly {config['cohort-size']}"
    data = Path(str(config.get("data", "unknown"))).name
    return f"Data: {data}. Users: {_shown(config.get('population'))}, {drawn} in each round"


def _sweep_guarantee(config: Mapping[str, Any]) -> list[Html]:
    """What ε would promise for one setting, and why nothing is promised here."""
    delta = _shown(config.get("delta"))
    paragraphs = [
        "NO GUARANTEE: this is a simulation. Its noise comes from a known seed and is summed in floating point; it "
        "protects nobody. ε tells what a deployment of the same setting would cost.",
        CAVEAT,
        f"A deployment would promise each user: everybody else together, even pooling their data and personal models, "
        f"learns no more about your data than (ε, {delta})-joint differential privacy allows. ε is for zero-out "
        "neighbours: a user contributes nothing instead. For replace-one neighbours, the paper's definition, it is "
        "larger; ppsgd plan tells by how much. Local learning (α = 0) publishes nothing: its ε is 0.",
    ]
    if "cohort-size" in config:
        paragraphs.append("Cohorts have a fixed size: no amplification by sampling is claimed.")
    paragraphs.append("The measures come from the users' own data. They are outside the guarantee.")
    return [*(tag("p", text) for text in paragraphs), *_outside()]


def _outside() -> list[Html]:
    return [tag("p", "What no ε covers:"), tag("ul", *(tag("li", text) for text in OUTSIDE))]


def _about_run(directory: Path, config: Mapping[str, Any]) -> list[Html]:
    trained, statement, rows = _read_run(directory)
    parts = [
        tag("p", f"{trained} rounds of Personalized-Private-SGD. {_who(config)}.", class_="lead"),
        _section("What is guaranteed", *(tag("p", line) for line in statement), class_="guarantee"),
    ]
    if (directory / PICTURE).exists():
        parts.append(_section("Figure", _figure(directory / PICTURE)))
    if rows:
        every = tag("details", tag("summary", "Every evaluated round"), _table(rows, "Every evaluated round"))
        parts += [
            _section("At the end", _table(rows[-1:], "The last evaluated round")),
            _section("Rows", every, _link(directory / METRICS, f"{len(rows)} rows, one for each evaluated round")),
        ]
    return parts


def _read_run(directory: Path) -> tuple[int, list[str], list[Row]]:
    """Rounds trained, the statement's lines, and the rows of measures."""
    try:
        privacy = json.loads((directory / PRIVACY).read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in (directory / METRICS).read_text(encoding="utf-8").splitlines()]
        shown = [{key: value for key, value in row.items() if key != "outside_the_guarantee"} for row in rows]
        return int(privacy["rounds_trained"]), privacy["statement"].splitlines(), shown
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory}: not the directory of a run ({error!r}): give the --out of ppsgd run") from None


def _section(heading: str, *inside: str, **attributes: str) -> Html:
    return tag("section", tag("h2", heading), *inside, **attributes)


def _figure(path: Path) -> Html:
    """A PNG inside the page. On a small screen it scrolls in its frame rather than shrink until nobody can read it."""
    data = path.read_bytes()
    if not data.startswith(b"\x89PNG") or len(data) < 24:
        raise ValueError(f"{path}: not a PNG picture: restore it, or remove it and the page goes without")
    width, height = struct.unpack(">II", data[16:24])
    text = FIGURES.get(path.stem, _name(path.stem))
    image = tag(
        "img", src=_data_url("image/png", data), alt=text, width=width, height=height,
        style=f"min-width:{round(width / READABLE)}px",
    )  # fmt: skip
    return tag("figure", _scrolling(image, text), tag("figcaption", text))


def _scrolling(inside: Html, label: str) -> Html:
    """A frame that can be scrolled sideways, by the keyboard too."""
    return tag("div", inside, class_="scroll", role="region", tabindex=0, aria_label=label)


def _csv_table(path: Path) -> Html:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    rows = [{key: _parsed(text) for key, text in row.items()} for row in csv.DictReader(lines)]
    return _table(rows, TABLES.get(path.stem, _name(path.stem)))


def _parsed(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _table(rows: Sequence[Mapping[str, Any]], caption: str) -> Html:
    """A column for each key, ε first."""
    if not rows:
        return tag("p", "There is nothing to compare yet.")
    keys = sorted(rows[0], key=lambda key: key != "epsilon")
    head = tag("tr", *(tag("th", _name(key), scope="col") for key in keys))
    body = [tag("tr", *(tag("td", _shown(row.get(key), key)) for key in keys)) for row in rows]
    table = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("figure", tag("figcaption", caption), _scrolling(table, caption))


def _settings(config: Mapping[str, Any]) -> Html:
    given = {key: value for key, value in config.items() if value != ""}
    rows = (tag("tr", tag("th", key, scope="row"), tag("td", _shown(value, key))) for key, value in given.items())
    table = _scrolling(tag("table", tag("tbody", *rows), class_="settings"), "Settings")
    return _section("What was run", tag("p", f"By flwr_ppsgd {version('flwr-ppsgd')}, with these settings:"), table)


def _link(path: Path, what: str) -> Html:
    """Rows beside the page, and a copy in it."""
    packed = gzip.compress(path.read_bytes(), mtime=0)
    beside = tag("a", path.name, href=path.name)
    if len(packed) > MOST_EMBEDDED:
        return tag("p", f"{what}: ", beside, " beside this page.")
    name, size = f"{path.name}.gz", math.ceil(len(packed) / 1000)
    inside = tag("a", name, href=_data_url("application/gzip", packed), download=name)
    return tag("p", f"{what}: ", beside, " beside this page, or ", inside, f" ({size} kB) from within.")


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _name(key: str) -> str:
    return NAMES.get(key, key.replace("-", " ").replace("_", " "))


def _shown(value: Any, key: str = "") -> str:
    """A value for a reader: four digits, ∞ and – as such, the two ends of αQ by name, ε rounded up."""
    if isinstance(value, list):
        return ", ".join(_shown(item, key) for item in value)
    if value is None or value == "":
        return "–"
    if value in ("infinite", math.inf):
        return "∞ (global)" if key == "alpha-q" else "∞"
    if not isinstance(value, float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if key == "alpha-q" and value == 0:
        return "0 (local)"
    return f"{CEILING.create_decimal_from_float(value) if key == 'epsilon' else value:.4g}"


def _page(title: str, parts: Iterable[str]) -> str:
    head = tag(
        "head", tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title), tag("style", Html(STYLE)),
    )  # fmt: skip
    body = tag("body", tag("main", tag("h1", title), *parts))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #5a5a5a; --page: #fff; --line: #d8d8d8; --warn: #b34700;
  --tint: #f6f6f4; --link: #005a9c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e6; --soft: #a8a8a4; --page: #181818; --line: #404040;
  --warn: #ff9d5c; --tint: #222220; --link: #7fbdf0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
p, ul { max-width: 44rem; }
a { color: var(--link); }
.lead { font-size: 1.1rem; }
.guarantee { border-left: .3rem solid var(--warn); background: var(--tint); padding: .1rem 1rem .6rem; }
.guarantee h2 { margin-top: .8rem; }
.guarantee p:first-of-type { font-weight: 600; }
.scroll { overflow-x: auto; }
figure { margin: .5rem 0 2rem; }
img { display: block; width: 100%; height: auto; background: #fff; }
figure img { max-width: fit-content; }
figcaption { color: var(--soft); font-size: .9rem; margin: .4rem 0; max-width: 44rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
thead th { border-bottom-width: 2px; white-space: nowrap; }
td { white-space: nowrap; }
.settings th, .settings td { text-align: left; white-space: normal; }
.settings th { font-weight: 400; color: var(--soft); white-space: nowrap; }
summary { cursor: pointer; }
@media print {
  :root { color-scheme: light; --ink: #000; --soft: #444; --page: #fff; --line: #bbb; --warn: #666; --tint: #fff;
    --link: #000; }
  @page { margin: 15mm; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  .scroll { overflow: visible; }
  img { min-width: 0 !important; max-height: 190mm; object-fit: contain; object-position: left; }
  figure, tr, .guarantee { break-inside: avoid; }
  h2 { break-after: avoid; }
  th, td { padding: .2rem .4rem; }
}
"""
