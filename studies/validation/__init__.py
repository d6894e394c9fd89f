"""Does the simulator predict what the engine then does?"""
