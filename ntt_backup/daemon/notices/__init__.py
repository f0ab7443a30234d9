"""Notices tell an operator what matters of a run, from a process of their own."""
