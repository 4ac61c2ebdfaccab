"""``python -m zerotrial.plan experiment.yaml``: see :mod:`zerotrial.plan.plan`."""

import os
import sys

from zerotrial.plan.plan import main

try:
    try:
        code = main()
    finally:
        sys.stdout.flush()
except BrokenPipeError:  # the reader, e.g. `head`, has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    code = 141
sys.exit(code)
