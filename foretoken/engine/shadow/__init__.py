"""Shadow checks: a share of the answers is scored again, to detect outputs that do not follow the target."""
