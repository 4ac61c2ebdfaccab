"""Searches whose operations a program outside of the server sends."""
