"""Arithmetic that the live controller and the offline adviser share: what steps cost, what guesses gain, how many to
make.
"""
