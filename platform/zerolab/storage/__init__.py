"""Where checkpoints lie: a directory, or a bucket of S3, GCS or Azure; whole, or not there."""
