"""What two processes agree on: variables, exit codes, files of a run, bodies on the wire."""
