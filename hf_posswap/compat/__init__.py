"""Every private or version-dependent touch of torch, transformers, accelerate and PEFT, behind one function each.

tests/compat runs each function on the installed libraries: when a release moves one, the test of that name fails.
Another test refuses such touches anywhere else.
"""
