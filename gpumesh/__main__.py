"""`python -m gpumesh`: the same as the `gpumesh` command."""

from gpumesh.cli.main import main

main()
