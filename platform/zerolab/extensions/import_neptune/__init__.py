"""Import of the Parquet files of neptune-exporter: `zerolab import`."""
