"""Each module here is a command: its options, its output and its exit codes."""
