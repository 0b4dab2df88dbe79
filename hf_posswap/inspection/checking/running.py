"""The outputs of the live model, and padding and packing: a row alone, padded, and in one row with another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posswap.checkpoints.doctor_findings import Finding
from hf_posswap.inspection.checking.report import Coverage
from hf_posswap.patching.record.model_class import native_class
from hf_posswap.testing.tiny import TINY_LENGTH, tiny_model
from hf_posswap.utils.format import said_by

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 8
"""Length of the rows."""
_PADS = 3


class Unable(Exception):
    """The model cannot be run on a row of tokens; the message says why."""


class _Runner:
    """Runs a model on rows of tokens."""

    def __init__(self, model: Any, rows: int | None) -> None:
        self.model = model
        parameters = dict(inspect.signature(model.forward).parameters)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):  # a wrapper passes on
            parameters |= inspect.signature(type(model).forward).parameters
        self.takes = set(parameters)
        if getattr(model, "main_input_name", "input_ids") != "input_ids" or "input_ids" not in self.takes:
            raise Unable("it reads no tokens")
        self.paired = bool(model.config.is_encoder_decoder)
        if self.paired and "decoder_input_ids" not in self.takes:
            raise Unable("it is an encoder-decoder whose decoder takes no tokens")
        self.length = TOKENS if rows is None else min(TOKENS, (rows - _PADS) // 2)
        if self.length < 3:
            raise Unable("its window is too short")
        self.ids = self._tokens(2 * self.length + 2 * _PADS)
        self.outputs = ""

    def _tokens(self, number: int) -> Tensor:
        """Return tokens that no field of the config calls special, [number]."""
        config = self.model.config
        values = [config.to_dict(), config.get_text_config().to_dict()]
        suffixes = ("id", "index", "token")
        special = {value for each in values for key, value in each.items() if key.rpartition("_")[2] in suffixes
                   and isinstance(value, int)}  # fmt: skip
        size = self.model.get_input_embeddings().weight.shape[0]
        plain = [token for token in range(size) if token not in special]
        if len(plain) < 8:
            raise Unable("its vocabulary is too small")
        chosen = torch.randint(len(plain), (number,), generator=torch.Generator().manual_seed(0))
        return torch.tensor(plain)[chosen]

    def run(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Return the outputs at each token of one row, [tokens, width], in float32 on the CPU."""
        device = self.model.get_input_embeddings().weight.device
        inputs = {name: value.to(device) for name, value in ({"input_ids": ids[None]} | inputs).items()}
        if self.paired:
            inputs["decoder_input_ids"] = self.ids[None, :3].to(device)
        outputs = self.model(**inputs, **({"use_cache": False} if "use_cache" in self.takes else {}))
        self.outputs, values = "logits", getattr(outputs, "logits", None)
        if values is None or values.dim() != 3:
            self.outputs, values = "last_hidden_state", getattr(outputs, "last_hidden_state", None)
        if values is None or values.shape[:2] != (1, 3 if self.paired else ids.shape[0]):
            raise Unable("it has no output at each token")
        never = (values[0] <= torch.finfo(values.dtype).min).all(0)  # tokens that a class never gives: of images, ...
        return values[0].masked_fill(never & ~never.all(), 0.0).float().cpu()


def running_findings(model: PreTrainedModel, rows: int | None, coverage: Coverage) -> Iterator[Finding]:
    """Yield how the outputs of a live model, padding and packing go wrong; it is left in eval mode.

    Args:
        model: a model with weights.
        rows: of its position table; None: it has none.
        coverage: gets what was run, and what was not and why.
    """
    for module in model.modules():  # not eval(), at which some adapters merge their weights
        module.training = False
    topic = "outputs, padding and packing"
    try:
        with torch.no_grad():
            runner = _Runner(model, rows)
            alone = runner.run(runner.ids[: runner.length])
            coverage.checked.append(f"the {runner.outputs} of a row")
            broken = _nonfinite(runner, alone) or _constant(runner, alone)
            if broken is not None:
                yield broken
                why = f"with such outputs ({broken.code}) all rows look alike or none do"
                coverage.skip("padding and packing", why)
                return
            topic = "padding"
            try:
                yield from _padding(runner, alone, coverage)
            except Exception as error:  # packing may run
                coverage.fail(topic, error)
            topic = "packing"
            yield from _packing(runner, alone, coverage)
    except Unable as unable:
        coverage.skip(topic, f"{type(model).__name__} was not run, because {unable}")
    except Exception as error:  # a class may ask for inputs that only its processor makes
        coverage.fail(topic, f"{type(model).__name__} cannot be run on tokens alone: {said_by(error, 200)}")


def _nonfinite(runner: _Runner, outputs: Tensor, how: str = "") -> Finding | None:
    """Return the finding that outputs are NaN or infinite, with the weights or the module that they come from.

    Args:
        runner: of the model.
        outputs: at each token of a row, [tokens, width].
        how: what the row has that the same row alone lacks; "" for the row alone, whose outputs can be broken by the
            weights.
    """
    nan, infinite = int(outputs.isnan().sum()), int(outputs.isinf().sum())
    if not nan + infinite:
        return None
    counts = " and ".join(f"{number} {name}" for number, name in ((nan, "NaN"), (infinite, "infinite")) if number)
    problem = f"of {outputs.numel()} {runner.outputs} of a row of {len(outputs)} tokens{how}, {counts}"
    if how:
        do = "Run rows of one length, or one row at a time, or try another attn_implementation."
        problem += ": those of the row alone are finite. A mask that hides every key of a token does that."
        return Finding("error", runner.outputs, problem, do, "outputs-nonfinite")
    weights = _named(runner.model, lambda tensor: not bool(tensor.isfinite().all()))
    if weights:
        problem += f". Weights with NaN or infinite values: {weights}."
        do = "Load the checkpoint again from its source, or one from before the step at which the loss was not finite."
        return Finding("error", runner.outputs, problem, do, "outputs-nonfinite")
    dtype, first = str(runner.model.dtype).removeprefix("torch."), _first_nonfinite(runner)
    where = f", and {first} is the first module with such outputs" if first else ""
    problem += f". All weights are finite{where}: it overflows in {dtype}, or divides by zero."
    do = "Load with dtype=torch.float32 (or torch.bfloat16, which has its range)" if dtype == "float16" else (
        "Compare the config with the weights (eps of norms, scales), then look into that module"
    )  # fmt: skip
    return Finding("error", runner.outputs, problem, f"{do}.", "outputs-nonfinite")


def _constant(runner: _Runner, outputs: Tensor) -> Finding | None:
    """Return the finding that outputs are the same at every position, whatever the tokens."""
    eps = 1e-5 if runner.model.dtype in (torch.float32, torch.float64) else 2 * torch.finfo(runner.model.dtype).eps
    spread, most = outputs.amax(0) - outputs.amin(0), outputs.abs().amax(0)
    if not bool((spread <= eps * most + 1e-6 * most.max()).all()):
        return None
    weights = _named(
        runner.model, lambda tensor: tensor.dim() > 1 and tensor.numel() > 1 and bool((tensor == tensor.max()).all())
    )
    cause = f"Weights that hold one value: {weights}." if weights else (
        "No weight matrix holds one value: a factor, a norm or a layer that gives 0 hides the tokens."
    )  # fmt: skip
    return Finding(
        "error", runner.outputs, f"they are the same at each of {len(outputs)} positions, whatever the tokens: no test "
        f"of positions can see anything. {cause}",
        "Load trained weights with from_pretrained; to_empty(), init on the meta device and zero fills leave none.",
        "outputs-constant",
    )  # fmt: skip


def _named(model: PreTrainedModel, is_meant: Callable[[Tensor], bool]) -> str:
    """Return the floating-point parameters that are meant, the first three by name; "": there are none."""
    tensors = [
        (n, tensor) for n, tensor in model.named_parameters() if tensor.is_floating_point() and not tensor.is_meta
    ]
    names = [name for name, tensor in tensors if is_meant(tensor if tensor.element_size() > 1 else tensor.float())]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} ({len(names)} of {len(tensors)})" if names else ""


def _first_nonfinite(runner: _Runner) -> str | None:
    """Return the path of the first module that gives NaN or +inf on the row alone; -inf is what masks are made of."""
    first: list[str] = []

    def look(path: str, output: object) -> None:
        values = (
            output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else [output]
        )
        tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
        if not first and any(bool((tensor.isnan() | tensor.isposinf()).any()) for tensor in tensors):
            first.append(path)

    handles = [
        module.register_forward_hook(lambda module, args, output, path=path: look(path, output))
        for path, module in runner.model.named_modules()
        if path
    ]
    try:
        runner.run(runner.ids[: runner.length])
    finally:
        for handle in handles:
            handle.remove()
    return next(iter(first), None)


def _padding(runner: _Runner, alone: Tensor, coverage: Coverage) -> Iterator[Finding]:
    """Yield what a padded row does otherwise than the row alone."""
    if "attention_mask" not in runner.takes:
        coverage.skip("padding", "its forward takes no attention_mask")
        return
    row = runner.ids[: runner.length]
    causal = not runner.paired and _is_causal(runner, alone)
    mask = torch.ones(1, runner.length + _PADS, dtype=torch.long)
    mask[:, slice(_PADS) if causal else slice(-_PADS, None)] = 0
    real = torch.ones(len(alone), dtype=torch.bool) if runner.paired else mask[0].bool()
    pad = getattr(runner.model.config, "pad_token_id", None)
    filled, other = runner.ids[-2 * _PADS :].split(_PADS)
    fill = filled if not isinstance(pad, int) else torch.full_like(filled, pad)
    padded = runner.run(_around(row, fill, causal), attention_mask=mask)[real]
    side = "left" if causal else "right"
    coverage.checked.append(f"a row padded on the {side} against the row alone")
    if (broken := _nonfinite(runner, padded, f" padded on the {side}")) is not None:
        yield broken
        return
    if not _differ(runner, padded, alone, alone):
        return
    refilled = runner.run(_around(row, other, causal), attention_mask=mask)[real]
    if _differ(runner, padded, refilled, alone):
        yield _ran(
            runner, "mask-ignored", "attention_mask", "other tokens under the mask give other outputs at the rest "
            f"({_gap(padded, refilled, alone)}): the mask does not hide them.",
            "Run rows of one length, or one row at a time.",
        )  # fmt: skip
    else:
        helped = False
        if "position_ids" in runner.takes:
            ids = (mask.cumsum(-1) - 1).clamp(min=0)
            placed = runner.run(_around(row, fill, causal), attention_mask=mask, position_ids=ids)[real]
            helped = not _differ(runner, placed, alone, alone)
        do = "Pass position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0), as generate does" if helped else (
            "Pad on the right, or run one row at a time"
        )  # fmt: skip
        yield _ran(
            runner, "padding", "attention_mask", f"a row padded on the {side} is not computed as the row alone "
            f"({_gap(padded, alone, alone)}): positions are counted from the first column, whatever the mask says.",
            f"{do}.",
        )  # fmt: skip


def _packing(runner: _Runner, before: Tensor, coverage: Coverage) -> Iterator[Finding]:
    """Yield whether two documents in one row, with position ids that start again, are computed as alone."""
    if runner.paired:
        coverage.skip("packing", "documents share no row in an encoder-decoder")
        return
    if "position_ids" not in runner.takes:
        coverage.skip("packing", "its forward takes no position_ids, so documents cannot share a row")
        return
    first, second = runner.ids[: runner.length], runner.ids[runner.length : 2 * runner.length]
    alone = runner.run(second)
    if not _is_causal(runner, before):
        coverage.skip("packing", "an encoder takes the borders of documents from a mask of its own")
        return
    places = torch.arange(runner.length).repeat(2)[None]
    packed = runner.run(torch.cat((first, second)), position_ids=places)[runner.length :]
    coverage.checked.append("a row of two documents against each alone")
    if (broken := _nonfinite(runner, packed, " after another in one row")) is not None:
        yield broken
        return
    if _differ(runner, packed, alone, alone):
        yield _ran(
            runner, "packing", "position_ids", "the second document of a row, with position ids that start again and "
            f"no attention mask, is not computed as alone ({_gap(packed, alone, alone)}): it sees the first, or "
            "other positions.",
            "Pass a block mask (attention_mask of shape [1, 1, tokens, tokens]), or do not pack with this class.",
        )  # fmt: skip


def _around(row: Tensor, fill: Tensor, causal: bool) -> Tensor:
    return torch.cat((fill, row) if causal else (row, fill))


def _is_causal(runner: _Runner, alone: Tensor) -> bool:
    """Return whether the first token's output does not depend on the last token."""
    row = runner.ids[: runner.length].clone()
    row[-1] = runner.ids[runner.length] if runner.ids[runner.length] != row[-1] else row[0]
    return not _differ(runner, runner.run(row)[:1], alone[:1], alone)


def _differ(runner: _Runner, first: Tensor, second: Tensor, scale: Tensor) -> bool:
    """Return whether outputs differ by more than rounding does."""
    least = 0.02 if runner.model.dtype in (torch.float32, torch.float64) else 0.2  # standard deviations
    return not bool((first - second).abs().max() <= least * max(float(scale.std()), 1e-6))  # a NaN differs


def _gap(first: Tensor, second: Tensor, scale: Tensor) -> str:
    return f"up to {float((first - second).abs().max() / scale.std()):.2g} standard deviations of the outputs"


def _ran(runner: _Runner, code: str, where: str, effect: str, do: str) -> Finding:
    """Return a finding: a note where a class of transformers is made so, an error where a swap made it so."""
    name, swap = type(runner.model).__name__, getattr(runner.model, "_posswap", None)
    if swap is None or swap.plan.route == "native":
        return Finding("note", where, f"{name}, by its design: {effect}", do, code)
    if code == "padding":  # a swapped model counts positions as its class does; distances do not depend on that
        by_design = not swap.plan.scheme.traits.relative
    else:
        native: object = native_class(type(runner.model))  # mypy: the type of a module is not hashable
        by_design = code in codes_of_class(native)
    if by_design:
        return Finding("note", where, f"{name} with {swap.plan.named}, by the design of the class: {effect}", do, code)
    return Finding("error", where, f"{name} with {swap.plan.named}: {effect}", do, code)


@lru_cache(maxsize=64)
def codes_of_class(cls: type) -> frozenset[str]:
    """Return the codes of what padding and packing do to a tiny model of a class of transformers, unswapped."""
    try:
        model = tiny_model(cls, meta=False)
    except Exception:  # a class of somebody's own, of whose config no tiny one is known
        return frozenset()
    return frozenset(finding.code for finding in running_findings(model, TINY_LENGTH, Coverage()))
