"""`python -m hf_posswap.cli` is `posswap`."""

from posswap_command import main

if __name__ == "__main__":
    main()
