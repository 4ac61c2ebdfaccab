"""Old import path of the extensions, for programs and checkpoints that use it."""
