"""Import of MLflow stores, directories and SQLite files: `zerolab import`."""
