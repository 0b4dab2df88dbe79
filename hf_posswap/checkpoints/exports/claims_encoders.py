"""How text-embeddings-inference and sentence-transformers run positions.

text-embeddings-inference (TEI): read in its code, of autumn 2026. Its CPU image runs model.onnx with onnxruntime
first, whatever the model type; its own classes support some types and refuse the others. sentence-transformers: run by
tests/training/engine/test_sentences.py.
"""

from __future__ import annotations

from hf_posswap.checkpoints.exports.claims import Claim, Condition, anything, both, of_model, plugin, table
from hf_posswap.checkpoints.exports.mechanism import PositionConfig

_TEI = "TEI's code of autumn 2026"
_SENTENCES = "sentence-transformers 6.2"
_ROUTER = "text-embeddings-router --model-id {folder}"
_GRAPH = f"posswap export {{folder}} --target onnx -o {{folder}}/model.onnx && {_ROUTER}"
_OPEN = "from sentence_transformers import SentenceTransformer; SentenceTransformer({inner})"
_NO_ONNX = (
    'Not by backend="onnx": that wants optimum-onnx, whose newest release (0.1) refuses transformers 5. posswap export '
    "--target onnx writes the file without it."
)
_SCORES = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration", "ForPreTraining", "Generation")


def _with_head(position_config: PositionConfig) -> bool:
    """Return whether the model outputs logits; an embedding is computed from hidden states."""
    return position_config.architecture.endswith(_SCORES)


_own_class: Condition = of_model("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet")

TEI = (
    Claim(
        "tei",
        "a table",
        "BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, MPNet",
        "exact",
        "a position table is ordinary weights; it ends where its rows end.",
        _ROUTER,
        _TEI,
        "read",
        both(table, _own_class),
    ),
    Claim(
        "tei",
        "any other",
        "language models with their head",
        "impossible",
        "it computes embeddings from hidden states, and this checkpoint ({architecture}) outputs logits: save the base "
        "model alone (AutoModel) and export that.",
        "",
        _TEI,
        "read",
        _with_head,
        (),
    ),
    Claim(
        "tei",
        "what needs hf_posswap",
        "encoders, classifiers",
        "exact",
        "its own classes refuse the model type; its CPU image runs the ONNX file, which contains the mechanism.",
        _GRAPH,
        _TEI,
        "read",
        plugin,
    ),
    Claim(
        "tei",
        "any other",
        "encoders, classifiers",
        "exact",
        "by the ONNX file, in its CPU image. Its own classes read rope_theta as transformers 4 wrote it, and few of "
        "the scalings: do not let them take the folder.",
        _GRAPH,
        _TEI,
        "read",
        anything,
    ),
)

SENTENCE_TRANSFORMERS = (
    Claim(
        "sentence-transformers",
        "what needs hf_posswap",
        "all",
        "exact",
        f"once hf_posswap is imported; the model is transformers' own. {_NO_ONNX}",
        f'python -c "import hf_posswap; {_OPEN}"',
        _SENTENCES,
        "tested",
        plugin,
    ),
    Claim(
        "sentence-transformers",
        "any other",
        "all",
        "exact",
        f"the model is transformers' own. {_NO_ONNX}",
        f'python -c "{_OPEN}"',
        _SENTENCES,
        "read",
        anything,
    ),
)
