"""The way of a report from a rank to the server: a spool on disk, and a thread that ships it."""
