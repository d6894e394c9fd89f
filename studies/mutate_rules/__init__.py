"""Do the tests notice every wrong formula in `foretoken/verify`?"""
