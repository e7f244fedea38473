"""Profiles: strict YAML to a closed model, qualification, and the server's argv and environment."""
