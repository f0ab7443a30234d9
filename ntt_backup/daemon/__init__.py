"""The coordinator of a run: lock, preflight, workers, signals, and the log of events."""
