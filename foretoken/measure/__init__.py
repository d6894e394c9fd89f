"""Measurements: what they share, and below it speed, batches, servers, acceptance and the audit."""
