"""What outlives the process: database, schema, metric points, archives."""
