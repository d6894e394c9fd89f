"""The page of the server: chat with tokens coloured by provenance, and a live board."""
