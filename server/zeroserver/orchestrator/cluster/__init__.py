"""What there is to run on, who waits for it, and what users say about both."""
