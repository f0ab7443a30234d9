"""A version consists of a manifest with its entries, a map of blocks, and packs of super blocks."""
