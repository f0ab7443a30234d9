"""The messages of the protocol between client and receiver, for both ends."""
