"""A proxy that divides live traffic between two servers by time, and compares them (`foretoken ab-live`)."""
