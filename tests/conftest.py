"""Puts this folder on the import path, so that tests of all kinds share the modules that lie in it."""

import signal

# A background job starts with SIGINT ignored, one under nohup with SIGHUP, and every program that a test
# starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
