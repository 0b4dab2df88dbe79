"""A comparison says what loops over transformers say, goes on after a stop, and refuses what it cannot measure."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import (
    AttentionInterface,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.activations import QuickGELUActivation

import hf_posswap
from hf_posswap.comparison import (
    DEFAULT_METRICS,
    Candidate,
    EvalSettings,
    candidates,
    compare,
    evaluate,
    measures,
    read_documents,
)
from hf_posswap.comparison.candidates import fingerprint, shell_of, tokenizer_for
from hf_posswap.comparison.tables import grid_of
from hf_posswap.comparison.work import ProgressEstimator
from hf_posswap.compat.transformers_attention import register_attention_function
from hf_posswap.errors import (
    CheckpointError,
    DataError,
    NotEnoughMemoryError,
    NumericError,
    OptionError,
    PositionRangeError,
    SchemeError,
)
from hf_posswap.evaluation import Scorer, cost, sliding_losses, store
from hf_posswap.evaluation.compat import PROTOCOLS
from hf_posswap.evaluation.ctx_gain import context_losses, contexts_of
from hf_posswap.evaluation.offset_probe import offset_losses, offsets_of
from hf_posswap.evaluation.ruler_lite import IN_DOCUMENTS, TASKS, ruler_prompt
from hf_posswap.evaluation.short_reg import compare_short, short_regression
from hf_posswap.training import byte_tokenizer
from hf_posswap.utils.progress import Reporter

WINDOW = 128
TOKENIZER = byte_tokenizer()
TEXTS = [f"{number}: " + " ".join(str((number * 7 + i) ** 2) for i in range(200)) for number in range(9)]
SETTINGS = EvalSettings(lengths=(128, 256), trials=2, depths=(0.0, 1.0), stride=64)


def gpt2(seed: int = 0, **more: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2} | more
    config = GPT2Config(vocab_size=257, n_positions=WINDOW, **shape, bos_token_id=256, eos_token_id=256)
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def sweep(model: PreTrainedModel) -> list[Candidate]:
    return [Candidate(model, name="base"), Candidate(model, "rope"), Candidate(model, "alibi")]


@pytest.fixture(scope="module", autouse=True)
def one_date() -> Iterator[None]:
    """Results hold when they were made: here always at the same time, so that runs can be compared byte by byte."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the model, the folder and the results of one comparison with every metric but longppl."""
    model, folder = gpt2(), tmp_path_factory.mktemp("out")
    settings = EvalSettings(**{**vars(SETTINGS), "metrics": (*DEFAULT_METRICS, "ppl_compat", "ruler_lite")})
    before = fingerprint(model)
    run = compare(sweep(model), documents=TEXTS, tokenizer=TOKENIZER, out=folder, settings=settings)
    assert fingerprint(model) == before
    assert not hasattr(model, "_posswap")
    return {"model": model, "folder": folder, "results": run.results, "settings": settings}


@pytest.mark.slow
def test_perplexities_are_those_of_a_loop(found: dict[str, Any]) -> None:
    model = copy.deepcopy(found["model"])
    hf_posswap.patch_model(model, "rope", max_length=256)
    ids = torch.tensor([[256, *text.encode()][:256] for text in TEXTS])
    for row in found["results"]["models"]["GPT2LMHeadModel+rope"]["ppl_prefix"]:
        part = ids[:, : row["length"]]
        with torch.no_grad():
            assert row["perplexity"] == pytest.approx(math.exp(model(part, labels=part).loss.item()), rel=1e-4)
        assert row["documents"] == 9
        assert row["low"] < row["perplexity"] < row["high"]


@pytest.mark.parametrize("scheme", ["yarn:factor=2", "self_extend:group=2", "dynamic:factor=2"])
def test_a_document_that_is_read_once_serves_all_shorter_lengths(scheme: str) -> None:
    """Unless a scheme follows the length: then each length is read, and so is one token before it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=WINDOW)).eval()  # fmt: skip
    reads: list[int] = []
    model.base_model.register_forward_pre_hook(  # a swapped copy has it too
        lambda module, args, kwargs: reads.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    settings = EvalSettings(lengths=(32, 64, 128), metrics=("ppl_prefix", "nll_pos"), documents=2)
    compare([Candidate(model, scheme)], documents=TEXTS, tokenizer=TOKENIZER, settings=settings)
    long = [count for count in reads if count > 16]  # shorter ones look at the model
    assert long == ([32, 32, 64, 64, 128, 128] if scheme.startswith("dynamic") else [127, 127])


def test_within_the_window_a_scheme_says_how_far_it_reaches() -> None:
    """`yarn` alone would be the base: its factor is the longest length over the window."""
    model, _ = watched_llama()
    settings = EvalSettings(lengths=(32, 64), metrics=("ppl_prefix",), documents=2)
    arguments: dict[str, Any] = {"documents": TEXTS, "tokenizer": TOKENIZER, "settings": settings}
    with pytest.raises(SchemeError, match="yarn: give factor or max_length; the model's own length is 128 tokens"):
        compare([Candidate(model, name="base"), Candidate(model, "yarn")], **arguments)
    found = compare([Candidate(model, name="base"), Candidate(model, "yarn:factor=4", name="new")], **arguments)
    assert found.results["models"]["new"]["plan"]["max_length"] == 4 * WINDOW


def watched_llama() -> tuple[PreTrainedModel, list[int]]:
    """Return a Llama, and a list that gets the tokens of each of its forwards of more than 16, and of its copies'."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=WINDOW)).eval()  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    reads: list[int] = []

    class Watched(LlamaModel):
        @functools.wraps(LlamaModel.forward)
        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            if input_ids.shape[1] > 16:
                reads.append(input_ids.shape[1])
            return super().forward(input_ids, **kwargs)

    model.base_model.__class__ = Watched
    return model, reads


TOGETHER = EvalSettings(
    lengths=(128, 256), metrics=("ppl_prefix", "ctx_gain", "short_reg", "offset_probe"), documents=2, tail=32
)


def test_what_another_metric_has_read_is_not_read_again() -> None:
    """Of 256 tokens: all context, the window, the passage at its place, and the first of the sliding windows."""
    model, reads = watched_llama()
    reporter = Reporter(Console(file=io.StringIO(), width=200))
    candidates = [Candidate(model, name="base"), Candidate(model, "yarn"), Candidate(model, "self_extend")]
    loads: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgressEstimator, "plan", lambda self, planned: loads.update(planned))
        compare(candidates, documents=TEXTS, tokenizer=TOKENIZER, settings=TOGETHER, reporter=reporter)
    shorter = [context + 31 for context in contexts_of(WINDOW, 256, 32)[0][:-1]]
    of_each = [255, *shorter, *[WINDOW // 2 - 1] * (len(offsets_of(WINDOW)) - 1)]
    expected = 2 * (3 * of_each + [WINDOW - 1])  # of two documents; the base reads two more windows, in one batch
    assert sorted(reads) == sorted(expected)
    assert sum(load.tokens for load in loads.values()) == sum(expected) + len(expected) + 2 * WINDOW


@pytest.mark.parametrize(
    ("scheme", "most"), [("yarn:factor=2", 2 << 30), ("yarn:factor=2", 0), ("self_extend", 2 << 30), ("dynamic", 0)]
)
def test_what_is_read_once_for_several_metrics_says_what_each_alone_says(
    monkeypatch: pytest.MonkeyPatch, scheme: str, most: int
) -> None:
    monkeypatch.setattr(measures, "_KEPT_BYTES", most)
    model, _ = watched_llama()
    results = compare(
        [Candidate(model, name="base"), Candidate(model, scheme, name="new")],
        documents=TEXTS, tokenizer=TOKENIZER, settings=TOGETHER,
    ).results  # fmt: skip
    new, documents = results["models"]["new"], list(read_documents(TEXTS, TOKENIZER, length=256, limit=2).tokens)
    swapped = hf_posswap.patch_model(copy.deepcopy(model), scheme, max_length=256)
    base, other = Scorer(model), Scorer(swapped)
    contexts, tail = contexts_of(WINDOW, 256, 32)
    alone = np.sum([context_losses(other, d, contexts, tail) for d in documents], axis=0) / (tail * len(documents))
    assert [row["loss"] for row in new["ctx_gain"]] == pytest.approx(alone.tolist(), rel=1e-5)
    offsets = [row["offset"] for row in new["offset_probe"]]
    moved = np.sum([offset_losses(other, d[: WINDOW // 2], offsets) for d in documents], axis=0)
    moved /= (WINDOW // 2 - 1) * len(documents)
    assert [row["loss"] for row in new["offset_probe"]] == pytest.approx(moved.tolist(), rel=1e-5)
    short = short_regression([compare_short(base, other, d[:WINDOW]) for d in documents])
    assert new["short_reg"]["divergence"] == pytest.approx(short.divergence, rel=1e-4)
    assert new["short_reg"]["loss"]["difference"] == pytest.approx(short.loss.difference, abs=1e-6)
    sliding = sliding_losses(model, np.stack(documents), WINDOW)
    assert results["sliding"]["ppl_prefix"][-1]["perplexity"] == pytest.approx(math.exp(sliding.mean()), rel=1e-5)


def test_what_was_read_before_a_stop_is_read_again_for_the_same_numbers(tmp_path: Path) -> None:
    """The states of a text's beginning are not stored: they come from a forward of the whole text, as before."""
    model, reads = watched_llama()
    candidates = [Candidate(model, name="base"), Candidate(model, "yarn")]
    arguments: dict[str, Any] = {"documents": TEXTS, "tokenizer": TOKENIZER, "pictures": False}
    whole = compare(candidates, settings=TOGETHER, out=tmp_path / "whole", **arguments).results
    stopped, count = tmp_path / "stopped", len(reads)
    compare(candidates, settings=dataclasses.replace(TOGETHER, metrics=("ppl_prefix",)), out=stopped, **arguments)
    reads.clear()
    resumed = compare(candidates, settings=TOGETHER, out=stopped, **arguments).results
    assert resumed["models"] == whole["models"]
    assert reads.count(255) == 4  # two documents of two models
    assert len(reads) < count


def test_protocols_that_need_no_token_before_a_text_are_measured_without_one() -> None:
    model, _ = watched_llama()
    how: dict[str, Any] = {"documents": TEXTS, "lengths": [256], "metrics": "ppl_compat"}
    bare, ends = byte_tokenizer(), byte_tokenizer()
    bare.bos_token = bare.eos_token = ends.bos_token = None
    (without,) = compare([model], tokenizer=bare, **how).results["models"].values()
    (with_end,) = compare([model], tokenizer=ends, **how).results["models"].values()
    (disjoint,) = (row for row in with_end["ppl_compat"] if row["protocol"] == "lmeval_disjoint")
    assert without["ppl_compat"] == [row for row in with_end["ppl_compat"] if row is not disjoint]
    assert [row["protocol"] for row in with_end["ppl_compat"]] == list(PROTOCOLS)


def test_what_another_version_of_the_package_measured_is_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reads = watched_llama()
    how: dict[str, Any] = {"documents": TEXTS, "tokenizer": TOKENIZER, "pictures": False, "metrics": "ppl_prefix"}
    counts = []
    for version in ("1.0.0", "1.0.0", "1.0.1"):
        monkeypatch.setattr(hf_posswap, "__version__", version)
        compare([model], lengths=[128], out=tmp_path, **how)
        counts.append(reads.count(127))
    assert counts[1] == counts[0] < counts[2]


def scaled_attention(attend: Callable[..., Any], factor: int, *args: Any, **kwargs: Any) -> Any:
    output, weights = attend(*args, **kwargs)
    return factor * output, weights


def test_what_other_code_of_the_package_or_of_a_class_measured_is_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reads = watched_llama()
    how: dict[str, Any] = {"documents": TEXTS, "tokenizer": TOKENIZER, "pictures": False, "metrics": "ppl_prefix"}
    counts, module = [], types.ModuleType("modeling_mine")
    module.__file__ = str(tmp_path / "modeling_mine.py")
    monkeypatch.setitem(sys.modules, "modeling_mine", module)
    monkeypatch.setattr(type(model), "__module__", "modeling_mine")
    for package, code in [("a", "1"), ("a", "1"), ("b", "1"), ("b", "1"), ("b", "2"), ("a", "1")]:
        monkeypatch.setattr(candidates, "package_digest", lambda package=package: package)
        Path(module.__file__).write_text(code)
        compare([model], lengths=[128], out=tmp_path / "out", **how)
        counts.append(reads.count(127))
    assert counts[0] == counts[1] < counts[2] == counts[3] < counts[4] == counts[5]


@pytest.mark.parametrize("place", ["instance", "hook", "class", "attention"])
def test_code_put_in_at_run_time_is_measured_in_each_run(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = watched_llama()
    how: dict[str, Any] = {"documents": TEXTS, "tokenizer": TOKENIZER, "pictures": False, "metrics": "ppl_prefix"}
    layer, perplexities = model.get_submodule("model.layers.0.mlp"), []
    forward, attend = type(layer).forward, AttentionInterface()["sdpa"]
    for factor in (1, 0, 1, 2):
        if place == "instance":
            layer.forward = lambda states, factor=factor: factor * forward(layer, states)
        if place == "hook":
            layer.register_forward_hook(lambda *call, factor=factor: factor * forward(layer, *call[1]))
        if place == "class":
            monkeypatch.setattr(type(layer), "forward", lambda self, x, factor=factor: factor * forward(self, x))
        if place == "attention":
            scaled = functools.partial(scaled_attention, attend, factor)
            register_attention_function("scaled", scaled)
            model.config._attn_implementation = "scaled"
        found = compare([model], lengths=[128], out=tmp_path, **how)
        perplexities.append([m["ppl_prefix"][0]["perplexity"] for m in found.results["models"].values()])
    assert perplexities[0] == perplexities[2]
    assert len({str(each) for each in perplexities}) == 3


def test_a_forward_put_on_an_instance_runs_the_swapped_copy() -> None:
    model, _ = watched_llama()
    how: dict[str, Any] = {"documents": TEXTS, "tokenizer": TOKENIZER, "metrics": "ppl_prefix", "lengths": [128]}
    expected = evaluate(model, "alibi", **how).results["models"]
    stock = model.model.forward
    model.model.forward = lambda *args, **kwargs: stock(*args, **kwargs)
    for name, found in evaluate(model, "alibi", **how).results["models"].items():
        assert found["ppl_prefix"] == expected[name]["ppl_prefix"]


@pytest.mark.parametrize(("old", "new"), [(None, 16), (16, None), (16, 24)])
def test_models_that_are_read_in_other_chunks_are_compared(old: int | None, new: int | None) -> None:
    model, _ = watched_llama()
    document = np.arange(100) % 257
    swapped = hf_posswap.patch_model(copy.deepcopy(model), "yarn", max_length=256)
    expected = compare_short(Scorer(model, 32), Scorer(swapped, 32), document)
    found = compare_short(Scorer(model, 32, prefill=old), Scorer(swapped, 32, prefill=new), document)
    assert vars(found) == pytest.approx(vars(expected), rel=1e-4)


@pytest.mark.slow
def test_what_a_model_cannot_run_is_said_and_left_out(found: dict[str, Any]) -> None:
    base = found["results"]["models"]["base"]
    assert base["cannot_run"] == {"256": "ends at 128 tokens"}
    assert [row["length"] for row in base["ppl_prefix"]] == [128]
    assert max(row["offset"] for row in base["offset_probe"]) + 64 <= 128
    assert "short_reg" not in base


def test_each_model_is_held_against_the_base(found: dict[str, Any]) -> None:
    results = found["results"]
    against = results["comparisons"]["GPT2LMHeadModel+rope"]
    assert [row["length"] for row in against["lengths"]] == [128]
    base, rope = (results["models"][name]["ppl_prefix"][0]["perplexity"] for name in ("base", "GPT2LMHeadModel+rope"))
    assert against["lengths"][0]["difference"] == pytest.approx(math.log(rope / base), abs=1e-6)
    assert against["lengths"][0]["p_holm"] is not None
    short = results["models"]["GPT2LMHeadModel+rope"]["short_reg"]
    assert short["loss"]["difference"] == pytest.approx(against["lengths"][0]["difference"], abs=1e-5)
    assert against["passkey"]["needles"] == 4  # of the one length that both run
    assert set(results["comparisons"]) == {"GPT2LMHeadModel+rope", "GPT2LMHeadModel+alibi"}


def test_the_folder_holds_results_tables_pictures_and_every_unit(found: dict[str, Any]) -> None:
    folder = found["folder"]
    assert json.loads((folder / "results.json").read_text()) == found["results"]
    assert found["results"]["schema"] == 2
    names = {path.name for path in folder.iterdir()} - {".lock"}
    assert names == {
        "curves.csv", "difference-by-length.png", "difference-by-length.svg",
        "loss-by-position.png", "loss-by-position.svg", "needle.csv", "nll", "passkey.png", "passkey.svg",
        "per_doc.jsonl", "perplexity-by-length.png", "perplexity-by-length.svg", "report.html", "results.csv",
        "results.json", "table.md", "table.tex",
    }  # fmt: skip
    table = (folder / "table.md").read_text()
    assert "| model | 128 (1x) | 256 (2x) | far context | sliding window | found | effective length | within" in table
    assert "| ● base | " in table
    assert "ends at 128 tokens" in table
    assert (folder / "curves.csv").read_text().count("GPT2LMHeadModel+rope,perplexity,0,") == 2
    assert (folder / "needle.csv").read_text().count("\n") == 1 + 2 + 2 * 4


@pytest.mark.slow
def test_a_second_run_computes_nothing_and_a_stopped_one_goes_on(
    found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {"documents": TEXTS, "tokenizer": TOKENIZER, "settings": found["settings"]}
    again = compare(sweep(gpt2()), out=found["folder"], **arguments)
    assert again.computed == 0
    assert again.results == found["results"]
    wanted = (found["folder"] / "results.json").read_bytes()

    calls, nll = [0], Scorer.nll

    def stop(self: Scorer, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 30:
            raise KeyboardInterrupt
        return nll(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "nll", stop)
        with pytest.raises(KeyboardInterrupt):
            compare(sweep(gpt2()), out=tmp_path, **arguments)
    kept = (tmp_path / store.LINES).read_bytes().count(b"\n")
    resumed = compare(sweep(gpt2()), out=tmp_path, **arguments)
    assert 0 < kept
    assert resumed.computed + kept == (found["folder"] / store.LINES).read_bytes().count(b"\n")
    assert (tmp_path / "results.json").read_bytes() == wanted


def test_other_weights_or_texts_share_no_unit(found: dict[str, Any]) -> None:
    settings = EvalSettings(lengths=(128,), metrics=("ppl_prefix",))
    for model, texts, computed in ((gpt2(), TEXTS, 0), (gpt2(1), TEXTS, 9), (gpt2(), [f"{t}!"[1:] for t in TEXTS], 9)):
        found_now = compare(
            [Candidate(model, name="base")], documents=texts, tokenizer=TOKENIZER, settings=settings,
            out=found["folder"].parent / "shared",
        )  # fmt: skip
        assert found_now.computed == (computed or 9)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_each_adapter_of_a_model_is_measured_and_so_is_the_model_without(tmp_path: Path) -> None:
    """They have the same weights, of which other ones are at work."""
    shape = {"r": 4, "target_modules": ["c_attn"], "init_lora_weights": False, "fan_in_fan_out": True}
    torch.manual_seed(0)
    model = get_peft_model(gpt2(), LoraConfig(**shape), adapter_name="one").eval()
    model.add_adapter("two", LoraConfig(**shape, lora_alpha=64))
    ids = torch.tensor([TOKENIZER(text, add_special_tokens=False)["input_ids"][:127] for text in TEXTS])
    ids = torch.cat([torch.full((len(ids), 1), 256), ids], dim=1)

    def measured_and_loss(name: str | None) -> tuple[float, float]:
        model.set_adapter(name or "one")
        with torch.no_grad(), nullcontext() if name else model.disable_adapter():
            run = evaluate(model, **arguments)
            return run.results["models"]["PeftModel"]["ppl_prefix"][0]["perplexity"], model(ids, labels=ids).loss.item()

    arguments: dict[str, Any] = {
        "text": TEXTS, "tokenizer": TOKENIZER, "lengths": 128, "metrics": "ppl_prefix", "out": tmp_path,
        "pictures": False,
    }  # fmt: skip
    for name in ("one", "two", None):
        perplexity, loss = measured_and_loss(name)
        assert perplexity == pytest.approx(math.exp(loss), rel=1e-4), name


def test_frequencies_that_were_set_by_hand_are_measured() -> None:
    """They are in no state dict, nor in the config."""
    plain, _ = watched_llama()
    interpolated = copy.deepcopy(plain)
    interpolated.model.rotary_emb.inv_freq /= 4
    candidates = [Candidate(plain, name="base"), Candidate(interpolated, name="interpolated")]
    found = compare(candidates, documents=TEXTS, tokenizer=TOKENIZER, lengths=96, metrics="ppl_prefix").results
    ids = torch.tensor([[256, *text.encode()][:96] for text in TEXTS])
    with torch.no_grad():
        difference = (interpolated(ids, labels=ids).loss - plain(ids, labels=ids).loss).item()
    assert abs(difference) > 1e-3
    assert found["comparisons"]["interpolated"]["lengths"][0]["difference"] == pytest.approx(difference, abs=1e-5)


def test_a_further_length_is_measured_by_every_protocol_anew(tmp_path: Path) -> None:
    """The text of `ppl_compat` ends where the lengths of a model do, which no digest of a longer document says."""
    arguments: dict[str, Any] = {"documents": TEXTS, "tokenizer": TOKENIZER, "metrics": "ppl_compat"}
    for lengths in ((64, 256), (64, 120, 256)):
        resumed = compare(sweep(gpt2()), lengths=lengths, out=tmp_path, pictures=False, **arguments)
    whole = compare(sweep(gpt2()), lengths=(64, 120, 256), **arguments)
    assert resumed.results["models"] == whole.results["models"]
    assert resumed.computed < whole.computed


def test_a_model_that_follows_its_length_is_read_at_each_length() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, rope_parameters=rope, initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    settings = EvalSettings(lengths=(64, 128), metrics=("ppl_prefix",))
    results = evaluate(model, documents=TEXTS, tokenizer=TOKENIZER, settings=settings).results["models"]
    found = results["LlamaForCausalLM"]
    assert (found["one_pass"], found["one_pass_because"]) == (False, "rope type dynamic")
    for row in found["ppl_prefix"]:
        ids = torch.tensor([[256, *text.encode()][: row["length"]] for text in TEXTS])
        with torch.no_grad():
            own = LlamaForCausalLM(config)
            own.load_state_dict(model.state_dict())
            assert row["perplexity"] == pytest.approx(math.exp(own.eval()(ids, labels=ids).loss.item()), rel=1e-4)


def test_costs_are_reported_where_there_is_room_to_decode() -> None:
    settings = EvalSettings(lengths=(100, 128), metrics=("cost",))
    models = evaluate(gpt2(), "rope", documents=TEXTS, tokenizer=TOKENIZER, settings=settings).results["models"]
    assert [row["length"] for row in models["GPT2LMHeadModel"]["cost"]] == [100]  # its table ends at 128
    assert [row["length"] for row in models["GPT2LMHeadModel+rope"]["cost"]] == [100, 128]
    assert models["GPT2LMHeadModel+rope"]["cost"][1]["cache_bytes"] == 2 * 16 * 128 * 4


def test_costs_are_measured_again_with_another_number_of_threads_and_losses_are_not(tmp_path: Path) -> None:
    settings = EvalSettings(lengths=(64,), metrics=("ppl_prefix", "cost"))
    before, computed = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            arguments: dict[str, Any] = {"settings": settings, "out": tmp_path, "pictures": False}
            evaluation = evaluate(gpt2(), documents=TEXTS, tokenizer=TOKENIZER, **arguments)
            computed.append(evaluation.computed)
            assert evaluation.results["environment"]["threads"] == threads
    finally:
        torch.set_num_threads(before)
    assert computed == [len(TEXTS) + 1, 1, 0]


def test_a_model_of_no_known_family_is_measured_length_by_length() -> None:
    config = MambaConfig(vocab_size=257, hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=None)
    settings = EvalSettings(lengths=(32, 64), metrics=("ppl_prefix", "offset_probe"))
    found = evaluate(MambaForCausalLM(config).eval(), documents=TEXTS, tokenizer=TOKENIZER, settings=settings).results
    model = found["models"]["MambaForCausalLM"]
    assert (model["one_pass"], model["one_pass_because"]) == (False, "no family describes it")
    assert [row["length"] for row in model["ppl_prefix"]] == [32, 64]
    assert "takes no position_ids" in model["not_measured"]["offset_probe"]


def test_copies_of_a_document_are_named() -> None:
    """They counted as independent, which made four texts eight, and a verdict of them."""
    arguments: dict[str, Any] = {"tokenizer": TOKENIZER, "settings": SETTINGS}
    notes = evaluate(gpt2(), "rope", documents=TEXTS[:4] * 2, **arguments).results["notes"]
    assert [note for note in notes if note.startswith("4 of 8 documents equal another one as far as they are read")]
    notes = evaluate(gpt2(), "rope", documents=TEXTS[:8], **arguments).results["notes"]
    assert not [note for note in notes if "equal another" in note]


def test_few_documents_give_no_verdict() -> None:
    settings = EvalSettings(**{**vars(SETTINGS), "metrics": DEFAULT_METRICS})
    run = evaluate(gpt2(), "rope", documents=TEXTS[:4], tokenizer=TOKENIZER, settings=settings)
    swapped = run.results["models"]["GPT2LMHeadModel+rope"]
    assert swapped["short_reg"]["loss"]["verdict"] == "no verdict"
    assert run.results["comparisons"]["GPT2LMHeadModel+rope"]["lengths"][0]["p"] is None
    assert "Only 4 documents: with fewer than 8 there is no verdict" in str(run)
    assert "no effective length:" in str(run)
    verdict, details = str(run).split("Details:")
    assert (
        "GPT2LMHeadModel+rope: No verdict: 4 documents are too few for a verdict; 8 are needed. Measured: 2x" in verdict
    )
    (line,) = (line for line in details.splitlines() if line.startswith("- GPT2LMHeadModel+rope: Inside the window: "))
    assert "; no verdict: 4 documents are too few" in line
    assert "No verdict on far context: 128 tokens beyond the window change" in line


def test_a_model_in_training_is_measured_without_dropout_and_stays_in_training() -> None:
    settings = EvalSettings(lengths=(64,), metrics=("ppl_prefix",))
    arguments: dict[str, Any] = {"documents": TEXTS, "tokenizer": TOKENIZER, "settings": settings}
    still, training = gpt2(), gpt2().train()
    wanted, found = (evaluate(model, **arguments).results["models"] for model in (still, training))
    assert training.training
    assert found["GPT2LMHeadModel"]["ppl_prefix"] == wanted["GPT2LMHeadModel"]["ppl_prefix"]


def test_a_shell_shares_weights_and_is_patched_alone() -> None:
    model = gpt2()
    shell = shell_of(model)
    hf_posswap.patch_model(shell, "rope")
    assert shell.lm_head.weight is model.lm_head.weight
    assert not hasattr(model, "_posswap")
    assert getattr(model.config, "posswap", None) is None
    ids = torch.arange(20)[None]
    untouched = gpt2()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, untouched(ids).logits, rtol=0, atol=0)
        assert (shell(ids).logits - model(ids).logits).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("candidates", "more", "error", "message"),
    [
        ([], {}, OptionError, r"models with unique names, got \[\]"),
        ([gpt2, gpt2], {}, OptionError, r"got \['GPT2LMHeadModel', 'GPT2LMHeadModel'\]: name each .*Candidate\(name"),
        ([gpt2], {"tokenizer": None}, DataError, "a model object has no tokenizer: give one by"),
        ([gpt2], {"settings": EvalSettings(lengths=(64, 512))}, PositionRangeError, r"no model can run \[512\] tokens"),
        ([gpt2], {"documents": []}, DataError, "0 texts: there is no document to measure on"),
        ([gpt2], {"documents": ["short"] * 9}, DataError, "0 of 9 held-out documents have 128 tokens"),
        (
            [gpt2],
            {"documents": [{"body": "x"}]},
            DataError,
            r"text 0 has no text under 'text', it has columns \['body'\]",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(candidates: Any, more: Any, error: type[Exception], message: str) -> None:
    arguments = {"documents": TEXTS, "tokenizer": TOKENIZER, "settings": EvalSettings(lengths=(64, 128))} | more
    with pytest.raises(error, match=message):
        compare([make() for make in candidates], **arguments)


def test_a_folder_in_use_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with store.RunStore(tmp_path), pytest.raises(CheckpointError, match="another process is writing to"):
        compare([tmp_path / "no-model"], documents=TEXTS, tokenizer=TOKENIZER, out=tmp_path)
    with pytest.raises(CheckpointError, match="no-model"):  # and now it is the model that is missing
        compare([tmp_path / "no-model"], documents=TEXTS, tokenizer=TOKENIZER, out=tmp_path)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    small = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=WINDOW, n_embd=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(DataError, match="has embeddings for 0 to 99: use the tokenizer that belongs to the model"):
        evaluate(small, documents=TEXTS, tokenizer=TOKENIZER, settings=EvalSettings(lengths=(64,)))


def test_models_of_different_tokenizers_are_refused_however_they_are_given(tmp_path: Path) -> None:
    """Each reads another number of characters in as many tokens."""
    hf_posswap.save(gpt2(), tmp_path / "bytes", tokenizer=TOKENIZER)
    words = Tokenizer(BPE(vocab=TOKENIZER.get_vocab() | {"世界": 257}, merges=[]))
    other = PreTrainedTokenizerFast(tokenizer_object=words, bos_token=TOKENIZER.bos_token)
    hf_posswap.save(gpt2(1), tmp_path / "other", tokenizer=other)
    folders = [str(tmp_path / name) for name in ("bytes", "other")]
    first, second = (hf_posswap.load(folder) for folder in folders)
    arguments: dict[str, Any] = {"documents": TEXTS, "lengths": 32, "metrics": "ppl_prefix"}
    for models in (folders, [first, folders[1]], [folders[0], second], [first, Candidate(second, name="second")]):
        with pytest.raises(DataError, match=r"have different tokenizers: their losses per token cannot be compared"):
            compare(models, **arguments)
    added = copy.deepcopy(TOKENIZER)
    added.add_tokens(["import torch"])  # which is not in the sample text
    hf_posswap.save(gpt2(2), tmp_path / "added", tokenizer=added)
    with pytest.raises(DataError, match="give one by --tokenizer, or by tokenizer in Python"):
        compare([folders[0], str(tmp_path / "added")], **arguments)
    truncating = copy.deepcopy(TOKENIZER)
    truncating("a", truncation=True, max_length=7)  # a state of the backend, and no other ids
    hf_posswap.save(gpt2(3), tmp_path / "truncating", tokenizer=truncating)
    tokenizer_for([Candidate(folders[0]), Candidate(str(tmp_path / "truncating"))])
    second.config.name_or_path = "a folder that is gone"
    compare([folders[0], second], **arguments)


def test_no_memory_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "available_bytes", lambda device: 1000)
    with pytest.raises(NotEnoughMemoryError, match="128 tokens of GPT2LMHeadModel need about"):
        evaluate(gpt2(), "rope", documents=TEXTS, tokenizer=TOKENIZER, settings=SETTINGS)


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_what_was_measured(tmp_path: Path) -> None:
    model = gpt2(tie_word_embeddings=False)
    with torch.no_grad():
        model.transformer.wte.weight[ord("8")] = math.nan
    texts = ["a" * 200, "b" * 200, "8" * 200]
    settings = EvalSettings(lengths=(64,), metrics=("ppl_prefix",))
    with pytest.raises(NumericError, match="GPT2LMHeadModel: the loss of token 1 is not finite; it is in float32"):
        compare([model], documents=texts, tokenizer=TOKENIZER, settings=settings, out=tmp_path)
    assert (tmp_path / store.LINES).read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"lengths": (1,)}, r"at least 2 tokens, got \[1\]"),
        ({"documents": 1}, "documents is a whole number of at least 2, got 1"),
        ({"seed": -1}, "seed is a whole number of at least 0, got -1"),
        ({"depths": (2.0,)}, r"depths lie between 0 and 1, got \[2.0\]"),
        ({"metrics": ()}, "metrics names what to measure, got none"),
        ({"metrics": ("longppl",)}, "longppl needs key_spans"),
    ],
)
def test_impossible_settings_are_refused(field: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        EvalSettings(**field)
    with pytest.raises(KeyError, match="unknown metric 'ppl'"):
        EvalSettings(metrics=("ppl",))


def test_longppl_is_of_the_key_tokens_of_a_file(tmp_path: Path) -> None:
    from hf_posswap.evaluation.longppl import find_key_spans

    model = gpt2()
    documents = [np.array([256, *text.encode()][:128]) for text in TEXTS]
    spans = find_key_spans(Scorer(model), "itself", documents, short=32, stride=8, gain=0.1, limit=9.0)
    spans.save(tmp_path / "keys.json")
    settings = EvalSettings(lengths=(128,), metrics=("longppl",), key_spans=tmp_path / "keys.json")
    found = evaluate(model, documents=TEXTS, tokenizer=TOKENIZER, settings=settings).results["models"][
        "GPT2LMHeadModel"
    ]
    assert found["longppl"]["key_tokens"] == sum(int(mask.sum()) for mask in spans.masks(documents)) > 0
    other = evaluate(model, documents=TEXTS[::-1], tokenizer=TOKENIZER, settings=settings).results["models"]
    assert "belong to 9 other documents" in other["GPT2LMHeadModel"]["not_measured"]["longppl"]
    longer = EvalSettings(lengths=(128, 256), metrics=("longppl",), key_spans=tmp_path / "longer.json")
    rows = [np.array([256, *text.encode()][:256]) for text in TEXTS]
    find_key_spans(
        Scorer(hf_posswap.patch_model(gpt2(), "rope", max_length=256)),
        "rope",
        rows,
        short=32,
        stride=8,
        gain=0.1,
        limit=9.0,
    ).save(tmp_path / "longer.json")
    found = evaluate(model, "rope", documents=TEXTS, tokenizer=TOKENIZER, settings=longer).results["models"]
    assert found["GPT2LMHeadModel"]["not_measured"]["longppl"] == (
        "GPT2LMHeadModel ends at 128 tokens, and the key spans are of texts of 256."
    )


def test_names_of_folders_stay_text_and_tell_nothing_of_the_folders_above(tmp_path: Path) -> None:
    home = tmp_path / "home-of-a-user"
    names = ["a|b", "*c* _d_ `e`", "<img src=x onerror=alert(1)>", "[f](g)", "h_i"]
    for number, name in enumerate(names):
        hf_posswap.save(gpt2(number), home / name, tokenizer=TOKENIZER)
    texts = home / "texts of <me>"
    texts.mkdir()
    for number, text in enumerate(TEXTS):
        (texts / f"{number}.txt").write_text(text)
    settings = EvalSettings(lengths=(128,), metrics=("ppl_prefix",))
    folders = [home / name for name in names]
    compare(folders, documents=texts, settings=settings, out=tmp_path / "out", pictures=False)
    for file in ("results.json", "report.html", "table.md", "curves.csv"):
        assert home.name not in (tmp_path / "out" / file).read_text(), file
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert lines[2] == "- &lt;img src=x onerror=alert(1)&gt;: Not swapped: it was measured only inside the window."
    rows = lines[6:]  # after a verdict for each model
    assert "texts of &lt;me&gt;" in rows[0]
    shown = [re.split(r"(?<!\\)\|", row)[1].strip() for row in rows[4:9]]
    assert shown == [
        "● a\\|b",
        "◆ \\*c\\* \\_d\\_ \\`e\\`",  # ■ is a control's
        "▲ &lt;img src=x onerror=alert(1)&gt;",
        "▼ \\[f\\](g)",
        "✚ h_i",
    ]
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows[2:9]} == {4}  # one cell each
    assert "<img" not in (tmp_path / "out" / "report.html").read_text()


def test_a_model_is_called_by_its_folder_however_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine")
    assert Candidate(".").label == "mine"
    assert Candidate("..", "rope").label == f"{tmp_path.name}+rope"
    assert Candidate("below/").label == "below"


def test_facts_are_in_the_documents_that_are_measured_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one task: the others have the same text for all."""
    prompts: dict[str, str] = {}

    def recorded(tokenizer: Any, task: str, **options: Any) -> Any:
        prompt = ruler_prompt(tokenizer, task, **options)
        prompts[task] = bytes(token for token in prompt.ids if token < 256).decode()
        return prompt

    monkeypatch.setattr(measures, "ruler_prompt", recorded)
    patched = hf_posswap.patch_model(gpt2(), "rope", max_length=1200)
    texts = [f"{number}: " + " ".join(f"word {number * i}," for i in range(300)) for number in range(6)]
    settings = EvalSettings(lengths=(1200,), trials=1, metrics=("ruler_lite",))
    results = evaluate(patched, documents=texts, tokenizer=TOKENIZER, out=tmp_path, settings=settings).results
    (measured,) = (row["ruler_lite"] for row in results["models"].values())
    assert measured["left_out"] == {}
    assert [cell["task"] for cell in measured["cells"]] == list(TASKS) == list(prompts)
    assert [task for task, prompt in prompts.items() if re.search(r"word \d+, word", prompt)] == [IN_DOCUMENTS]


def test_tasks_are_shown_with_what_each_model_keeps_of_the_baselines_score(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scorers: dict[int, int] = {}

    def score(scorer: Any, prompt: Any) -> float:  # the first model to be asked, the base, knows more
        number = scorers.setdefault(id(scorer), len(scorers))
        return (len(prompt.ids) + prompt.ids[-1]) % 5 / 4 * (0.5 if number else 1.0)

    monkeypatch.setattr(measures, "ruler_score", score)
    texts = [f"{number}: " + " ".join(f"word {number * i}," for i in range(300)) for number in range(6)]
    settings = EvalSettings(lengths=(1200, 1300), trials=2, metrics=("ruler_lite",))
    base, other = (hf_posswap.patch_model(gpt2(), scheme, max_length=1300) for scheme in ("rope", "alibi"))
    models = [Candidate(base, name="base"), Candidate(other, name="other")]
    evaluation = compare(models, documents=texts, tokenizer=TOKENIZER, out=tmp_path, settings=settings)
    (rows,) = (compared["ruler_lite"] for compared in evaluation.results["comparisons"].values())
    assert [(row["length"], row["prompts"]) for row in rows] == [(1200, 2 * len(TASKS)), (1300, 2 * len(TASKS))]
    scores = [
        np.mean([cell["score"] for cell in model["ruler_lite"]["cells"] if cell["length"] == 1200])
        for model in evaluation.results["models"].values()
    ]
    assert 0 < rows[0]["base_score"] == pytest.approx(scores[0])
    assert rows[0]["score"] == pytest.approx(scores[1]) == pytest.approx(scores[0] / 2)
    assert rows[0]["kept"] == pytest.approx(50)
    assert rows[0]["difference"] == pytest.approx(-scores[0] / 2)
    assert rows[0]["low"] < rows[0]["difference"] < rows[0]["high"] < 0
    grid = grid_of(evaluation.results)
    shown = dict(zip(grid.header, grid.rows[1][2], strict=True))
    assert shown["tasks"].startswith(f"1200: {scores[1]:.0%}, 1300: ")
    assert shown["tasks kept"].startswith("1200: 50% (-0.")
    assert "tasks kept: percentage of the baseline's score" in str(evaluation).lower()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"Tasks at 1,200 tokens: {scores[1]:.0%}" in page
    header_line, *_, line = (tmp_path / "results.csv").read_text(encoding="utf-8").splitlines()
    wide = dict(zip(header_line.split(","), line.split(","), strict=True))
    assert float(wide["tasks_1200"]) == pytest.approx(scores[1])
    assert float(wide["tasks_kept_1200"]) == pytest.approx(50)


def test_a_number_of_a_module_that_was_changed_is_measured_anew(tmp_path: Path) -> None:
    """Neither weights nor config show a scale of the scores: results of before it may not be taken for those after."""
    model: Any = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=300)
    ).eval()
    settings = EvalSettings(lengths=(16, 64), metrics=("ppl_prefix",), documents=4)

    def perplexities(out: Path) -> list[float]:
        arguments: dict[str, Any] = {"documents": TEXTS, "tokenizer": TOKENIZER, "settings": settings}
        found = compare([Candidate(model, name="m")], **arguments, out=out, pictures=False)
        return [row["perplexity"] for row in found.results["models"]["m"]["ppl_prefix"]]

    first = perplexities(tmp_path / "kept")
    assert perplexities(tmp_path / "kept") == first
    for change in (lambda: setattr(model.model.layers[0].self_attn, "scaling", 0.9),
                   lambda: setattr(model.model.rotary_emb, "attention_scaling", 1.7),
                   lambda: setattr(model.model.layers[0].mlp, "act_fn", QuickGELUActivation())):  # fmt: skip
        before = fingerprint(model)
        change()
        assert fingerprint(model) != before
        again = perplexities(tmp_path / "kept")
        assert again == perplexities(tmp_path / f"new {fingerprint(model)}") != first
        first = again
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert perplexities(tmp_path / "kept") != first
    assert perplexities(tmp_path / "kept") == first
