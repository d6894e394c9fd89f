"""The HTTP server: requests and responses over a `Service`, an engine in this process or in a worker."""
