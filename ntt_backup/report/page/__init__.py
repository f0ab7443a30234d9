"""The status page of `serve` is drawn, and shown over HTTP. Nothing here writes."""
