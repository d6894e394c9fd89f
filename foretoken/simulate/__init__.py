"""The scheduler and the controller on a virtual clock, without a model."""
