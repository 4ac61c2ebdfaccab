"""Collectives, and how ranks of one machine meet."""
