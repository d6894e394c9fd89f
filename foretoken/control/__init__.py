"""Draft budgets, the choice of drafters, and the queue: plain arithmetic, used by the engine and by the simulator."""
