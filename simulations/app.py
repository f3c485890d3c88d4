"""The Flower app that ``flwr run .`` starts: the paper's synthetic problem, settings from the run config."""

from flwr_ppsgd.experiments import app

server = app.server
client = app.client
