"""The metrics of runs are counted, and served to a monitoring system by a process of their own."""
