"""The command ``zerolab``: results on standard output, everything else on standard error.

The modules here import next to nothing, so that ``zerolab --help`` is instant: what a command
needs is imported when it runs.
"""
