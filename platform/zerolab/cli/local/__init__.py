"""The server and the agent of this machine: `run`, `up`, `down` and `token`."""
