"""Persistent storage: database, schema, metric points and model archives."""
