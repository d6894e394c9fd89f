"""Who guesses. One file per drafter; `group` mixes them in a batch."""
