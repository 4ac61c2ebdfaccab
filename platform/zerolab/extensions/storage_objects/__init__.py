"""Checkpoint storage in S3, Google Cloud Storage and Azure, through fsspec."""
