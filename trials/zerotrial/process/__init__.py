"""The processes of a run: the elastic launcher, the fork server, and one harness a rank."""
