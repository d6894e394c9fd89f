"""Why is acceptance low? A head beside its target as its files describe it, and under one likely repair at a time."""
