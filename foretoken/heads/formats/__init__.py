"""What a head's directory holds: `config.json` and the names and shapes of its tensors, one module per kind."""
