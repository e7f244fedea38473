"""``python -m flashnext``."""

from flashnext.cli import main

main()
