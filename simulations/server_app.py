"""The ServerApp that ``flwr run .`` starts: settings from the run config, a picture at the end."""

from flwr_ppsgd.lab.figures import draw_run
from flwr_ppsgd.lab.server_app import server_app

server = server_app(draw_run)
