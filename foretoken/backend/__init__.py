"""Things that answer calls: an engine in this process now, behind one protocol."""
