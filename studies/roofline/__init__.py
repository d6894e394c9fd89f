"""How far a pass of a model is from what memory and arithmetic of this machine allow, by rows."""
