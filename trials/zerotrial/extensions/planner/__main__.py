"""``zerolab plan experiment.yaml``: see :mod:`zerotrial.extensions.planner.plan`."""

import os
import sys

from zerotrial.extensions.planner.plan import main

try:
    try:
        code = main()
    finally:
        sys.stdout.flush()
except BrokenPipeError:  # the reader, e.g. `head`, has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    code = 141
sys.exit(code)
