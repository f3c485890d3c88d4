"""What a device's store says, in words, for whoever runs it."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr_ppsgd.client.account import FOR_NOISE, Account, epsilon_of
from flwr_ppsgd.client.refusal import DiskError, RefusedError
from flwr_ppsgd.client.theta_store import ACCOUNT, DiskStore, users_in
from flwr_ppsgd.wire import GRADIENT, MASKED

LONGEST_SHOWN = 1000  # characters of a text that a server or a mod chose
Line = Mapping[str, Any]


def client_report(state_dir: Path) -> str:
    """In words: which runs this machine took part in, what left it, and what is promised."""
    users = users_in(state_dir)
    if not users:
        raise ValueError(
            f"{state_dir} holds no θ of any run: give the directory that ppsgd-state-dir names"
        )
    return "\n\n".join(_about_user(state_dir, user) for user in users)


def _about_user(state_dir: Path, user: str) -> str:
    try:
        store = DiskStore(state_dir, user, read_only=True)
        parts = [_about_run(store.of_run(run)) for run in store.runs()]
        parts.append(_about_account(user, Account(**(store.fact(ACCOUNT) or {}))))
        store.close()
    except (RefusedError, DiskError) as error:
        parts = [f"User {user!r}\n  {_plain(str(error))}"]
    return "\n\n".join(parts)


def _about_run(store: DiskStore) -> str:
    lines = [f"Run {store.run!r}, user {store.user!r}"]
    stamps = store.stamps()
    damaged = [stamp for stamp in stamps if store.load(stamp) is None]
    if not stamps:
        lines.append("  no save of θ")
    else:
        newest = stamps[0]
        lines.append(f"  took part in {newest.visit} rounds; the last one was round {newest.round}")
        lines.append(f"  stays here: θ, in files that only you can read, in {store.directory}")
    lines += [f"  damaged: θ of round {stamp.round}" for stamp in damaged]
    lost = {stamp.training for stamp in stamps} - {
        stamp.training for stamp in stamps if stamp not in damaged
    }
    lines += [f"  no whole one of training {training:016x} is left" for training in sorted(lost)]
    lines += _left(store.notes(store.run))
    lines.append(f"  promised: {_plain(_promise(store))}")
    return "\n".join(lines)


def _left(lines: list[dict[str, Any]]) -> list[str]:
    sizes: Counter[str] = Counter()
    for line in lines:
        sizes.update(line["bytes"])
    replies = [line for line in lines if line["kind"] != "query"]
    runs = {line["run"] for line in lines}
    named = ", ".join(f"{size:,} bytes of {_plain(name)}" for name, size in sizes.items())
    return [
        f"  has left: {named or 'nothing'}; {len(replies)} replies in {len(runs)} Flower runs",
        *_about_gradients(lines, set(sizes)),
        *_about_masked(lines),
        *_about_evaluations(lines),
        *_about_errors(lines),
    ]


def _about_gradients(lines: list[dict[str, Any]], records: set[str]) -> list[str]:
    gradients = [line for line in lines if line["norm"] is not None]
    if not gradients:
        return []
    only = "nothing but the clipped gradient"
    if records != {GRADIENT}:
        only = "the clipped gradient, and more"
    last = gradients[-1]
    largest = max(line["norm"] for line in gradients)
    return [
        f"  that is {only}; its norm was {last['norm']:.4g} the last time, {largest:.4g} at most, "
        f"clipped to {last['clip_norm']:g}"
    ]


def _about_masked(lines: list[dict[str, Any]]) -> list[str]:
    masked = [line for line in lines if MASKED in line["bytes"]]
    if not masked:
        return []
    return [
        f"  masked vectors: {len(masked)}; each hides a gradient that was bounded and had noise "
        "added here, and shows nothing until it is summed with others'"
    ]


def _about_evaluations(lines: list[dict[str, Any]]) -> list[str]:
    answered = [line for line in lines if line["kind"] == "evaluate" and not line["code"]]
    if not answered:
        return []
    return [f"  evaluations answered: {len(answered)}, outside the guarantee"]


def _about_errors(lines: list[dict[str, Any]]) -> list[str]:
    """How often each kind of error was the reply, refusals included."""
    codes = Counter(_plain(line["code"]) for line in lines if line["code"])
    if not codes:
        return []
    parts = ", ".join(f"{code} ({count})" for code, count in sorted(codes.items()))
    return [f"  refused or failed, and the server was told only so: {parts}"]


def _promise(store: DiskStore) -> str:
    try:
        return store.shared().promise or "nothing: the server stated no guarantee"
    except ValueError as error:
        return f"unknown: {error}"


# --- the device's own account


def _about_account(user: str, account: Account) -> str:
    lines = [f"Own account of user {user!r}, over all servers and trainings"]
    promised = sum(account.promised.values())
    if account.promised:
        lines.append(
            f"  by the servers' word: ε at most {promised:.4g} over {len(account.promised)} "
            "trainings"
        )
    if account.spent and not account.delta:
        lines.append("  set ppsgd-delta in the node config to have ε of these answers here")
    elif account.spent:
        lines += _epsilons(account)
    if account.unpriced:
        lines.append(
            f"  {account.unpriced} answers are outside every ε: evaluations, stock strategies, or "
            "no stated noise"
        )
    if account.limit:
        lines.append(
            f"  limit: ε {account.limit:g} at δ {account.delta:g}, the largest that was ever set; "
            "a store restored from a backup forgets"
        )
    for key, spent in account.by_key.items():
        lines.append(
            f"  of it for {_plain(key) or 'servers without a key'}: {_share(spent, account)}"
        )
    return "\n".join(lines)


def _epsilons(account: Account) -> list[str]:
    """What a device can know, with its numbers."""
    kind = "spent so far" if not account.limit else "spent"
    total = _epsilon(account.spent, account)
    lines = []
    if account.trusted:
        lines.append(
            f"  {kind}: ε {total} at δ {account.delta:g}, if each server adds the noise that it "
            "stated; this device has enforced its bound and its count"
        )
    if account.secure:
        lines.append(
            f"  {kind} in secure sums: ε {_epsilon(account.secure, account)}, if h of those "
            "summed, this device included, add their noise, at most t collude, and the server "
            f"relays keys and survivors honestly; ε {_epsilon(account.alone, account)}, if "
            "nobody but this device is trusted"
        )
    return lines


def _epsilon(spent: float, account: Account) -> str:
    """Rounded up."""
    epsilon = epsilon_of(math.sqrt(spent), FOR_NOISE * account.delta)
    return f"{math.ceil(1000 * epsilon) / 1000:g}" if math.isfinite(epsilon) else "infinite"


def _share(spent: float, account: Account) -> str:
    return f"{spent / account.spent:.0%}" if account.spent else "nothing"


def _plain(text: str) -> str:
    """A text without control characters, which could rewrite what a terminal shows."""
    shown = "".join(letter if letter.isprintable() else "�" for letter in text)
    return shown[:LONGEST_SHOWN]
