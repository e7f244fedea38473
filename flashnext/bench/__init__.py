"""Bench: proof that it is faster and not worse."""
