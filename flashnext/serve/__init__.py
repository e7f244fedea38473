"""Serve: one supervisor, its children and what it says about them."""
