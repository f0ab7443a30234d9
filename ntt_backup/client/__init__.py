"""Our end of a connection to the remote: ssh, channels, sessions that read, and their pool."""
