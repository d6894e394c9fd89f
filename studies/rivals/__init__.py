"""Does the engine's policy beat those of other engines, in the same run on the same requests?"""
