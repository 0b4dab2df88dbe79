from hf_posswap.comparison.report.page import PAGE as PAGE
from hf_posswap.comparison.report.page import check_results as check_results
from hf_posswap.comparison.report.page import render_html as render_html
from hf_posswap.comparison.report.page import write_html as write_html
