"""The experiments as a Flower ClientApp: everything comes from the run config.

It loads nothing of the server: no accounting, no strategy.
"""

from flwr_ppsgd.client.app import client_app
from flwr_ppsgd.lab.tasks import learner_for

client = client_app(learner_for)
