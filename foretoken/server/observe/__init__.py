"""What the server tells of itself: metrics, history of requests, request log, traces."""
