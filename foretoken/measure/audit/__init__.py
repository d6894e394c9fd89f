"""Audit: checks on a user's own models and prompts that the output follows the target's distribution, and their
report.
"""
