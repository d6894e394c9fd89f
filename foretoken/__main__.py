"""`python -m foretoken` is the command `foretoken`."""

from foretoken.cli import main

main()
