"""The server and the agent of this machine: `run`, `up`, `down`, `token` and `doctor`."""
