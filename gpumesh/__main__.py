"""`python -m gpumesh`: the same as the `gpumesh` command."""

from gpumesh.cli.main import main

if __name__ == "__main__":
    main()
