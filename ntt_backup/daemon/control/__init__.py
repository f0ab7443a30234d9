"""A running daemon tells of itself, and does what its user asks, over its control socket."""
