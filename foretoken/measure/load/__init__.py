"""Whole batches: settings by batch size and slice."""
