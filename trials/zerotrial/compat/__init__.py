"""Adapters for other engines and for libraries that use them."""
