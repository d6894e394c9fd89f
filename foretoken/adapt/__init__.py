"""On-line adaptation: trained heads learn from what is served, in the background."""
