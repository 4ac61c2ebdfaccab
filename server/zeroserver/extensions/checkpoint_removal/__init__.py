"""Removal of checkpoints at the request of users: of whole ones, of files, and by a new policy."""
