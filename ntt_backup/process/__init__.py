"""Child processes: programs in pipelines, copies of this process, and interrupts around both."""
