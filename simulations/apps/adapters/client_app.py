"""The client: the adapter is shared, the head is personal, the backbone is frozen."""

import functools

import torch
from flwr.app import Context

from flwr_ppsgd import torch_client
from simulations.apps.adapters.task import Loader, adapted, load_data, whole


def loaders(context: Context) -> tuple[Loader, Loader]:
    """This node's pictures."""
    return load_data(int(context.node_config["partition-id"]))


client = functools.partial(
    torch_client,
    personal="head.*",
    loaders=loaders,
    optimizer=functools.partial(torch.optim.Adam, lr=0.05),
    personal_steps=2,
    weight_decay=0.02,
)
app = client(adapted)
app_sharing_all = client(whole)
