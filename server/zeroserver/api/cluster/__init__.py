"""REST: the server itself, the agents, and the queue with its pools and quotas."""
