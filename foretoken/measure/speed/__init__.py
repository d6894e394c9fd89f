"""One request at a time: speed and acceptance of every setting beside plain decoding, and the cost of single steps."""
