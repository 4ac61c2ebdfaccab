"""Warnings about ranks that are missing from a collective call."""
