from collections import OrderedDict
from typing import Any

import torch
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import NDArrays, Scalar

from tests.support.stock.task import Net, load_data, test, train


class FlowerClient(NumPyClient):
    def __init__(self, net: torch.nn.Module, trainloader: Any, valloader: Any) -> None:
        self.net, self.trainloader, self.valloader = net, trainloader, valloader

    def fit(
        self,
        parameters: NDArrays,
        config: dict[str, Scalar],  # noqa: ARG002
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        set_weights(self.net, parameters)
        train(self.net, self.trainloader, 1, 0.1)
        return get_weights(self.net), len(self.trainloader.dataset), {}

    def evaluate(
        self,
        parameters: NDArrays,
        config: dict[str, Scalar],  # noqa: ARG002
    ) -> tuple[float, int, dict[str, Scalar]]:
        set_weights(self.net, parameters)
        loss, accuracy = test(self.net, self.valloader)
        return loss, len(self.valloader.dataset), {"accuracy": accuracy}


def get_weights(net: torch.nn.Module) -> NDArrays:
    return [value.cpu().numpy() for value in net.state_dict().values()]


def set_weights(net: torch.nn.Module, parameters: NDArrays) -> None:
    pairs = zip(net.state_dict(), parameters, strict=True)
    net.load_state_dict(OrderedDict({name: torch.tensor(value) for name, value in pairs}))


def client_fn(context: Context) -> Client:
    net = Net()
    partition_id, num_partitions = (
        int(context.node_config[k]) for k in ("partition-id", "num-partitions")
    )
    trainloader, valloader = load_data(
        partition_id, num_partitions, int(context.run_config["batch-size"])
    )
    return FlowerClient(net, trainloader, valloader).to_client()


app = ClientApp(client_fn)
