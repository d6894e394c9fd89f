"""Two checkouts of foretoken, measured in one run on the same requests."""
