"""People see a run on a terminal, and the state of targets in a table or on a web page."""
