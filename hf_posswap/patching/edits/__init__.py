"""The base of edits, and code shared by the edits of every site."""
