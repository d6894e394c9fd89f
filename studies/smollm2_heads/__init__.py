"""How the heads of SmolLM2 were trained: prompts of our own making, answers of the model, the commands."""
