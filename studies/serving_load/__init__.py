"""Load on `foretoken serve`: long runs without leaks, the cost of HTTP, and fast clients beside slow ones."""
