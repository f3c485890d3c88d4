"""Apps in the shape of Flower's quickstarts, before they know of PPSGD."""
