"""Whether to speculate on given texts and a given load: with which drafter, how many tokens, at which cost."""
