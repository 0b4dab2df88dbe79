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
# # Notebook: adapt a small model
#
# A swapped model runs, but its weights were trained for the old positions. You train the small GPT-2 of the package by
# the recipe `learned-to-rope` for 20 steps and see how much of the loss comes back. A real run has more steps and a
# control with as many tokens; this one takes less than a minute on one CPU core.

# %%
# In Colab, run this first: %pip install "hf-posswap[all]"
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

import hf_posswap
from hf_posswap.text.stdlib import python_corpus

logging.disable_progress_bar()
logging.set_verbosity_error()  # transformers warns of the loss of any GPT-2
folder = Path(tempfile.mkdtemp())
base = folder / "my-gpt2"
example = Path(hf_posswap.__file__).parent / "quickstart" / "model"
tokenizer = AutoTokenizer.from_pretrained(example)
hf_posswap.save(hf_posswap.load_example(), base, tokenizer=tokenizer)
texts = [text.text for text in python_corpus().held_out if len(text.text) > 9000][:8]
ids = [tokenizer(text, verbose=False)["input_ids"][:1024] for text in texts]
held_out = torch.tensor([row for row in ids if len(row) == 1024])


def loss_of(model, length):
    """Return the loss on the first `length` tokens of the texts, in nats a token."""
    with torch.no_grad():
        return float(model(held_out[:, :length], labels=held_out[:, :length]).loss)


before = loss_of(hf_posswap.load(base).eval(), 128)
print(f"{len(held_out)} texts; the base at 128 tokens: {before:.2f} nats/token")
assert len(held_out) >= 4

# %% [markdown]
# ## Just swapped
#
# The plan announces a high loss. At 1,024 tokens the base cannot run at all: its table has 128 rows.

# %%
swapped = hf_posswap.patch_model(hf_posswap.load(base), "rope", max_length=1024).eval()
just_swapped = loss_of(swapped, 128)
print(f"just swapped, at 128 tokens: {just_swapped:.2f}")
assert just_swapped > before + 0.3

# %% [markdown]
# ## Train by a recipe
#
# A recipe is a YAML file with the swap, the data and the fields of `TrainingArguments`; every key can be changed. This
# one starts the rotation fitted to the learned table (`swap.fit`) and lets the unswapped model teach. `run_recipe` does
# what `posswap train` does: it verifies the swap, compares the first loss with the plan's prediction, trains, saves.

# %%
settings = [
    f"model.name={base}",
    "swap.max_length=1024",
    "data.length=1024",
    "data.sources.0.path=python",  # the sources of Python itself; yours: data.sources.0.path=books
    "data.sources.0.documents=150",
    f"data.cache={folder}",
    "training.max_steps=20",
    "training.warmup_steps=5",
    "training.learning_rate=1.5e-3",
    "training.report_to=none",
    "training.use_cpu=true",
    "training.disable_tqdm=true",
    f"out={folder / 'rope'}",
]
finished = hf_posswap.run_recipe(hf_posswap.load_recipe("learned-to-rope", settings))
phase = finished.report["phases"][0]
print(f"{phase['tokens']:,} tokens in {phase['steps']} steps")
assert phase["steps"] == 20

# %% [markdown]
# ## What came back
#
# Read the two lines with the base in mind: in the window the loss should return to it, and beyond the window, where
# the base cannot read, it should not rise.

# %%
model = hf_posswap.load(finished.model).eval()
trained, far = loss_of(model, 128), loss_of(model, 1024)
print(f"at 128 tokens: {before:.2f} base, {just_swapped:.2f} just swapped")
print(f"trained: {trained:.2f} at 128 tokens, {far:.2f} at 1,024")
print(hf_posswap.swap_plan(model).adaptation)
assert trained < (before + just_swapped) / 2  # more than half of the way back
assert far < just_swapped

# %% [markdown]
# The checkpoint records its training, so that cards, plans and results can name it. Whether the swap was worth it needs
# a control and a baseline: [Compare and read the report](compare.py). [Recipes](../pages/recipes.md) has the other
# recipes, and [How-tos](../pages/howto.md) what a training costs at billions of parameters.
