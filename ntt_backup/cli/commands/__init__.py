"""The commands, each a module: its options, its output and its exit codes."""
