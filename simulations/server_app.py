"""The ServerApp that ``flwr run .`` starts: settings from the run config, a picture at the end."""

from flwr_ppsgd.lab import server_app

server = server_app.server
