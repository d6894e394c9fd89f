"""Studies: experiments around foretoken that users of the package do not need. `studies/README.md` lists them."""
