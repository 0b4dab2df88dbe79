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
# # Notebook: swap in five minutes
#
# You change the positions of a small GPT-2 from a learned table to RoPE, verify the change, undo it, save it and load
# it again. Then you do the same to a Llama, where stock transformers loads the result. It runs offline on a CPU in a
# few seconds; each `assert` is checked whenever this page is built.

# %%
# In Colab, run this first: %pip install "hf-posswap[all]"
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import hf_posswap

logging.disable_progress_bar()
torch.manual_seed(0)
torch.set_grad_enabled(False)
folder = Path(tempfile.mkdtemp())
model = hf_posswap.load_example().eval()  # a GPT-2 with 128 learned positions
tokens = torch.randint(1024, (1, 1000))
before = model(tokens[:, :128]).logits
print(
    model.config.model_type, "with", model.config.max_position_embeddings, "positions"
)
assert model.config.max_position_embeddings == 128

# %% [markdown]
# ## Plan, swap, verify
#
# `plan_swap` changes nothing: it says what would be edited, what the saved checkpoint needs, and whether the model must
# be trained afterwards.

# %%
plan = hf_posswap.plan_swap(model, "rope", max_length=1024)
assert plan.route == "plugin"
assert torch.equal(model(tokens[:, :128]).logits, before)  # the plan touched nothing
plan

# %% [markdown]
# `patch_model` edits this model in place, and no other of its class. `verify_swap` raises if the mechanism did not
# change as planned.

# %%
hf_posswap.patch_model(model, "rope", max_length=1024)
verification = hf_posswap.verify_swap(model)
after = model(tokens)
print("logits of 1,000 tokens:", tuple(after.logits.shape))
assert after.logits.shape[1] == 1000
assert not torch.allclose(model(tokens[:, :128]).logits, before)
verification

# %% [markdown]
# ## Undo
#
# The swap keeps what it replaced, so the original comes back bit for bit.

# %%
hf_posswap.unpatch_model(model)
assert torch.equal(model(tokens[:, :128]).logits, before)
print("after unpatch_model: the same logits, bit for bit")

# %% [markdown]
# ## Save and load
#
# A checkpoint carries its mechanism. Stock transformers refuses this one instead of loading it wrongly;
# `hf_posswap.load` and, after `import hf_posswap`, the Auto classes know it.

# %%
hf_posswap.patch_model(model, "rope", max_length=1024)
hf_posswap.save(model, folder / "gpt2-rope")
loaded = hf_posswap.load(folder / "gpt2-rope").eval()
auto = AutoModelForCausalLM.from_pretrained(folder / "gpt2-rope").eval()
print(type(auto).__name__)
assert torch.equal(loaded(tokens).logits, after.logits)
assert torch.equal(auto(tokens).logits, after.logits)

# %% [markdown]
# ## A Llama: a native swap
#
# Where transformers can express the mechanism in the config, the swap is *native*: the saved folder is a stock
# checkpoint, which vLLM, llama.cpp (through `posswap export`) and every trainer read.

# %%
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = LlamaConfig(
    **shape, num_attention_heads=4, vocab_size=1024, max_position_embeddings=128
)
llama = LlamaForCausalLM(config).eval()
hf_posswap.patch_model(llama, "yarn", factor=4)
print(hf_posswap.swap_plan(llama).route)
print(llama.config.rope_parameters)
hf_posswap.save(llama, folder / "llama-yarn")
stock = LlamaForCausalLM.from_pretrained(folder / "llama-yarn").eval()
assert stock.config.rope_parameters["rope_type"] == "yarn"
assert torch.equal(stock(tokens[:, :512]).logits, llama(tokens[:, :512]).logits)

# %% [markdown]
# A swap changes what the weights were trained for, so the next step is a little training:
# [Adapt a small model](adapt.py). [Schemes](../pages/schemes.md) lists all mechanisms, and
# [What works with what](../pages/support.md) the models.
