"""The command ``zerolab``: results on standard output, everything else on standard error.

The modules import very little, so that ``zerolab --help`` is fast: a command imports its
dependencies when it runs.
"""
