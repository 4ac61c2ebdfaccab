"""DeepSpeed's dialect of engine files: ``"auto"``, comments, old names, unsupported keys."""
