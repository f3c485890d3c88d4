"""The ClientApp that ``flwr run .`` starts: one user of the problem that the run config names."""

from flwr_ppsgd.lab import client_app

client = client_app.client
