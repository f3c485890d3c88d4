from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

from tests.support.stock.numpy_client import get_weights
from tests.support.stock.task import Net


def server_fn(context: Context) -> ServerAppComponents:
    num_rounds = int(context.run_config["num-server-rounds"])
    parameters = ndarrays_to_parameters(get_weights(Net()))
    strategy = FedAvg(fraction_fit=1.0, initial_parameters=parameters)
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=num_rounds))


app = ServerApp(server_fn=server_fn)
