"""The command line has one module for each command, and some that they share."""
