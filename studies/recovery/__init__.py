"""How soon does the number of draft tokens follow a change of acceptance?"""
