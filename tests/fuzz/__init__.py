"""Mutated input from strangers: thousands of sessions and files, none of which may do harm.

`python -m tests.fuzz WHAT --rounds N --seed S` plays one kind in a process of its own, prints what
was found, and how much memory the process took at most. docs/security.md says what must hold.
"""
