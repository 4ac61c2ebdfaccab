"""``python -m zerotrial.engine.checkpoint.deepspeed [--export] FROM TO``: convert a checkpoint."""

import sys

from zerotrial.engine.checkpoint.deepspeed.convert import main

sys.exit(main())
