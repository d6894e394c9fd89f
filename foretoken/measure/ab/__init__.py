"""Two backends on the same requests, in turns: which is faster, by how much, for whom."""
