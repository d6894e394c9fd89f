"""Is what comes out what the target would have said? Checks on a user's own models and prompts, and their report."""
