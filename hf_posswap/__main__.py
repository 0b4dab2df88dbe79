"""`python -m hf_posswap`: the command `posswap`."""

from hf_posswap.command import main

if __name__ == "__main__":
    main()
