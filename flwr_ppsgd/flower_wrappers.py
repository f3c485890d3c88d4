"""Flower's DP strategies, mods and secure aggregation around our code, found among the callers.

A strategy that is wrapped, and a client behind a mod, do not learn it from Flower. What is running
above them on the stack tells.
"""

import sys

STRATEGIES = ("DifferentialPrivacy", "DPFedAvg")
WORKFLOWS = ("SecAgg",)
MODS = ("LocalDpMod", "fixedclipping_mod", "adaptiveclipping_mod")


def flower_caller(names: tuple[str, ...]) -> str | None:
    """The outermost running function or class of Flower's whose name begins so; None without."""
    found = None
    frame = sys._getframe(1).f_back
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        owner, _, _ = frame.f_code.co_qualname.partition(".")
        if module.startswith("flwr.") and owner.startswith(names):
            found = owner
        frame = frame.f_back
    return found


def refuse_dp_strategy(ours: str) -> None:
    """ValueError if one of Flower's DP strategies drives ours, of this name."""
    wrapper = flower_caller(STRATEGIES)
    if wrapper is not None:
        raise ValueError(
            f"{ours} inside Flower's {wrapper}: that would take gradients for parameters, clip "
            f"and add noise a second time, and no stated epsilon would know of it. {ours} does "
            f"all of this itself: use it without {wrapper}"
        )


def refuse_secagg_workflow(ours: str) -> None:
    """ValueError if Flower's own secure aggregation drives our strategy of this name."""
    workflow = flower_caller(WORKFLOWS)
    if workflow is not None:
        raise ValueError(
            f"{ours} inside Flower's {workflow}: nobody could clip a client's vector, rounding and "
            "weights by num_examples would come on top, and the stated epsilon would not hold. Use "
            "PPSGD with Release(..., aggregation=SecureSum(honest, colluding)), in which clients "
            "bound their vectors and add the noise"
        )
