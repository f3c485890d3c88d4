"""What a node has kept, for tests that play the nodes."""

from flwr.app import Context

from flwr_ppsgd.client import personal
from flwr_ppsgd.client.personal import Personal, training_in
from flwr_ppsgd.client.shelf import RUN, Shelf, owner_of


def kept_by(context: Context) -> Personal | None:
    """The newest θ in a node's directory, or else in its state; None if it never took part."""
    place = owner_of(context)
    training = training_in(context)
    shelf = None
    if place is not None:
        run = context.run_config.get(RUN)
        shelf = Shelf.of(context, training) if training or run else Shelf.only(*place)
    return personal._last(context, shelf)
