"""The reference family: a small target and its draft, trained by this project; see README.md here."""
