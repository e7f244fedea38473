"""Puts this folder on the import path, so that tests of all kinds share the modules that lie in it."""
