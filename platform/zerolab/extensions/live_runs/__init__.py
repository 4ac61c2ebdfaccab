"""Live reports of scripts that Zerolab did not start, and `zerolab sync`."""
