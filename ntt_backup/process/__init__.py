"""Child processes: programs in pipelines, and copies of this process; and threads."""
