"""The local store is inspected and read, and never changed."""
