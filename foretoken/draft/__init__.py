"""Drafters, one file each; `group` runs those of one batch."""
