"""The machine that this process runs on: its cores, its neighbours, and how threads are to wait. Nothing imports torch."""
