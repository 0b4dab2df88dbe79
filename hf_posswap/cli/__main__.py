"""`python -m hf_posswap.cli` is `posswap`."""

from hf_posswap.cli.app import main

if __name__ == "__main__":
    main()
