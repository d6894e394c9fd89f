"""The queue and the chooser on a virtual clock, without a model."""
