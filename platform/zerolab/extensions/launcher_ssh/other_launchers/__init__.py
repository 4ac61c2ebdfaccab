"""Options and files of other launchers: DeepSpeed's and Accelerate's."""
