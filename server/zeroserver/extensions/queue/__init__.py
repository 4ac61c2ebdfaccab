"""Settings of the queue: priority and order of jobs, resource pools and quotas."""
