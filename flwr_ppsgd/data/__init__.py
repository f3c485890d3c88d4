"""Per-user data: own files, federated EMNIST, Stack Overflow tags; one user of them as a learner.

A name is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from flwr_ppsgd.door import opened

if TYPE_CHECKING:
    from flwr_ppsgd.data.by_name import load
    from flwr_ppsgd.data.columns import Columns
    from flwr_ppsgd.data.emnist import femnist, tff_emnist
    from flwr_ppsgd.data.files import public_statistics, read
    from flwr_ppsgd.data.learners import linear_learner, network_learner
    from flwr_ppsgd.data.npz import write_npz
    from flwr_ppsgd.data.per_user import PerUser
    from flwr_ppsgd.data.split import Split
    from flwr_ppsgd.data.stackoverflow import stackoverflow_tags

__all__ = [
    "Columns",
    "PerUser",
    "Split",
    "femnist",
    "linear_learner",
    "load",
    "network_learner",
    "public_statistics",
    "read",
    "stackoverflow_tags",
    "tff_emnist",
    "write_npz",
]

_HOMES = {
    "Columns": "flwr_ppsgd.data.columns",
    "PerUser": "flwr_ppsgd.data.per_user",
    "Split": "flwr_ppsgd.data.split",
    "femnist": "flwr_ppsgd.data.emnist",
    "linear_learner": "flwr_ppsgd.data.learners",
    "load": "flwr_ppsgd.data.by_name",
    "network_learner": "flwr_ppsgd.data.learners",
    "public_statistics": "flwr_ppsgd.data.files",
    "read": "flwr_ppsgd.data.files",
    "stackoverflow_tags": "flwr_ppsgd.data.stackoverflow",
    "tff_emnist": "flwr_ppsgd.data.emnist",
    "write_npz": "flwr_ppsgd.data.npz",
}
__getattr__, __dir__ = opened(__name__, _HOMES)
