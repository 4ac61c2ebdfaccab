"""Access control: callers, tokens and the routes that each may use."""
