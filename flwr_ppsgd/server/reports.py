"""What ``ppsgd ledger`` and ``ppsgd status`` show, from stores and budgets on disk.

Nothing is locked or changed, so they may be asked at any time, while a training runs. ``ppsgd
ledger`` may be shared; what ``ppsgd status`` says about replies is for the server's operator alone.
"""

import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from flwr_ppsgd.checks import count as whole_number
from flwr_ppsgd.checks import require
from flwr_ppsgd.database import StoreError
from flwr_ppsgd.epsilon import Relation
from flwr_ppsgd.ledger import Ledger
from flwr_ppsgd.server import budget as budgets
from flwr_ppsgd.server.budget import Budget
from flwr_ppsgd.server.facts import counts_in_words, facts_in_words
from flwr_ppsgd.server.sealed import SealedRows
from flwr_ppsgd.server.store import LOCK, Store
from flwr_ppsgd.signature import KEY, TrainingKey
from flwr_ppsgd.statement import json_number, rounded_up, why_void

STATES = {
    True: "at work",
    False: "not at work, as far as this machine shows",
    None: "unknown whether it is at work",
}


# --- ppsgd ledger


def describe(directories: Sequence[Path]) -> str:
    """What the stores and budgets in these directories show, and whether anything is missing.

    StoreError if one is damaged or not there.

    Args:
        directories: checkpoint directories, and directories of budgets.
    """
    parts = []
    stores = []
    for directory in directories:
        if _has_budget(directory):
            parts.append(_budget_text(Budget(directory, read_only=True)))
            continue
        store = _read_store(directory)
        stores.append(store)
        parts.append(_training_text(directory, store))
    if len(stores) > 1:
        parts.append(_text_of_all(stores))
    return "\n\n".join(parts)


def add_charges(directory: Path, count: int, reason: str) -> None:
    """Write down charges that are known to have happened and that are not in a store or budget.

    Each counts as the most expensive release.

    Args:
        directory: where the training, or the budget, is. No training may be running there.
        count: the number of charges.
        reason: how it is known, for later readers.
    """
    whole_number("count", count)
    rule = "reason must be a text"
    require(bool(reason.strip()), rule, reason, "say how it is known that they happened")
    if _has_budget(directory):
        Budget(directory, repair=True).note("added", [count, reason])
        return
    Store.read(directory)
    store = Store(directory, repair=True)
    try:
        store.note("added", [count, reason])
        for _, place in store.notes("budget"):
            Budget(Path(place)).catch_up(store.owner, store.charges())
    finally:
        store.close()


def back_up(directory: Path, target: Path) -> None:
    """Copy a store or a budget to a new file, consistently, while trainings run."""
    found = Budget(directory, read_only=True) if _has_budget(directory) else Store.read(directory)
    found.backup(target)


def _has_budget(directory: Path) -> bool:
    return (directory / budgets.NAME).is_file()


def _read_store(directory: Path) -> Store:
    """A store; once more if it seems to lack what has been written since."""
    store = Store.read(directory)
    if _missing_rows(store):
        store = Store.read(directory)
    if store.setting("delta") is None:
        raise StoreError(f"{store.path} has no settings: no training has begun there")
    return store


def _missing_rows(rows: SealedRows) -> str:
    """What is known elsewhere and missing here, in one line; empty if nothing is."""
    try:
        rows.refuse_lost_rows()
    except StoreError as error:
        return str(error)
    return ""


def _training_text(directory: Path, store: Store) -> str:
    ledger = store.ledger(store.setting("delta"))
    starts = store.notes("start")
    before = ", ".join(map(str, starts)) or "none"
    planned, rounds = store.planned
    lines = [
        f"{directory}",
        f"training {store.owner}",
        *_lines_of_rows(store),
        f"planned: {planned} charges in {rounds} rounds",
        f"starts of the server: {len(starts)}, before rounds {before}",
        f"evaluation on client data: {'yes' if store.notes('evaluation') else 'no'}",
        f"insecure rounds: {ledger.insecure_rounds}",
        f"spent: {_epsilons(ledger)}",
    ]
    if planned > ledger.rounds:
        lines.append(f"planned: {_epsilons(_planned_ledger(store, ledger))}")
    key = directory / KEY
    if key.is_file():
        lines.append(f"clients may pin ppsgd-server-key = {TrainingKey(key.read_bytes()).public}")
    for _, place in store.notes("budget"):
        lines.append(f"under the budget in {place}, whose epsilon is the guarantee")
    try:
        found = store.load()
        whole = f"w of round {found.round} is whole" if found else "no w is saved"
    except StoreError as error:
        whole = str(error)
    lines.append(f"check: {whole}")
    return "\n  ".join(lines)


def _budget_text(budget: Budget) -> str:
    allowance = budget.allowance
    replace_one = rounded_up(allowance.epsilon_replace_one())
    order = f" at order {allowance.order:g}" if allowance.order else ""
    share = budget.cost_of_charges() / allowance.limit
    trainings = {training for training, _, _ in budget.tally}
    lines = [
        f"{budget.directory}",
        f"budget {budget.owner}: epsilon = {allowance.epsilon:g} (zero-out), {replace_one} "
        f"(replace-one) at delta = {allowance.delta:g}, for all trainings together",
        f"filter: {allowance.filter}{order}",
        f"trainings: {len(trainings)}",
        f"spent: {share:.2%} of the budget",
        *_lines_of_rows(budget),
    ]
    return "\n  ".join(lines)


def _lines_of_rows(rows: SealedRows) -> list[str]:
    """A line for each charge, kind of release and caveat, and whether any is missing."""
    lines = []
    counts: Counter[int] = Counter()
    for place, (round_, kind, insecure, training) in enumerate(rows.notes("charge"), 1):
        whose = "" if training == rows.owner else f", training {training}"
        how = ", insecure" if insecure else ""
        lines.append(f"charge {place}: round {round_}, release {kind + 1}{how}{whose}")
        counts[kind] += 1
    lines.append(f"charged: {rows.charge_count} releases")
    for kind, release in enumerate(rows.kinds):
        lines.append(f"  release {kind + 1}: {counts[kind]} x {release}")
    for times, reason in rows.notes("added"):
        lines.append(f"added by hand: {times} charges ({reason})")
    for caveat in rows.caveats:
        lines.append(f"caveat: {caveat}")
    known = rows.outside_record()
    lost = _missing_rows(rows)
    if lost:
        lines.append(f"check: MISSING: {lost}")
    elif known is None:
        lines.append("check: the record outside is missing")
    else:
        lines.append(f"check: the record outside shows {known.charges} charges, none is missing")
    return lines


def _text_of_all(stores: Sequence[Store]) -> str:
    """Several trainings of one population."""
    joined = {tuple(entry) for store in stores for entry in store.notes("budget")}
    if len(joined) == 1 and all(store.notes("budget") for store in stores):
        ((_, place),) = joined
        return (
            f"together: all are under the budget in {place}, which was fixed before them; its "
            "epsilon is the guarantee"
        )
    ledger = Ledger(min(store.setting("delta") for store in stores))
    for store in stores:
        for (release, insecure), times in store.charges().items():
            ledger = ledger.record(release, times, insecure=insecure)
    return (
        f"together, spent so far: {_epsilons(ledger)}\n  This is not a guarantee if trainings were "
        "chosen after seeing earlier ones. A guarantee for several trainings is a budget that is "
        "fixed before the first (budget_dir)."
    )


def _planned_ledger(store: Store, ledger: Ledger) -> Ledger:
    """The charges, and those that are planned."""
    planned, _ = store.planned
    return ledger.record(store.kinds[0], max(0, planned - ledger.rounds))


def _epsilons(ledger: Ledger) -> str:
    """ε under both kinds of neighbours, rounded up; infinite if nothing is guaranteed."""
    found = []
    for relation in get_args(Relation):
        epsilon = math.inf if ledger.insecure_rounds else ledger.epsilon(relation)
        found.append(f"{rounded_up(epsilon)} ({relation})")
    return f"epsilon = {', '.join(found)} at delta = {ledger.delta:g}"


# --- ppsgd status


def status_of(directory: Path) -> dict[str, Any]:
    """How the training in a checkpoint directory does, ready for JSON.

    StoreError if it is missing or damaged.
    """
    store = _read_store(directory)
    ledger = store.ledger(store.setting("delta"))
    spent = ledger.epsilon()
    stated = _planned_ledger(store, ledger)
    planned = stated.epsilon()
    why = why_void(stated, planned)
    known = store.outside_record()
    missing = known.charges - store.charge_count if known else 0
    facts = _summary_of_facts(store)
    done = [entry["round"] for entry in store.notes("checkpoint")[-1:]]
    if facts["last_round"] is not None:
        done.append(facts["last_round"]["round"])
    used = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # old ones may vanish meanwhile
            used += path.stat().st_size
    return {
        "directory": str(directory),
        "training": store.owner,
        "running": _is_locked(directory / LOCK),
        "rounds": {"done": max(done, default=0), "planned": store.planned[1]},
        "charges": {"made": store.charge_count, "missing": max(0, missing)},
        "lost": _missing_rows(store),
        "epsilon": {
            "spent": json_number(math.inf if why_void(ledger, spent) else spent),
            "planned": json_number(math.inf if why else planned),
            "delta": ledger.delta,
            "why_void": why,
            "budget_dir": "".join(place for _, place in store.notes("budget")),
        },
        **facts,
        "disk": {"used_bytes": used, "free_bytes": shutil.disk_usage(directory).free},
    }


def _summary_of_facts(store: Store) -> dict[str, Any]:
    """Replies of all rounds together, and the newest round, error and problem."""
    rounds = 0
    replies = 0
    zeros: Counter[str] = Counter()
    last: dict[str, Any] = {"last_round": None, "last_error": None, "last_problem": None}
    for at, fact in store.facts():
        if "used" in fact:
            rounds += 1
            replies += fact["used"]
            zeros.update(fact["zeros"])
            last["last_round"] = {"time": at, **fact}
        for what in ("error", "problem"):
            if what in fact:
                last[f"last_{what}"] = {"time": at, "text": fact[what]}
    return {"replies": {"rounds": rounds, "used": replies, "zeros": dict(zeros)}, **last}


def status_text(status: Mapping[str, Any]) -> str:
    """The same for people."""
    rounds = status["rounds"]
    epsilon = status["epsilon"]
    spent = _epsilon_in_words(epsilon["spent"])
    planned = _epsilon_in_words(epsilon["planned"])
    lines = [
        f"{status['directory']} (for the server's operator alone)",
        f"training {status['training']}: {STATES[status['running']]}",
        f"rounds: {rounds['done']} of {rounds['planned']} done",
        f"epsilon: {spent} spent, {planned} planned, at delta = {epsilon['delta']:g} (zero-out)",
    ]
    if epsilon["why_void"]:
        lines.append(f"NO GUARANTEE: {epsilon['why_void']}")
    if epsilon["budget_dir"]:
        place = epsilon["budget_dir"]
        lines.append(f"under the budget in {place}, whose epsilon is the guarantee")
    if status["lost"]:
        lines.append(f"MISSING: {status['lost']}")
    last = status["last_round"]
    replies = status["replies"]
    if last is None:
        lines.append("replies: none are noted")
    else:
        counts = counts_in_words(replies["used"], replies["zeros"])
        lines.append(f"replies in {replies['rounds']} rounds: {counts}")
        lines.append(f"last round: {facts_in_words(last)} ({_at(last['time'])})")
    for what in ("error", "problem"):
        found = status[f"last_{what}"]
        text = "none"
        if found is not None:
            text = f"{found['text']} ({_at(found['time'])})"
        lines.append(f"last {what}: {text}")
    used = status["disk"]["used_bytes"] / 1e6
    free = status["disk"]["free_bytes"] / 1e6
    lines.append(f"disk: {used:,.1f} MB used, {free:,.0f} MB free")
    return "\n  ".join(lines)


def _is_locked(path: Path) -> bool | None:
    """Whether a process that this machine shows holds the lock on a file, which is not touched.

    Known by the file's number alone: some file systems show another device here than there. None if
    the system does not say: only Linux has /proc/locks.
    """
    try:
        held = Path("/proc/locks").read_text(encoding="ascii").splitlines()
        number = str(path.stat().st_ino)
    except OSError:
        return None
    for line in held:
        lock = line.split()
        _, _, inode = lock[-3].rpartition(":")
        if "FLOCK" in lock and inode == number:
            return True
    return False


def _epsilon_in_words(epsilon: float | str) -> str:
    """ε as JSON has it, where infinity is a word."""
    return rounded_up(epsilon if isinstance(epsilon, float) else math.inf)


def _at(time: float) -> str:
    """A time for people, in UTC."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
