"""The client is our end of a connection: ssh, channels, sessions that read, and their pool."""
