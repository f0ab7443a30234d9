"""The coordinator starts, hears, probes with and ends its workers."""
