"""Commands about the machines and the queue: ``agent``, ``job``, ``pool``, ``quota``."""
