"""A take finds the files of a set, compares them with the last version, and stores what differs."""
