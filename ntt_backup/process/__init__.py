"""Child processes (programs, and copies of this process), their messages, threads, locks, files."""
