"""An object store as a target: its keys, and the few requests that are made of it."""
