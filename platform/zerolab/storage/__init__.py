"""Atomic checkpoint storage in a directory, or in a bucket of S3, GCS or Azure."""
