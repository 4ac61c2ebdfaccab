"""``python -m zerotrial.plan experiment.yaml``: see :mod:`zerotrial.plan.plan`."""

import sys

from zerotrial.plan.plan import main

sys.exit(main())
