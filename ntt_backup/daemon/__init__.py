"""The coordinator of a run has a lock, a preflight, workers, signals, and a log of events."""
