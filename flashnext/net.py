"""The only importer of httpx: downloads from a package index, probes of servers on loopback."""
