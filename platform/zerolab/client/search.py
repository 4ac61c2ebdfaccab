"""Public path of the runner of custom searchers: ``python -m zerolab.client.search``."""

import sys
from collections.abc import Callable

from zerolab.registry import PARTS

__all__ = ["main", "serve"]

serve: Callable[..., None] = PARTS["search_client"].serve
main: Callable[[], int] = PARTS["search_client"].main

if __name__ == "__main__":
    sys.exit(main())
