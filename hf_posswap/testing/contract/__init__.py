"""The contract: what every scheme and every family promises, as checks that this repository and other packages run.

`pytest --posswap-contract MODULE` runs it for what a module registers; see the README of `hf_posswap/testing`.
"""
