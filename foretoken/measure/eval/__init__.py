"""Acceptance over time: measured by drafter, position and slice, with intervals, and compared with an earlier file."""
