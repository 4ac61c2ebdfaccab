"""Searches: searchers, their operations, custom searches and warm starts."""
