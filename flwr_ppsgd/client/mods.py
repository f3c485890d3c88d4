"""Flower's client mods beside our Orders: those that would spoil a gradient are kept away."""

from dataclasses import dataclass

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from flwr_ppsgd.client.refusal import RefusalCode, RefusedError
from flwr_ppsgd.flower_wrappers import MODS, flower_caller
from flwr_ppsgd.wire import ORDER


def guarded_mod(mod: Mod, serves_stock: bool) -> Mod:
    """The mod, kept away from gradients if it takes every reply for trained parameters."""
    name = _clipping_mod(mod)
    if name is None:
        return mod
    if not serves_stock:
        raise ValueError(f"{_refusal(name)}, or set local_step to serve stock strategies too")
    return _StockOnly(mod, _refusal(name))


def refuse_clipping_mods() -> None:
    """RefusedError if a gradient would go through a mod that takes it for trained parameters."""
    name = flower_caller(MODS)
    if name is not None:
        raise RefusedError(RefusalCode.REFUSED_MESSAGE, _refusal(name))


@dataclass(frozen=True)
class _StockOnly:
    """A mod for messages without an Order."""

    mod: Mod
    refusal: str

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if ORDER in message.content:
            raise RefusedError(RefusalCode.REFUSED_MESSAGE, self.refusal)
        return self.mod(message, context, call_next)


def _clipping_mod(mod: Mod) -> str | None:
    """The name of a mod of Flower's that clips parameters, of either API; None for any other."""
    for each in (mod, *type(mod).__mro__):
        name = getattr(each, "__name__", "")
        if name in MODS and str(each.__module__).startswith("flwr."):
            return name
    return None


def _refusal(name: str) -> str:
    return (
        f"mods={name} clips a reply as trained parameters, and a reply to PPSGD is a gradient, "
        f"which the server clips already: leave {name} out of mods"
    )
