"""The local store is inspected and read; only `restore.heal` writes into it."""
