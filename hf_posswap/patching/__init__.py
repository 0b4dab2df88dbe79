"""Patching: plans, the three sites, the record and the proof. The only code that changes a model."""
