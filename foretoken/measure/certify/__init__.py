"""Two backends on the same requests: does the second, which speculates, answer as the first one does?"""
