"""The loop: scheduler, runner, controller, engine, and the public front `llm`."""
