"""What Determined calls otherwise: its names in Python and its commands, and what to write here.

Nothing of it runs Determined. Messages and docs/from_determined.md read the same tables.
"""
