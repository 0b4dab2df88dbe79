"""Results of a real comparison of small models, whose names try to become markup."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_posswap.comparison import Candidate, EvalSettings, compare
from hf_posswap.training import byte_tokenizer

NAMES = ("base", "<img src=x onerror=\"document.title='broken'\">", "</script><script>document.title='broken'</script>")
METRICS = ("ppl_prefix", "nll_pos", "ctx_gain", "short_reg", "passkey", "offset_probe", "ppl_compat", "cost")
_TEXTS = [f"{number}: " + " ".join(str((number * 7 + i) ** 2) for i in range(200)) for number in range(9)]


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a comparison of a GPT-2 of 128 positions as it is, with rotation and with ALiBi, and its folder."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=257, n_positions=128, n_embd=16, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256
    )
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    candidates = [Candidate(model, name=NAMES[0]), Candidate(model, "rope", name=NAMES[1])]
    candidates.append(Candidate(model, "alibi", name=NAMES[2]))
    settings = EvalSettings(lengths=(64, 128, 256), metrics=METRICS, trials=2, depths=(0.0, 0.5, 1.0), stride=64)
    folder = tmp_path_factory.mktemp("comparison")
    return compare(
        candidates, documents=_TEXTS, tokenizer=byte_tokenizer(), settings=settings, out=folder, pictures=False
    )


@pytest.fixture
def results(measured: Any) -> dict[str, Any]:
    """Return the results, a copy of one's own."""
    return copy.deepcopy(measured.results)
