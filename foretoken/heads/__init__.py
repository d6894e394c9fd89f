"""Trained heads: small networks that read the target's hidden states and guess the tokens that follow."""
