"""Changes of the schema, in order; :mod:`zeroserver.migrate` runs them."""
