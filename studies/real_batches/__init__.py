"""End-to-end speed of drafters on prompts of several kinds, with one and several requests at once."""
