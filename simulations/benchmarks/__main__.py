"""``make bench`` shows everything, ``python -m simulations.benchmarks sweeps`` what is named."""

import logging
import sys

from simulations.benchmarks import rounds, sweeps, waiting

PARTS = {
    "waiting": waiting.show_waiting,
    "rounds": rounds.show_rounds,
    "sweeps": sweeps.show_sweeps,
}


def main() -> None:
    """Show the parts that are named, or all of them."""
    named = sys.argv[1:] or list(PARTS)
    unknown = [name for name in named if name not in PARTS]
    if unknown:
        sys.exit(f"no part {', '.join(unknown)}: name some of {', '.join(PARTS)}")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    print(f"{'measurement':66s} {'measured':>9s}   target")
    for name in named:
        PARTS[name]()


if __name__ == "__main__":
    main()
