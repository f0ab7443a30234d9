"""Workers are started, heard, probed with, supervised and ended."""
