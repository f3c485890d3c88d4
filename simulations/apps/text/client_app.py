"""The client: word weights are shared, the head is personal and trained with Adam."""

import functools

import torch
from flwr.app import Context

from flwr_ppsgd import torch_client
from simulations.apps.text.task import Loader, TagNet, load_data

LEARNING_RATE = 0.05  # of the head


def loaders(context: Context) -> tuple[Loader, Loader]:
    """This node's texts."""
    user = int(context.node_config["partition-id"])
    return load_data(str(context.run_config["data"]), user)


app = torch_client(
    TagNet,
    "head.*",
    loaders,
    optimizer=functools.partial(torch.optim.Adam, lr=LEARNING_RATE),
    personal_steps=3,
    weight_decay=0.01,
)
