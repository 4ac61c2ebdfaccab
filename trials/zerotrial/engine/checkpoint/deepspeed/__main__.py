"""``python -m zerotrial.engine.checkpoint.deepspeed FROM TO``: make a checkpoint ours."""

import sys

from zerotrial.engine.checkpoint.deepspeed.convert import main

sys.exit(main())
