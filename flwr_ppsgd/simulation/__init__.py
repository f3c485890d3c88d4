"""Running a Flower app in this process."""

from typing import TYPE_CHECKING

from flwr_ppsgd.door import opened

if TYPE_CHECKING:
    from flwr_ppsgd.simulation.grid import InProcessGrid

__all__ = ["InProcessGrid"]

_HOMES = {"InProcessGrid": "flwr_ppsgd.simulation.grid"}
__getattr__, __dir__ = opened(__name__, _HOMES)
