"""Construction of an engine from the arguments of ``initialize``."""
