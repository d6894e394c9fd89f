"""The HTTP API: an ASGI application over a `Backend`."""
