from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tests.support.stock.task import Net, load_data
from tests.support.stock.task import test as test_fn
from tests.support.stock.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
    partition_id = int(context.node_config["partition-id"])
    num_partitions = int(context.node_config["num-partitions"])
    trainloader, _ = load_data(partition_id, num_partitions, int(context.run_config["batch-size"]))
    train_loss = train_fn(model, trainloader, int(context.run_config["local-epochs"]), 0.1)
    metrics = MetricRecord({"train_loss": train_loss, "num-examples": len(trainloader.dataset)})  # type: ignore[arg-type]
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg
    )


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
    partition_id = int(context.node_config["partition-id"])
    num_partitions = int(context.node_config["num-partitions"])
    _, valloader = load_data(partition_id, num_partitions, int(context.run_config["batch-size"]))
    eval_loss, eval_acc = test_fn(model, valloader)
    count = len(valloader.dataset)  # type: ignore[arg-type]
    metrics = MetricRecord({"eval_loss": eval_loss, "eval_acc": eval_acc, "num-examples": count})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
