"""Running it here: a grid in this process, experiments."""

from flwr_ppsgd.simulation.grid import InProcessGrid

__all__ = ["InProcessGrid"]
