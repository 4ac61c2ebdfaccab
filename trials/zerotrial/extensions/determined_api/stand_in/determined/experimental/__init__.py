"""Determined's client."""

from zerotrial.extensions.determined_api.client_api import Determined
from zerotrial.extensions.determined_api.missing import missing_name

from . import client, core_v2

__all__ = ["Determined", "client", "core_v2"]

__getattr__ = missing_name("determined.experimental")
