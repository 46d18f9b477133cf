"""`python -m midstream.api.cli`: the `midstream` command."""

from midstream.api.cli.main import main

if __name__ == "__main__":
    main()
