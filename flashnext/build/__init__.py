"""Build: a pinned llama.cpp plus our features becomes one set of binaries."""
