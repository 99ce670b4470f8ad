"""A policy over HTTP: one ASGI application, from this process or on Ray Serve."""
