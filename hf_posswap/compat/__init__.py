"""Every private or version-dependent touch of torch, transformers, accelerate and PEFT, behind one function each.

tests/compat exercises each function against the installed libraries, so that a new release which moves one is told by
the test of that name; another test refuses such touches anywhere else.
"""
