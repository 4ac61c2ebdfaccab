"""Routes of the server itself and of agents, and queries of pools."""
