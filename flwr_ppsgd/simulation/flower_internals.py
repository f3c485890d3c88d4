"""The private names of Flower that an in-process grid needs, all in one place.

Outside a task that Flower started, a ``Message`` cannot be made until the task's identity is set,
and only a grid may give a message its id. Flower offers no public way to do either.
"""

from importlib.metadata import version

from flwr.app import Message

REMEDY = "install flwr==1.41.0, or use Flower's own simulation"

try:
    from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:  # pragma: no cover - depends on the installed Flower
    raise ImportError(
        f"InProcessGrid needs internals of Flower 1.41, which flwr {version('flwr')} has changed "
        f"({error}): {REMEDY}"
    ) from error

CLIENT_RAISED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION

__all__ = ["CLIENT_RAISED", "Run", "adopt_identity", "empty_run", "stamp"]


def adopt_identity(run_id: int) -> None:
    """Let this process make messages, unless Flower has already given it an identity."""
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id = run_id
        TaskIdentity.task_id = 1
        TaskIdentity.node_id = SUPERLINK_NODE_ID


def empty_run(run_id: int) -> Run:
    """A run that has an id and nothing else."""
    return Run.create_empty(run_id)


def stamp(message: Message, message_id: str) -> None:
    """Give a message its id, as a grid does when it sends one."""
    metadata = message.metadata.__dict__
    if "_message_id" not in metadata:
        raise RuntimeError(
            f"flwr {version('flwr')} does not keep message ids where flwr 1.41 does: {REMEDY}"
        )
    metadata["_message_id"] = message_id
