"""A real deployment on this machine: SuperLink and SuperNodes with TLS and authentication, killed
and restarted."""
