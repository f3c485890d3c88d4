"""The Flower app at the root of the repository, the demonstration and the benchmark."""
