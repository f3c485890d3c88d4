"""The door to Flower's legacy API: ``PPSGDStrategy`` for the server, ``PPSGDClient`` for the nodes.

Each is loaded when it is first used: a client loads nothing of the server's.
"""

from typing import TYPE_CHECKING

from flwr_ppsgd.lazy_names import lazy_names

if TYPE_CHECKING:
    from flwr_ppsgd.client.app import PPSGDClient
    from flwr_ppsgd.server.legacy import PPSGDStrategy

__all__ = ["PPSGDClient", "PPSGDStrategy"]

_HOMES = {
    "PPSGDClient": "flwr_ppsgd.client.app",
    "PPSGDStrategy": "flwr_ppsgd.server.legacy",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
