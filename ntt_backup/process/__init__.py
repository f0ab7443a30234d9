"""Child processes are programs in pipelines, or copies of this process; threads are here, too."""
