"""Model files: read headers, inspect, synthesise."""
