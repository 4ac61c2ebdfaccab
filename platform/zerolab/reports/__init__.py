"""Reports from a rank to the server: a spool on disk, and a thread that uploads it."""
