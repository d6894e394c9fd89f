"""How fast memory is read here: the floor of a step that reads every weight once."""
