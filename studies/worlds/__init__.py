"""Recorded worlds for the simulator, and ablations of the policy over them.

A world is a cost profile, a mixture of kinds of text with recorded answers, and a number of requests.
"""
