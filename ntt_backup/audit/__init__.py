"""What was stored is checked: by its hashes, and by comparing catalog, store and remote."""
