"""Who drafts, how much, and who runs: pure arithmetic that the engine and the simulator both drive."""
