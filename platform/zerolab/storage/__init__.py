"""Atomic checkpoint storage in a directory, or in an object store of an extension."""
