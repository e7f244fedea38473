"""Facts about this host; no judgement."""
