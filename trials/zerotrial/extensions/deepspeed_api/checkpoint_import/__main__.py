"""``python -m zerotrial.engine.checkpoint.deepspeed [--export] FROM TO``: convert a checkpoint."""

import sys

from zerotrial.extensions.deepspeed_api.checkpoint_import.convert import main

sys.exit(main())
