"""Profiles: closed, strict YAML that becomes argv and environment."""
