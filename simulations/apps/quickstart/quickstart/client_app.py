"""The client: it answers PPSGD and every strategy of Flower's."""

from flwr.app import Context

from flwr_ppsgd import torch_client
from quickstart.task import Loader, Net, from_file, synthetic


def loaders(context: Context) -> tuple[Loader, Loader]:
    """The node's own rows: its file in a deployment, its partition in a simulation."""
    node = context.node_config
    if "data-path" in node:
        return from_file(str(node["data-path"]))
    return synthetic(int(node["partition-id"]))


app = torch_client(Net, "head.*", loaders, additive=True, local_step=0.1)
