"""Starting and watching the processes of one run."""
