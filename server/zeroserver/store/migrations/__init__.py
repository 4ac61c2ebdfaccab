"""Changes of the schema, in order; :mod:`zeroserver.store.migrate` runs them."""
