"""Per-user data: own files, federated EMNIST, Stack Overflow tags; one user of them as a learner.

A name is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from flwr_ppsgd.lazy_names import lazy_names

if TYPE_CHECKING:
    from flwr_ppsgd.lab.data.by_name import load
    from flwr_ppsgd.lab.data.columns import Columns
    from flwr_ppsgd.lab.data.emnist import femnist, tff_emnist
    from flwr_ppsgd.lab.data.files import public_statistics, read
    from flwr_ppsgd.lab.data.learners import linear_learner, network_learner
    from flwr_ppsgd.lab.data.npz import write_npz
    from flwr_ppsgd.lab.data.per_user import PerUser
    from flwr_ppsgd.lab.data.split import Split
    from flwr_ppsgd.lab.data.stackoverflow import stackoverflow_tags

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
    "Columns": "flwr_ppsgd.lab.data.columns",
    "PerUser": "flwr_ppsgd.lab.data.per_user",
    "Split": "flwr_ppsgd.lab.data.split",
    "femnist": "flwr_ppsgd.lab.data.emnist",
    "linear_learner": "flwr_ppsgd.lab.data.learners",
    "load": "flwr_ppsgd.lab.data.by_name",
    "network_learner": "flwr_ppsgd.lab.data.learners",
    "public_statistics": "flwr_ppsgd.lab.data.files",
    "read": "flwr_ppsgd.lab.data.files",
    "stackoverflow_tags": "flwr_ppsgd.lab.data.stackoverflow",
    "tff_emnist": "flwr_ppsgd.lab.data.emnist",
    "write_npz": "flwr_ppsgd.lab.data.npz",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
