# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Notebook: compare and read the report
#
# You measure one model with three mechanisms at several lengths, without training, and read the results: the table, the
# verdicts, the sliding-window baseline, and `results.json`. It takes less than a minute on one CPU core.

# %%
# In Colab, run this first: %pip install "hf-posswap[all]"
import json
import tempfile
from pathlib import Path

import torch
from IPython.display import Image
from transformers import AutoTokenizer
from transformers.utils import logging

import hf_posswap
from hf_posswap import Candidate, EvalSettings
from hf_posswap.text.stdlib import python_corpus

logging.disable_progress_bar()
folder = Path(tempfile.mkdtemp())
example = Path(hf_posswap.__file__).parent / "quickstart" / "model"
tokenizer = AutoTokenizer.from_pretrained(example)
model = hf_posswap.load_example().eval()

# %% [markdown]
# ## Measure
#
# The candidates are the model as it is, with RoPE put in, and with an ALiBi that is fitted to the learned table. All of
# them read the same tokens. `metrics` names what to measure; without it, all that apply are measured.

# %%
text = next(text.text for text in python_corpus().train if len(text.text) > 20_000)
ids = tokenizer(text, verbose=False)["input_ids"][:1024]
windows = torch.tensor(ids).reshape(8, 128)
centred = hf_posswap.load_example().eval()
hf_posswap.centre_table(centred)  # moves what all rows share out of the table
fitted = hf_posswap.fit_bias(centred, "alibi", windows)
candidates = [
    Candidate(model, name="base"),
    Candidate(model, "rope", name="rope"),
    Candidate(centred, fitted, name="fitted alibi"),
]
settings = EvalSettings(
    lengths=(128, 256, 512),
    metrics=("ppl_prefix", "ctx_gain", "short_reg"),
    documents=16,
)
evaluation = hf_posswap.compare(
    candidates,
    text="python",
    tokenizer=tokenizer,
    settings=settings,
    out=folder / "results",
)
assert list(evaluation.results["models"]) == ["base", "rope", "fitted alibi"]
evaluation

# %% [markdown]
# ## Read the table
#
# - A row is a model, a column a length; `1x` is the model's own window. Brackets are 95 % intervals over documents.
# - *ends at 128 tokens*: the base's table has no row there. That is not a loss; it cannot run.
# - *sliding window* is the baseline: the base, reading half-overlapping windows of its own size. A longer reach is only
#   worth it below this line.
# - *far context* says whether the text beyond the window helped, *within the window* whether short texts got worse.
#
# Without training, RoPE is far worse than the table that it replaced. The fitted ALiBi starts close to it and keeps its
# loss at every length, and the sliding window, which needs no swap, is still the one to beat.

# %%
results = json.loads((folder / "results" / "results.json").read_text())
models = results["models"]


def perplexity(name, length):
    """Return the perplexity of a model at a length, or None where it cannot run."""
    rows = {row["length"]: row["perplexity"] for row in models[name]["ppl_prefix"]}
    return rows.get(length)


for name in models:
    print(f"{name:13}", [perplexity(name, length) for length in results["lengths"]])
window = {row["length"]: row["perplexity"] for row in results["sliding"]["ppl_prefix"]}
print("sliding window", window)
assert perplexity("base", 512) is None
assert perplexity("rope", 128) > 1.5 * perplexity("base", 128)
assert perplexity("fitted alibi", 128) < 1.5 * perplexity("base", 128)
assert perplexity("fitted alibi", 512) > window[512]

# %% [markdown]
# ## Read results.json
#
# Everything in the table and the report comes from this file: `models` has a list of rows for each metric,
# `comparisons` the paired differences from the baseline, `sliding` the sliding window, and `environment` and `made` the
# versions, the command and the date.

# %%
for name, model_results in models.items():
    verdicts = model_results.get("short_reg", {}).get("loss", {})
    print(f"{name:13}", sorted(model_results)[:6], verdicts.get("verdict", "-"))
print("baseline:", results["base"], "| documents:", results["data"]["documents"])
assert results["base"] == "base"
assert results["data"]["documents"] >= 8  # fewer have intervals, but no verdicts

# %% [markdown]
# ## The report
#
# `report.html` is one page that needs no network: curves with values on hover, loss by position, sortable tables. Open
# it in a browser; the pictures are files in the same folder.

# %%
print(*sorted(path.name for path in (folder / "results").glob("*.*")), sep="\n")
assert (folder / "results" / "report.html").is_file()
Image(str(folder / "results" / "perplexity-by-length.png"))

# %% [markdown]
# The next step is a trained model and its control in the same comparison: [Quickstart](../pages/quickstart.md) does both
# in one command, and [Evaluation](../pages/evaluation.md) explains every metric and interval.
