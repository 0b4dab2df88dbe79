"""One self-contained HTML page of an evaluation's results, to look at rather than to read."""

from hf_posswap.report.page import PAGE, check_results, render_html, write_html

__all__ = ["PAGE", "check_results", "render_html", "write_html"]
