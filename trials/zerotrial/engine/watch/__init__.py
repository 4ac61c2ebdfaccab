"""What is seen while an engine trains: the step line, timers, operations, bytes."""
