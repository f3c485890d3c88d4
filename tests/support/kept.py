"""What a node has kept, for tests that play the nodes."""

from pathlib import Path

from flwr.app import Context

from flwr_ppsgd.client.policy import owner_of
from flwr_ppsgd.client.theta import RUN, Theta
from flwr_ppsgd.client.theta_store import NAME, DiskStore, StateStore, Store


def kept_by(context: Context) -> Theta | None:
    """The newest θ in a node's directory, or else in its state; None if it never took part."""
    place = owner_of(context.node_config)
    if place is not None:
        run = context.run_config.get(RUN)
        return kept_in(*place, None if run is None else str(run))
    store: Store = StateStore(context)
    stamps = store.stamps()
    return store.load(stamps[0]) if stamps else None


def kept_in(root: Path, user: str, run: str | None = None) -> Theta | None:
    """The newest θ of a user on disk, in this run, or in the only one."""
    whole = all_kept_in(root, user, run)
    return whole[0] if whole else None


def all_kept_in(root: Path, user: str, run: str | None = None) -> list[Theta]:
    """Every whole θ of a user on disk, newest first."""
    if not list(root.glob(f"*/{NAME}")):
        return []
    store = DiskStore(root, user, run or "", read_only=True)
    if run is None:
        (only,) = store.runs()
        store = store.of_run(only)
    found = [store.load(stamp) for stamp in store.stamps()]
    store.close()
    return [theta for theta in found if theta is not None]
