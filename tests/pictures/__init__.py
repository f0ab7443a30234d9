"""The pictures of the documents: `python -m tests.pictures` makes them all."""
