"""The ServerApp that ``flwr run .`` starts: settings from the run config, a picture at the end."""

from flwr_ppsgd.lab.experiments.server_app import server_app
from flwr_ppsgd.lab.results.figures import draw_run

server = server_app(draw_run)
