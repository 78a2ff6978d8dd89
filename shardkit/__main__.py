"""`python -m shardkit ...` is the same program as `shardkit ...`."""

from shardkit.cli.main import main

if __name__ == "__main__":
    main()
