"""What the table says of graphs: each row that is "run by a test", run by onnxruntime and torch beside hf_posswap.

The oracle is the swapped model in PyTorch, reading each text alone, without padding.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.checkpoints.exports.claims import Claim
from hf_posswap.checkpoints.exports.claims_files import GRAPH_ENGINES
from hf_posswap.checkpoints.exports.graph_file import write_graph
from hf_posswap.checkpoints.exports.mechanism import position_config_of
from hf_posswap.checkpoints.exports.rules import CLAIMS, claim_for
from hf_posswap.checkpoints.exports.run import Export, export
from hf_posswap.checkpoints.exports.traced import behind_padding, follow_length, signature_of
from hf_posswap.errors import (
    CheckpointError,
    MissingDependencyError,
    SwapVerificationError,
    UnsupportedModelError,
    UnsupportedSwapError,
)
from hf_posswap.patching.inspect.describe import read_config
from hf_posswap.testing.tiny import tiny_model
from tests.contract.models import LENGTH, PADDING, TINY, VOCABULARY, build
from tests.contract.paired import PAIRED
from tests.serving.seen import Record, Seen, swap_words

onnxruntime = pytest.importorskip(
    "onnxruntime", reason="onnxruntime is not installed, so no claim about it is tested: pip install -e '.[onnx]'"
)
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONG = 4 * LENGTH
NEW = 8  # tokens that are generated
BOUND = 1e-4  # nats; float32 on both sides, and logits of 3 to 5
WRONG = 0.1  # nats; what another mechanism is at least off by on these weights

# model, swap, its options, the longest text that is read
CASES: dict[str, tuple[str, str | None, dict[str, Any], int]] = {
    "llama": ("llama", None, {}, LONG),
    "yarn": ("llama", "yarn", {"factor": 4.0}, LONG),
    "longrope": ("llama", "longrope", {"factor": 4.0} | LISTS, LONG),
    "dynamic": ("llama", "dynamic", {"factor": 4.0}, LONG),
    "dynamic, neox": ("gpt_neox", "dynamic", {"factor": 4.0}, LONG),
    "linear, neox": ("gpt_neox", "linear", {"factor": 4.0}, LONG),
    "gemma3": ("gemma3_text", None, {}, LENGTH),
    "yarn, gemma3": ("gemma3_text", "yarn", {"factor": 4.0}, LONG),
    "longrope, gemma3": ("gemma3_text", "longrope", {"factor": 4.0} | LISTS, LONG),
    "dynamic, gemma3": ("gemma3_text", "dynamic", {"factor": 4.0}, LONG),
    "modernbert": ("modernbert", None, {}, LENGTH),
    "dynamic, modernbert": ("modernbert", "dynamic", {"factor": 4.0}, LONG),
    "rnope": ("llama", "rnope", {"every": 2}, LONG),
    "self_extend": ("llama", "self_extend", {"window": 8, "group": 4}, 3 * LENGTH),
    "dual_chunk": ("llama", "dual_chunk", {}, LENGTH),
    "learned": ("gpt2", None, {}, LENGTH),
    "sinusoidal": ("gpt2", "sinusoidal", {"max_length": LONG}, LONG),
    "nope": ("gpt2", "nope", {"max_length": LONG}, LONG),
    "rope": ("gpt2", "rope", {"max_length": LONG}, LONG),
    "dynamic, gpt2": ("gpt2", "dynamic", {"factor": 4.0}, LONG),
    "alibi": ("gpt2", "alibi", {"max_length": LONG}, LONG),
    "kerple": ("gpt2", "kerple", {"max_length": LONG}, LONG),
    "fire": ("gpt2", "fire", {"max_length": LONG}, LONG),
    "xpos": ("gpt2", "xpos", {"max_length": LONG}, LONG),
    "rope, opt": ("opt", "rope", {"max_length": LONG}, LONG),
    "learned, bert": ("bert", None, {}, LENGTH),
    "learned, roberta": ("roberta", None, {}, LENGTH),
    "t5, bert": ("bert", "t5", {"max_length": LONG}, LONG),
}
SLOW = ("longrope", "dynamic", "longrope, gemma3", "dynamic, modernbert", "self_extend", "learned", "t5, bert")
"""The cases that run with the slow tests, between them on all of the code; the others are exhaustive."""
PROGRAMS = (*SLOW, "llama", "alibi", "modernbert")
"""The cases that torch.export is tried with as well: ONNX goes through it."""
MARKED = [pytest.param(case, marks=pytest.mark.slow if case in SLOW else pytest.mark.exhaustive) for case in CASES]
# Each type of layers has rope parameters of its own there, and the frequencies are far enough apart to tell.
BY_LAYER_TYPE: dict[str, dict[str, Any]] = {
    "gemma3_text": {"max_position_embeddings": LENGTH, "sliding_window": 8, "pad_token_id": PADDING},
    "modernbert": {
        "max_position_embeddings": LENGTH,
        "local_attention": 8,
        "pad_token_id": PADDING,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
}
Run = Callable[[dict[str, Tensor]], Tensor]


def swapped(case: str) -> Any:
    name, scheme, options, _ = CASES[case]
    model = build(name) if name in TINY else tiny_model(name, meta=False, vocab_size=VOCABULARY, **BY_LAYER_TYPE[name])
    return model if scheme is None else patch_model(model, scheme, **options)


def saved(folder: Path, model: Any) -> Path:
    hf_posswap.save(model, folder)
    return folder


def row_of(folder: Path, target: str) -> Claim:
    return claim_for(target, position_config_of(read_config(folder)))


def opened(made: Export) -> Run:
    """Return what runs the graph that was written, and gives its first output."""
    names = made.notes["takes"].partition(":")[0].split(", ")
    path = made.folder
    assert path is not None
    if path.suffix == ".pt2":
        module = torch.export.load(path).module()
        return lambda inputs: module(**{name: inputs[name] for name in names})[0].detach()
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == names
    return lambda inputs: torch.from_numpy(session.run(None, {name: inputs[name].numpy() for name in names})[0])


def words(count: int) -> Tensor:
    return torch.randint(5, VOCABULARY, (count,), generator=torch.Generator().manual_seed(count))


def batch(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    """Return texts of several lengths as one batch."""
    width = max(map(len, rows))
    made: dict[str, list[Tensor]] = {"input_ids": [], "attention_mask": []}
    for row in rows:
        fill = row.new_full((width - len(row),), PADDING)
        order = (lambda a, b: (a, b)) if side == "right" else (lambda a, b: (b, a))
        made["input_ids"].append(torch.cat(order(row, fill)))
        made["attention_mask"].append(torch.cat(order(torch.ones_like(row), torch.zeros_like(fill))))
    inputs = {name: torch.stack(tensors) for name, tensors in made.items()}
    return inputs | {"token_type_ids": torch.zeros_like(inputs["input_ids"])}


def lengths_of(longest: int) -> list[int]:
    return [count for count in sorted({1, 2, 9, LENGTH, LENGTH + 1, longest}) if count <= longest]


def differences(run: Run, case: str, longest: int) -> Iterator[float]:
    """Give how far log probabilities are from the model's, text by text, in nats: alone and in padded batches."""
    sides = ("right",) if case == "learned, bert" else ("right", "left")  # stock BERT counts padding
    alone = [[words(count)] for count in lengths_of(longest)]
    near = min(longest, LENGTH)  # angles that follow the length are those of the longest row
    together = [[words(near), words(3), words(near - 1)], [words(5), words(6)]]
    for rows, side in [*((one, "right") for one in alone), *((many, side) for many in together for side in sides)]:
        found = run(batch(rows, side)).double().log_softmax(-1)
        assert found.isfinite().all()
        for row, text in zip(found, rows, strict=True):
            with torch.no_grad():
                expected = swapped(case)(text[None]).logits[0].double().log_softmax(-1)
            own = row[: len(text)] if side == "right" else row[len(row) - len(text) :]
            yield float((own - expected).abs().max())


def greedy(run: Run, case: str, longest: int) -> int:
    """Return how many of NEW tokens that `generate` adds up to the `longest` text the graph takes as well."""
    begun = words(longest - NEW)[None]
    asked = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "use_cache": False}  # a graph has none
    ids = swapped(case).generate(begun, **asked)[0]
    return int((run(batch([ids], "right"))[0, -NEW - 1 : -1].argmax(-1) == ids[-NEW:]).sum())


def check(case: str, target: str, path: Path, folder: Path, record: Record) -> None:
    made = export(saved(folder, swapped(case)), target, path)
    assert row_of(folder, target).known == "tested"
    assert made.verdict == "exact"
    assert f"'{path}'" in made.command
    assert "it gives the model's outputs for texts of 1 to" in made.notes["compared"]
    name, scheme, options, longest = CASES[case]
    run = opened(made)
    most, new = max(differences(run, case, longest)), NEW if swapped(case).can_generate() else 0
    same = greedy(run, case, longest) if new else 0
    seen = Seen(GRAPH_ENGINES[target], name, swap_words(scheme, options), lengths_of(longest), most, same, new)
    seen.keep(record)
    assert most < BOUND
    assert same == new


@pytest.mark.parametrize("case", MARKED)
def test_onnxruntime_computes_what_the_model_does(case: str, tmp_path: Path, record_property: Record) -> None:
    check(case, "onnx", tmp_path / "m.onnx", tmp_path / "x", record_property)


@pytest.mark.parametrize("case", [each for each in MARKED if each.values[0] in PROGRAMS])
def test_a_program_of_torch_computes_what_the_model_does(case: str, tmp_path: Path, record_property: Record) -> None:
    check(case, "torch", tmp_path / "m.pt2", tmp_path / "x", record_property)


@pytest.mark.slow
def test_every_row_that_says_so_is_tested(tmp_path: Path) -> None:
    folders = [saved(tmp_path / str(number), swapped(case)) for number, case in enumerate(CASES)]
    folders.append(saved(tmp_path / "query", by_query()))
    for target in ("onnx", "torch"):
        met = {row_of(folder, target) for folder in folders}
        assert {row for row in CLAIMS[target] if row.known == "tested"} <= met


def by_query() -> Any:
    return patch_model(build("gpt2"), "dynamic", factor=4.0, follow="query")


def test_what_depends_on_the_numbers_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "x", by_query())
    with pytest.raises(UnsupportedSwapError, match="onnx cannot run .*use follow='sequence'. Nothing was written"):
        export(folder, "onnx", tmp_path / "m.onnx")
    said = "torch .* cannot make a graph of GPT2LMHeadModel with dynamic for any batch and length: .*Nothing"
    capfd.readouterr()
    with pytest.raises(UnsupportedSwapError, match=said):  # as a mechanism from elsewhere may be, which has no row
        write_graph(folder, tmp_path / "m.pt2", position_config_of(read_config(folder)))
    assert not (tmp_path / "m.pt2").exists()
    assert "forward(" not in capfd.readouterr().err  # torch shows the whole graph up to there


def test_the_version_is_that_of_the_table() -> None:
    assert GRAPH_ENGINES["onnx"].startswith(f"onnxruntime {importlib.metadata.version('onnxruntime')} ")


@pytest.mark.slow
def test_beyond_the_rows_of_a_table_onnxruntime_stops(tmp_path: Path) -> None:
    made = export(saved(tmp_path / "x", swapped("learned")), "onnx", tmp_path / "m.onnx")
    with pytest.raises(Exception, match="out of data bounds"):
        opened(made)(batch([words(LENGTH + 1)], "right"))


@pytest.mark.slow
def test_longrope_with_the_angles_of_a_short_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_traced(model: nn.Module) -> None:
        model.get_submodule("model.rotary_emb").rope_type = "default"  # what a graph of a short text would hold

    monkeypatch.setattr("hf_posswap.checkpoints.exports.traced.follow_length", as_traced)
    folder = saved(tmp_path / "x", swapped("longrope"))
    with pytest.raises(SwapVerificationError, match=r"from the model's, more than 0.001. Nothing was written"):
        export(folder, "torch", tmp_path / "m.pt2")
    assert not (tmp_path / "m.pt2").exists()


def test_a_graph_of_torch_that_holds_for_some_lengths_is_refused(tmp_path: Path) -> None:
    config = transformers.MptConfig(vocab_size=97, d_model=32, n_heads=4, n_layers=2, max_seq_len=64, expansion_ratio=2)
    transformers.MptForCausalLM(config).save_pretrained(tmp_path / "mpt")  # its own code compares the length with 64
    with pytest.raises(SwapVerificationError, match="runs at some lengths only, .* 'onnx' may serve all: Guard failed"):
        export(str(tmp_path / "mpt"), "torch", tmp_path / "m.pt2")
    assert not (tmp_path / "m.pt2").exists()
    assert "alone and padded on either side" in str(export(str(tmp_path / "mpt"), "onnx", tmp_path / "m.onnx"))


@pytest.mark.slow
def test_weights_too_large_for_the_file_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_posswap.checkpoints.exports.graph_file.LARGEST", 0)
    folder = saved(tmp_path / "x", swapped("rope").to(torch.bfloat16))
    made = export(folder, "onnx", tmp_path / "out" / "m.onnx")
    assert made.notes["weights"] == "float32, in m.onnx.data next to it"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["m.onnx", "m.onnx.data"]
    inputs = batch([words(LENGTH)], "right")
    with torch.no_grad():
        expected = hf_posswap.load(folder, dtype=torch.float32)(inputs["input_ids"]).logits
    assert (opened(made)(inputs) - expected).abs().max() < BOUND
    (tmp_path / "out" / "m.onnx").unlink()
    with pytest.raises(CheckpointError, match=r"m\.onnx\.data already exists: give a new file name"):
        export(folder, "onnx", tmp_path / "out" / "m.onnx")


@pytest.mark.slow
def test_a_base_model_gives_its_states(tmp_path: Path) -> None:
    model = patch_model(transformers.BertModel(build("bert").config).eval(), "alibi", max_length=LONG)
    made = export(saved(tmp_path / "x", model), "onnx", tmp_path / "x" / "model.onnx")
    assert made.notes["takes"].startswith("input_ids, attention_mask, token_type_ids: int64")
    assert made.notes["gives"] == "last_hidden_state"
    inputs = batch([words(LONG), words(7)], "right")
    with torch.no_grad():
        expected = model(words(7)[None]).last_hidden_state
    assert (opened(made)(inputs)[1:, :7] - expected).abs().max() < BOUND


OTHERS = [
    *(("bloom", scheme) for scheme in (None, "rope", "t5")),
    *((name, scheme) for name in ("mpt", "gptj", "gpt_neo", "deepseek_v3", "qwen3_moe", "falcon", "gpt_oss")
      for scheme in ("rope", "alibi")),
    *((name, "alibi") for name in ("codegen", "mixtral", "cohere", "glm", "phi", "stablelm", "granite", "xglm")),
    *((name, "alibi") for name in ("deberta-v2", "roformer", "distilbert", "albert", "electra", "mpnet", "esm")),
]  # fmt: skip
IN_SLOW = (("bloom", None), ("bloom", "rope"), ("deepseek_v3", "alibi"))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [pytest.param(*case, marks=pytest.mark.slow if case in IN_SLOW else pytest.mark.exhaustive) for case in OTHERS],
)
def test_models_of_other_families_become_graphs(name: str, scheme: str | None, tmp_path: Path) -> None:
    model = tiny_model(name, meta=False, vocab_size=VOCABULARY)
    if scheme is not None:
        patch_model(model, scheme, max_length=LONG)
    made = export(saved(tmp_path / "x", model), "torch", tmp_path / "m.pt2")
    assert made.verdict == "exact"
    rows = [words(LENGTH), words(LENGTH - 3)]
    asked = batch(rows, "right")
    found = opened(made)(asked)
    for row, text in zip(found, rows, strict=True):
        with torch.no_grad():
            expected = model(text[None])[0][0]
        assert (row[: len(text)] - expected).abs().max() < BOUND


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), [("bart", "rope"), ("t5", None), ("t5", "alibi"), ("longt5", "rope")])
def test_an_encoder_with_a_decoder_takes_both_texts(name: str, scheme: str | None, tmp_path: Path) -> None:
    model = PAIRED[name].build()
    if scheme is not None:
        patch_model(model, scheme, max_length=LONG)
    made = export(saved(tmp_path / "x", model), "onnx", tmp_path / "m.onnx")
    assert "decoder_input_ids, decoder_attention_mask" in made.notes["takes"]
    asked = {"input_ids": words(LENGTH + 5)[None], "decoder_input_ids": words(LENGTH + 9)[None]}
    masks = {name.replace("input_ids", "attention_mask"): torch.ones_like(ids) for name, ids in asked.items()}
    with torch.no_grad():
        expected = model(**asked).logits
    assert (opened(made)(asked | masks) - expected).abs().max() < BOUND


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_by_length_are_those_of_transformers(kind: str) -> None:
    x = torch.zeros(1, 1)
    for length in (1, LENGTH - 1, LENGTH, LENGTH + 1, LONG):
        places = torch.arange(length)[None]
        model = swapped(kind)  # a new one each time: stock "dynamic" remembers the longest text
        expected = model.model.rotary_emb(x, places)
        follow_length(model)
        for found in (model.model.rotary_emb(x, places), model.model.rotary_emb(x, position_ids=places)):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
        model.model.rotary_emb(x, torch.arange(2 * LONG)[None])
        torch.testing.assert_close(model.model.rotary_emb(x, places), expected, rtol=1e-5, atol=2e-5)


def test_positions_begin_behind_padding() -> None:
    mask = torch.tensor([[0, 0, 1, 0, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    assert behind_padding(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("target", ["onnx", "torch", "vllm"])
@pytest.mark.parametrize("config", [transformers.ViTConfig(), transformers.CLIPConfig(), transformers.Gemma3Config()])
def test_models_of_images_are_refused(target: str, config: Any, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    out = {"onnx": tmp_path / "m.onnx", "torch": tmp_path / "m.pt2"}.get(target)
    with pytest.raises(UnsupportedModelError, match=f"{type(config).__name__} belongs to a model that reads images"):
        export(tmp_path, target, out)


def test_what_reads_no_text_is_refused() -> None:
    config = transformers.ViTConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, image_size=32)
    with pytest.raises(UnsupportedSwapError, match="by token ids; ViTForImageClassification does not"):
        signature_of(transformers.ViTForImageClassification(config).eval())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("LlamaForSequenceClassification", "no padding token is defined"),
        ("BertForMultipleChoice", "is invalid for input of size 2"),
        ("BartForSequenceClassification", "does not match the shape of the indexed tensor"),
    ],
)
def test_a_head_that_does_not_run_with_a_batch_of_texts_is_refused(name: str, problem: str) -> None:
    model = tiny_model(name, meta=False, pad_token_id=None if "Llama" in name else 1)
    with pytest.raises(
        UnsupportedSwapError, match=f"{name} does not run with that: .*{problem}.* Set the missing value"
    ):
        signature_of(model.eval())


def test_the_one_score_of_a_text_is_compared(tmp_path: Path) -> None:
    """It comes from the first token, so padding on the left changes it: a softmax over one score would hide that."""
    model = tiny_model("BertForSequenceClassification", meta=False, num_labels=1, vocab_size=VOCABULARY)
    made = export(saved(tmp_path / "x", patch_model(model.eval(), "alibi")), "torch", tmp_path / "m.pt2")
    graph, texts = opened(made), [words(9), words(4)]
    expected = torch.cat([model(row[None]).logits for row in texts])
    assert (graph(batch(texts, "right") | {"token_type_ids": torch.zeros(2, 9).long()}) - expected).abs().max() < BOUND
    assert (graph(batch(texts, "left") | {"token_type_ids": torch.zeros(2, 9).long()}) - expected).abs().max() > BOUND
    assert "Pad only on the right: the model does not ignore padding on the left" in made.notes["compared"]


def test_the_extra_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "x", build("llama"))
    monkeypatch.setattr("hf_posswap.checkpoints.exports.graph_file.find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hf-posswap\[onnx\]'"):
        export(folder, "onnx", tmp_path / "m.onnx")
