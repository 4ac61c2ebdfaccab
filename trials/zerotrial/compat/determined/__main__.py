"""Print the directory to put into ``PYTHONPATH``."""

from zerotrial.extensions.determined_api import DIRECTORY

print(DIRECTORY)  # noqa: T201 - the result
