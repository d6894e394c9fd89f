"""What steps cost on this machine, known before the first request."""
