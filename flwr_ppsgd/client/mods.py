"""Flower's client mods beside our Orders: those that would spoil a gradient are kept away."""

from dataclasses import dataclass

from flwr.app import Context, Message
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable, Mod

from flwr_ppsgd.client.refusal import REFUSED_MESSAGE, RefusedError
from flwr_ppsgd.wire import ORDER


def guarded_mod(mod: Mod, serves_stock: bool) -> Mod:
    """The mod, kept away from gradients if it takes every reply for trained parameters."""
    is_local_dp = isinstance(mod, LocalDpMod)
    if not is_local_dp and mod not in (fixedclipping_mod, adaptiveclipping_mod):
        return mod
    name = "LocalDpMod" if is_local_dp else mod.__name__
    refusal = (
        f"mods={name} clips a reply as trained parameters, and a reply to PPSGD is a gradient, "
        f"which the server clips already: leave {name} out of mods"
    )
    if not serves_stock:
        raise ValueError(f"{refusal}, or set local_step to serve stock strategies too")
    return _StockOnly(mod, refusal)


@dataclass(frozen=True)
class _StockOnly:
    """A mod for messages without an Order."""

    mod: Mod
    refusal: str

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if ORDER in message.content:
            raise RefusedError(REFUSED_MESSAGE, self.refusal)
        return self.mod(message, context, call_next)
