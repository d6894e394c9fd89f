"""Does the engine's policy beat every fixed number of draft tokens on a load that changes?"""
