"""A multi-worker remote backup daemon for a content-addressed store."""

__version__ = "0.1.0"
