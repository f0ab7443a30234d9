"""A remote backup daemon sends a content-addressed store by several workers."""

__version__ = "0.1.0"
