"""The session of one rank: connect, compare, run steps, commit them, and connect again."""
