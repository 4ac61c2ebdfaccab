"""Custom searches: an external program sends their operations."""
