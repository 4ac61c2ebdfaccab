"""Data of a trial: loader, samplers, batch iterators and device transfer."""
