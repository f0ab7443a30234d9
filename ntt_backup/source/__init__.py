"""The local store: inspected and read, never changed."""
