"""Server of Zerolab: database, REST routes, orchestrator and the web page."""
