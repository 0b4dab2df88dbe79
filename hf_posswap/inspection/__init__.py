"""Any model checked, a swap chosen by measurements, and the interactive page."""
