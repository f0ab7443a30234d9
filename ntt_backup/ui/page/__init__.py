"""The status page of `serve` is read, judged, drawn, and shown over HTTP. Nothing here writes."""
