"""Apps in the shape of Flower's quickstarts, before they know of PPSGD.

Each folder, together with ``task.py``, is the package of one app: ``tests.support.recipes`` copies
them out under the name that the README's diffs have.
"""
