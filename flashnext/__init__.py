"""flashnext: build, serve and measure Qwen3.8-Flash-Next on a home box."""

__version__ = "0.1.0"
