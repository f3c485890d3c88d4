"""Per-user data: own files, federated EMNIST, Stack Overflow tags; one user of them as a learner."""

from flwr_ppsgd.data.columns import Columns
from flwr_ppsgd.data.emnist import femnist, tff_emnist
from flwr_ppsgd.data.files import public_statistics, read
from flwr_ppsgd.data.learners import linear_learner, network_learner
from flwr_ppsgd.data.load import load
from flwr_ppsgd.data.npz import write_npz
from flwr_ppsgd.data.per_user import PerUser
from flwr_ppsgd.data.raw import Split
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
