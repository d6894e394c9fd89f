"""Trained heads: small networks that read the target's hidden states and predict the tokens that follow."""
