"""Checks of any transformers model: does it do what its config says about positions?"""
