"""What a device's store says, in words, for its owner."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from flwr.app import MessageType

from flwr_ppsgd.checks import printable
from flwr_ppsgd.client.account import FOR_NOISE, DeviceAccount, epsilon_of
from flwr_ppsgd.client.refusal import RefusedError
from flwr_ppsgd.client.theta_store import ACCOUNT, DiskStore, users_in
from flwr_ppsgd.wire import GRADIENT, MASKED

LONGEST_SHOWN = 1000  # characters of a text that a server or a mod chose


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
        account = DeviceAccount(**store.facts().get(ACCOUNT, {}))
        parts = [_run_report(store.of_run(run)) for run in store.runs()]
        parts.append(_about_account(user, account))
        store.close()
    except RefusedError as error:
        parts = [f"User {user!r}\n  {printable(error, LONGEST_SHOWN)}"]
    return "\n\n".join(parts)


def _run_report(store: DiskStore) -> str:
    lines = [f"Run {store.run!r}, user {store.user!r}"]
    stamps = store.stamps()
    if stamps:
        newest = stamps[0]
        lines.append(f"  took part in {newest.visit} rounds; the last one was round {newest.round}")
        lines.append(f"  stays here: θ, in files that only you can read, in {store.directory}")
    else:
        lines.append("  no save of θ")
    damaged = [stamp for stamp in stamps if store.load(stamp) is None]
    whole = {stamp.training for stamp in stamps if stamp not in damaged}
    lines += [f"  damaged: θ of round {stamp.round}" for stamp in damaged]
    lost = sorted({stamp.training for stamp in stamps} - whole)
    lines += [f"  no whole one of training {training:016x} is left" for training in lost]
    lines += _what_left(store.notes(store.run))
    try:
        _, promise = store.last_shared()
        promise = promise or "nothing: the server stated no guarantee"
    except ValueError as error:
        promise = f"unknown: {error}"
    lines.append(f"  promised: {printable(promise, LONGEST_SHOWN)}")
    return "\n".join(lines)


def _what_left(notes: list[dict[str, Any]]) -> list[str]:
    sizes: Counter[str] = Counter()
    for note in notes:
        sizes.update(note["bytes"])
    named = [f"{size:,} bytes of {printable(name, LONGEST_SHOWN)}" for name, size in sizes.items()]
    left = ", ".join(named) or "nothing"
    replies = len([note for note in notes if note["kind"] != MessageType.QUERY])
    runs = {note["run"] for note in notes}
    lines = [f"  has left: {left}; {replies} replies in {len(runs)} Flower runs"]
    gradients = [note for note in notes if note["norm"] is not None]
    if gradients:
        alone = set(sizes) == {GRADIENT}
        only = "nothing but the clipped gradient" if alone else "the clipped gradient, and more"
        last = gradients[-1]
        largest = max(note["norm"] for note in gradients)
        lines.append(
            f"  that is {only}; its norm was {last['norm']:.4g} the last time, "
            f"{largest:.4g} at most, clipped to {last['clip_norm']:g}"
        )
    masked = len([note for note in notes if MASKED in note["bytes"]])
    if masked:
        lines.append(
            f"  masked vectors: {masked}; each hides a gradient that was bounded and had "
            "noise added here, and shows nothing until it is summed with others'"
        )
    evaluated = [
        note for note in notes if note["kind"] == MessageType.EVALUATE and not note["code"]
    ]
    if evaluated:
        lines.append(f"  evaluations answered: {len(evaluated)}, outside the guarantee")
    codes = Counter(printable(note["code"], LONGEST_SHOWN) for note in notes if note["code"])
    if codes:
        counted = ", ".join(f"{code} ({count})" for code, count in sorted(codes.items()))
        lines.append(f"  refused or failed, and the server was told only so: {counted}")
    return lines


def _about_account(user: str, account: DeviceAccount) -> str:
    """What a device can know, with its numbers."""
    lines = [f"Own account of user {user!r}, over all servers and trainings"]
    if account.promised:
        lines.append(
            f"  by the servers' word: ε at most {sum(account.promised.values()):.4g} over "
            f"{len(account.promised)} trainings"
        )
    spent = "spent" if account.limit else "spent so far"
    if account.mu_squared and not account.delta:
        lines.append("  set ppsgd-delta in the node config to have ε of these answers here")
    elif account.trusted:
        lines.append(
            f"  {spent}: ε {_epsilon(account.mu_squared, account)} at δ {account.delta:g}, if each "
            "server adds the noise that it stated; this device has enforced its bound and its count"
        )
    if account.secure and account.delta:
        lines.append(
            f"  {spent} in secure sums: ε {_epsilon(account.secure, account)}, if h of those "
            "summed, this device included, add their noise, at most t collude, and the server "
            f"relays keys and survivors honestly; ε {_epsilon(account.alone, account)}, if "
            "nobody but this device is trusted"
        )
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
    for key, part in account.by_key.items():
        server = printable(key, LONGEST_SHOWN) or "servers without a key"
        lines.append(f"  of it for {server}: {part / account.mu_squared:.0%}")
    return "\n".join(lines)


def _epsilon(spent: float, account: DeviceAccount) -> str:
    """Rounded up."""
    epsilon = epsilon_of(math.sqrt(spent), FOR_NOISE * account.delta)
    return f"{math.ceil(1000 * epsilon) / 1000:g}" if math.isfinite(epsilon) else "infinite"
