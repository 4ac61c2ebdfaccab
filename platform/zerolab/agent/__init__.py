"""What every machine with slots runs: it takes runs from the server and tells how they end."""
