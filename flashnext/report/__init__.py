"""One archive for a bug report: what was built, asked for, planned, found and logged, without secrets."""
