"""Extensions of the server, each registered by an entry point and removable as a folder."""
