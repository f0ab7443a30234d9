"""A restore brings back files of a version, or of a part of it, below a directory."""
