"""The HTTP server: requests and responses over a `Backend`, an engine in this process or in a worker."""
