"""A GGUF file as transformers' config and weights, with what transformers' own reader loses put right or refused.

That reader takes each key that it knows and leaves out the rest silently: scaled rotations, windows, biases. Here every
key of the architecture and every tensor of the file is accounted for, or the file is refused.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.utils.atomic_io import shown
from hf_posswap.utils.format import said_by
from hf_posswap.utils.gguf_tokenizer import count_gguf_weights, read_gguf_config, read_gguf_model, write_tokenizer
from hf_posswap.utils.printable import brief_repr, printable
from hf_posswap.utils.threads import PROCESS, quiet_logger
from hf_posswap.utils.untrusted import CARD, header

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from transformers import PreTrainedConfig, PreTrainedModel

FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors of divisors [D/2]: llama.cpp turns pair i by theta^(-2i/D) / divisor_i each token."""
_DEFAULT_THETA = 1e4
"""llama.cpp's, where a file names none."""
_CLOSE = 1e-5
_KINDS: dict[str, type[int] | type[float]] = {
    "rope.dimension_count": int,
    "rope.freq_base": float,
    "rope.freq_base_swa": float,
    "rope.scale_linear": float,
    "rope.scaling.attn_factor": float,
    "rope.scaling.factor": float,
    "rope.scaling.original_context_length": int,
    "rope.scaling.yarn_attn_factor": float,
    "rope.scaling.yarn_beta_fast": float,
    "rope.scaling.yarn_beta_slow": float,
    "rope.scaling.yarn_ext_factor": float,
}
"""Numbers of a rotation, and their kind as llama.cpp reads them."""
_SAME: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads"),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "use_parallel_residual": ("use_parallel_residual",),
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
"""Keys of an architecture, without its name, and the fields of configs that say the same; the first that there is."""
_ONLY: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.finetuned": (True, False),
    "tensor_data_layout": ("Meta AI original pth", "reference"),
}
"""Keys that change nothing at these values, where a config has no field for them."""
_OTHERS = ("general", "tokenizer", "split", "GGUF")
"""Beginnings of keys that every file has, whatever its architecture."""
_LARGEST = {("gemma2", 46), ("gemma3", 62)}
"""Architectures and layers of the models of 27 B, whose scores llama.cpp divides by another number."""
ARCHITECTURES = (
    "llama", "gpt2", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "gemma2", "gemma3", "phi3", "starcoder2", "stablelm"
)  # fmt: skip
"""Those for which a test holds transformers' reading against the model that was written."""
_WEIGHT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def write_folder(path: Path, reader: GGUFReader, folder: Path) -> list[str]:
    """Write what the GGUF file `path` holds into `folder`, and return sentences about what is not in it.

    `reader` is what `read_gguf` returns of it.

    Weights of one type, F16 or BF16, keep it if it holds the vectors of the file too; all others become float32, in
    which their values are exact.

    Raises:
        CheckpointError: the file is damaged, or holds what transformers cannot express or would read wrongly.
    """
    try:
        with PROCESS, quiet_logger("transformers", logging.ERROR):  # it changes the default dtype of the process
            config = read_header(path, reader)
            model = _model(path, config, {tensor.name: tensor for tensor in reader.tensors})
        fields = {name: field.contents() for name, field in reader.fields.items()}
        ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        if len(known := list(dict.fromkeys(int(end) for end in ends if end is not None))) > 1:
            model.generation_config.eos_token_id = known  # llama.cpp stops at each
        model.save_pretrained(folder)
        (folder / CARD).write_text(_card(path, fields), encoding="utf-8")
        return write_tokenizer(path, folder, fields, config)
    except PosswapError:
        raise
    except Exception as error:  # a key of another type than it should have fails anywhere
        raise CheckpointError(
            f"{shown(path)} cannot be converted: {said_by(error)}. Its keys or tensors are not what their names say. "
            "Get the file again from its source."
        ) from error


def read_header(path: Path, reader: GGUFReader) -> PreTrainedConfig:
    """Return the config of the model that the GGUF file `path` holds; `reader` is what `read_gguf` returns of it.

    Raises:
        CheckpointError: as `write_folder`, for what the keys and the names of the tensors show.
    """
    try:
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = fields.get("general.architecture")
        if not isinstance(architecture, str) or not tensors:
            raise CheckpointError(f"{path} holds no model: {len(tensors)} tensors, of architecture {architecture!r}.")
        if int(fields.get("split.count", 1)) > 1:
            raise CheckpointError(
                f"{path} is one of {fields['split.count']} parts of a model. Merge them: llama-gguf-split --merge "
                f"{path.name} merged.gguf"
            )
        if architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{path} is of architecture {architecture!r}, and GGUF files are read here of "
                f"{', '.join(ARCHITECTURES)}: of others it is not proved that transformers reads them rightly. Take "
                "the checkpoint that the file was made from."
            )
        layers = fields.get(f"{architecture}.block_count")
        layers_in_file = len({name.split(".", 2)[1] for name in tensors if name.startswith("blk.")})
        if layers != layers_in_file:  # before a config or a model of it is built
            raise CheckpointError(
                f"{shown(path)} says {brief_repr(layers, 80)} layers (block_count), and has tensors of "
                f"{layers_in_file}: it is damaged. Get the file again from its source."
            )
        with PROCESS, quiet_logger("transformers", logging.ERROR):
            return _config(path, architecture, fields, tensors)
    except PosswapError:
        raise
    except Exception as error:  # a key of another type than it should have fails anywhere
        raise CheckpointError(
            f"{shown(path)} cannot be converted: {said_by(error)}. Its keys or tensors are not what their names say. "
            "Get the file again from its source."
        ) from error


def _card(path: Path, fields: dict[str, object]) -> str:
    """Return a model card with the licence and the languages of the file."""
    keys = {
        "license": "license",
        "license_name": "license.name",
        "license_link": "license.link",
        "language": "languages",
    }
    data = {name: fields[f"general.{key}"] for name, key in keys.items() if fields.get(f"general.{key}")}
    name = printable(fields.get("general.name", path.stem), 200)
    return f"{header(data)}# {name}\n\nConverted from {printable(path.name)} by hf_posswap.\n"


def _config(
    path: Path, architecture: str, fields: dict[str, object], tensors: dict[str, ReaderTensor]
) -> PreTrainedConfig:
    """Return the config that transformers reads from the file, with every key of the architecture in it."""
    keys = _keys(path, architecture, fields)
    rope = {name: keys.pop(name) for name in list(keys) if name.startswith("rope.") and name not in _ONLY}
    divisors = {name: tensors[name] for name in FACTOR_TENSORS if name in tensors}
    refuse_wrong_numbers(path, architecture, rope, divisors)
    try:
        config = read_gguf_config(path)
    except Exception as error:  # ValueError for an unknown one; anything for keys that are missing or of another kind
        raise CheckpointError(
            f"transformers cannot read {path}, a GGUF file of architecture {architecture!r}: {said_by(error)} Take the "
            "checkpoint that the file was made from."
        ) from error
    window, pattern = keys.get("attention.sliding_window"), None
    if architecture == "gemma3":
        pattern = keys.pop("attention.sliding_window_pattern", 6)
    value_length = keys.pop("attention.value_length", None)
    if value_length not in (None, keys.get("attention.key_length")):
        keys["attention.value_length"] = value_length  # which no config has
    wrong = [name for name, value in keys.items() if value is not None and not _set(config, name, value)]
    if wrong:
        listed = ", ".join(f"{architecture}.{name} = {str(keys[name])[:40]}" for name in sorted(wrong))
        raise CheckpointError(
            f"{path} says {listed}, which is in no field of a {type(config).__name__}, so that the model would compute "
            "something else. Take the checkpoint that the file was made from."
        )
    _set_windows(path, architecture, config, window, pattern)
    if hasattr(config, "query_pre_attn_scalar"):  # no key says it
        width = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = (
            width if (architecture, config.num_hidden_layers) in _LARGEST else config.head_dim
        )
    rope_parameters(path, architecture, config, rope, divisors)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # of the class, where the file names none
        if isinstance(getattr(config, name, None), int) and getattr(config, name) >= config.vocab_size:
            setattr(config, name, None)
    for name in [*vars(config)]:
        if name in ("quantization_config", "unk_token_id") or name.endswith("model_name_or_path"):
            delattr(config, name)
    config.name_or_path = ""
    return config


def _keys(path: Path, architecture: str, fields: dict[str, object]) -> dict[str, Any]:
    """Return the keys of the architecture without its name, after checking that none is misnamed or no number.

    A default would stand for a key whose name is damaged.
    """
    names = (*_SAME, *_ONLY, "attention.sliding_window_pattern", "attention.value_length")
    keys = {}
    for name, value in fields.items():
        entry = f"{shown(path)} has {printable(name, 200)} = {brief_repr(value, 80)}"
        if name.startswith(f"{architecture}."):
            keys[name.removeprefix(f"{architecture}.")] = value
            if isinstance(value, float) and not (math.isfinite(value) and (value > 0 or not name.endswith("_epsilon"))):
                raise CheckpointError(
                    f"{entry}: expected is a finite number, of an epsilon one above 0. Get the file again from its "
                    "source."
                )
        elif name.partition(".")[0] not in _OTHERS and ("rope" in name.lower() or name.endswith(names)):
            raise CheckpointError(
                f"{entry}, and keys of its architecture begin with {architecture!r} and a dot: it is damaged, or of "
                "another program. Get it again from its source."
            )
    keys.setdefault("attention.head_count_kv", keys.get("attention.head_count"))
    return keys


def _set_windows(
    path: Path, architecture: str, config: PreTrainedConfig, window: int | None, pattern: int | list[bool] | None
) -> None:
    """Put into `config` which layers slide, as llama.cpp has it: none without a window.

    Args:
        path: the file, for errors.
        architecture: as llama.cpp calls it.
        config: with the other keys of the file in it.
        window: in tokens.
        pattern: of a Gemma 3: for each layer whether it slides, or n: all but every n-th layer do, and for 0 all.
    """
    if architecture != "gemma3":
        if hasattr(config, "sliding_window") and not window:  # 0 in files of Phi-4
            config.sliding_window = None  # whatever the default of the class
        return
    layers = int(config.num_hidden_layers)
    if isinstance(pattern, list):
        slides = [bool(each) for each in pattern]
    else:
        slides = [not pattern or (i + 1) % pattern != 0 for i in range(layers)]
    if len(slides) != layers:
        raise CheckpointError(
            f"{path} says of {len(slides)} layers whether they slide (attention.sliding_window_pattern), and has "
            f"{layers}. Get the file again from its source."
        )
    config.layer_types = ["sliding_attention" if each and window else "full_attention" for each in slides]


def _set(config: PreTrainedConfig, name: str, value: object) -> bool:
    """Put the value of a key into `config`, and return whether it says all that the key says."""
    known = [field for field in _SAME.get(name, ()) if hasattr(config, field)]
    if not known:
        return name in _ONLY and value in _ONLY[name]
    if isinstance(value, list):
        return False
    if getattr(config, known[0]) != value:
        if known[0] == "num_attention_heads" and name.endswith("_kv"):
            return False  # groups, in a class without groups
        setattr(config, known[0], value)
    return True


def _model(path: Path, config: PreTrainedConfig, tensors: dict[str, ReaderTensor]) -> PreTrainedModel:
    """Return the model with the weights of the file, each of which has landed in it."""
    # the smallest type that holds every weight of the file exactly
    types = {tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    types = types - {"F32"} or types  # a router is F32 in any file
    dtype = _WEIGHT_TYPES.get(next(iter(types)), torch.float32) if len(types) == 1 else torch.float32
    vectors = [
        torch.tensor(tensor.data)
        for name, tensor in tensors.items()
        if tensor.tensor_type.name == "F32" and name not in FACTOR_TENSORS
    ]
    dtype = dtype if all(torch.equal(vector, vector.to(dtype).float()) for vector in vectors) else torch.float32
    in_file = sum(math.prod(map(int, t.shape)) for name, t in tensors.items() if name not in FACTOR_TENSORS)
    try:
        if (expected := count_gguf_weights(config)) > 2 * in_file:  # before memory is taken; tied weights count twice
            raise ValueError(f"by its keys the model has {expected} weights, and the file holds {in_file}")
        loaded, info = read_gguf_model(path, config, dtype)
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot load the weights of {path} into a causal language model with a "
            f"{type(config).__name__}: {said_by(error)}. Take the checkpoint that the file was made from."
        ) from error
    wrong = {keys: sorted(map(str, info[keys]))[:4] for keys in ("missing_keys", "mismatched_keys") if info[keys]}
    if wrong:
        raise CheckpointError(
            f"the weights in {path} do not fill a {type(loaded).__name__}: {wrong}. Take the checkpoint that the file "
            "was made from."
        )
    in_model = sum(parameter.numel() for parameter in loaded.parameters())
    if in_file != in_model:
        named = [name for name in tensors if name.endswith(".bias")]
        biases = sorted({name.split(".", 2)[-1] if name.startswith("blk.") else name for name in named})
        has_bias = any(name.endswith(".bias") for name, _ in loaded.named_parameters())
        hint = f" Its biases are {', '.join(biases)}." if biases and not has_bias else ""
        raise CheckpointError(
            f"{path} holds {in_file} weights, and the {type(loaded).__name__} that transformers makes of it holds "
            f"{in_model}: some would be lost.{hint} Take the checkpoint that the file was made from."
        )
    return _plain(loaded)


def _plain(loaded: PreTrainedModel) -> PreTrainedModel:
    """Return `loaded` as a model that was never quantized, which can be saved; it shares the weights."""
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    config.dtype = loaded.dtype
    return model


def rope_parameters(
    path: Path, architecture: str, config: PreTrainedConfig, keys: dict[str, Any], tensors: dict[str, ReaderTensor]
) -> None:
    """Put the rotation that a file describes into `config`.

    Args:
        path: the file, for errors.
        architecture: as llama.cpp calls it, for errors.
        config: of transformers, with the other keys of the file in it.
        keys: those of the architecture that begin with "rope.", which are taken out.
        tensors: those in `FACTOR_TENSORS`, by name.

    Raises:
        CheckpointError: a rotation that the config's class does not have, or a key that is not known.
    """
    keys, current = dict(keys), getattr(config, "rope_parameters", None)
    if not current:
        if keys or tensors:
            raise _refusal(path, config, [*_with_values(keys), *sorted(tensors)], "which has no rotation")
        return
    sets = [value for value in current.values() if isinstance(value, dict)]
    if sets:
        _of_layer_types(path, config, current, keys, tensors)
        return
    theta = float(keys.pop("rope.freq_base", _DEFAULT_THETA))
    rope = {"rope_theta": theta}
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    turned = int(keys.pop("rope.dimension_count", width))
    share = current.get("partial_rotary_factor")
    if turned != width if share is None else turned > width:
        raise _refusal(
            path, config, ["rope.dimension_count"], f"which rotates {width} dimensions of a head, not {turned}"
        )
    if share is not None:
        rope["partial_rotary_factor"] = turned / width
    rope |= _scaling(path, config, keys, tensors, theta, turned)
    if keys:
        names = [f"{architecture}.{name}" for name in _with_values(keys)]
        raise _refusal(path, config, names, "in which they have no place")
    config.rope_parameters = rope
    if hasattr(config, "original_max_position_embeddings"):  # of Phi-3, where it goes before that of rope_parameters
        config.original_max_position_embeddings = rope.get(
            "original_max_position_embeddings", config.max_position_embeddings
        )


def refuse_wrong_numbers(
    path: Path, architecture: str, keys: dict[str, object], tensors: dict[str, ReaderTensor]
) -> None:
    """Refuse numbers that no rotation has: of another kind than the key's, not finite, zero or negative.

    Zero too: llama.cpp takes some of them for unset, and divides by others.

    Args:
        path: the file, for errors.
        architecture: as llama.cpp calls it.
        keys: as of `rope_parameters`.
        tensors: as of `rope_parameters`.

    Raises:
        CheckpointError: there is such a number; the message names its key and shows it.
    """
    for name, value in keys.items():
        kind = _KINDS.get(name)
        if kind is None:  # a text, or a key that is refused as a whole
            continue
        if not (type(value) is kind and 0 < value < math.inf):
            expected = "whole number" if kind is int else "finite floating-point number"
            raise _damage(path, f"{architecture}.{name} = {brief_repr(value, 80)}", f"expected is a {expected} above 0")
    for name, tensor in tensors.items():
        wrong = [value for value in np.asarray(tensor.data).ravel().tolist() if not 0 < value < math.inf]
        if wrong:
            raise _damage(path, f"{name} with {wrong[0]}", "expected are divisors that are finite and above 0")


def _damage(path: Path, content: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{shown(path)} has {content}: {expected}. Get the file again from its source.")


def _with_values(keys: dict[str, object]) -> list[str]:
    return [f"{name} = {brief_repr(value, 80)}" for name, value in sorted(keys.items())]


def _of_layer_types(
    path: Path,
    config: PreTrainedConfig,
    current: dict[str, Any],
    keys: dict[str, Any],
    tensors: dict[str, ReaderTensor],
) -> None:
    """Take the base of each type of layers; the scaling is that of full attention, as llama.cpp has it."""
    bases = {
        "full_attention": keys.pop("rope.freq_base", None),
        "sliding_attention": keys.pop("rope.freq_base_swa", None),
    }
    width = int(config.head_dim)
    if (turned := int(keys.pop("rope.dimension_count", width))) != width:
        raise _refusal(
            path, config, ["rope.dimension_count"], f"which rotates {width} dimensions of a head, not {turned}"
        )
    factor = float(keys.pop("rope.scaling.factor", None) or 1.0)
    scaling = keys.pop("rope.scaling.type", "linear" if factor != 1.0 else "none")
    original = int(keys.pop("rope.scaling.original_context_length", None) or config.max_position_embeddings)
    yarn = _yarn(keys, factor, original, 1.0) if scaling == "yarn" else {}
    if (
        keys
        or tensors
        or "full_attention" not in current
        or scaling not in ("linear", "none", "yarn")
        or not bases["full_attention"]
    ):
        names = [*_with_values(keys), *sorted(tensors)]
        names = names or [f"rope.scaling.type {scaling}, rope.freq_base {bases['full_attention']}"]
        raise _refusal(path, config, names, "where each type of layers rotates in its own way")
    for name, base in bases.items():
        if base is not None and name in current:
            current[name]["rope_theta"] = float(base)
    if scaling == "linear" and factor != 1.0:
        current["full_attention"] |= {"rope_type": "linear", "factor": factor}
    current["full_attention"] |= yarn


def _scaling(
    path: Path,
    config: PreTrainedConfig,
    keys: dict[str, Any],
    tensors: dict[str, ReaderTensor],
    theta: float,
    turned: int,
) -> dict[str, Any]:
    """Return the rope type and its parameters, and take their keys out."""
    factor = float(keys.pop("rope.scaling.factor", None) or keys.pop("rope.scale_linear", None) or 1.0)
    scaling = str(keys.pop("rope.scaling.type", "linear" if factor != 1.0 else "none"))  # llama.cpp's default
    length = int(config.max_position_embeddings)
    original = int(keys.pop("rope.scaling.original_context_length", None) or length)
    attention = float(keys.pop("rope.scaling.attn_factor", None) or 1.0)
    lists = {name: [float(value) for value in np.asarray(tensor.data).ravel()] for name, tensor in tensors.items()}
    wrong = [name for name, values in lists.items() if len(values) != turned // 2]
    if wrong:
        raise _refusal(path, config, wrong, f"which rotates {turned // 2} pairs of a head")
    short, long = lists.get("rope_factors_short.weight"), lists.get("rope_factors_long.weight")
    fixed = lists.get("rope_freqs.weight")
    if short is not None and long is not None and fixed is None and factor == 1.0 and scaling in ("longrope", "none"):
        return _lists(short, long, original, attention)
    if short is not None or long is not None or scaling == "longrope":
        raise _refusal(path, config, [f"rope.scaling.type {scaling}", *lists], "in this combination")
    if scaling == "yarn" and fixed is None:
        return _yarn(keys, factor, original, attention)
    if scaling not in ("linear", "none") or (fixed is not None and factor != 1.0):
        raise _refusal(path, config, [f"rope.scaling.type {scaling}", *lists], "in this combination")
    scale = factor if scaling == "linear" else 1.0
    if fixed is None and attention == 1.0:
        return {"rope_type": "default"} if scale == 1.0 else {"rope_type": "linear", "factor": scale}
    if fixed is not None and attention == 1.0:
        llama3 = _llama3(fixed, theta, length)
        if llama3 is not None:
            return llama3
    divisors = fixed or [scale] * (turned // 2)
    return _lists(divisors, divisors, original, attention)


def _lists(short: list[float], long: list[float], original: int, attention: float) -> dict[str, object]:
    """Return LongRoPE with these divisors: with two equal lists, any rotation by fixed angles."""
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "factor": 1.0,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def _yarn(keys: dict[str, float], factor: float, original: int, attention: float) -> dict[str, object]:
    """Return YaRN: llama.cpp multiplies cos and sin by 0.1 ln s + 1 times the factor of the file."""
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        value = float(keys.pop(f"rope.scaling.yarn_{name}", default))
        if value != default:
            rope[name] = value
    if attention != 1.0:
        rope["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    for name in ("ext", "attn"):  # 1: as YaRN has them
        if keys.get(f"rope.scaling.yarn_{name}_factor") == 1.0:
            del keys[f"rope.scaling.yarn_{name}_factor"]
    return rope


def _llama3(divisors: list[float], theta: float, length: int) -> dict[str, object] | None:
    """Return the parameters of Llama 3's scaling that has these divisors; None: it is another one.

    In its band, 1 / divisor is a straight line over L / wavelength; outside, the divisor is 1 or the factor.
    """
    values = np.array(divisors, dtype=np.float64)
    factor = float(f"{values[-1]:.6g}")
    if not 1.0 < factor < 1e4:
        return None
    plain = theta ** (-2.0 * np.arange(len(values)) / (2 * len(values)))
    turns = plain / (2 * math.pi)  # 1 / wavelength
    kept = (1 / values - 1 / factor) / (1 - 1 / factor)
    band = (kept > 1e-4) & (kept < 1 - 1e-4)
    guesses = [(8192, 4.0), (length, 4.0), (round(length / factor), 4.0)]
    if band.sum() >= 2:
        slope, offset = np.polyfit(turns[band], kept[band], 1)  # kept = (L turns - 1) / (h - 1)
        if offset < 0 < slope:
            guesses.insert(0, (round(slope / -offset), float(f"{1 - 1 / offset:.4g}")))
    for original, high in guesses:
        share = np.clip((original * turns - 1.0) / (high - 1.0), 0, 1)
        if np.allclose(1 / ((1 - share) / factor + share), values, rtol=_CLOSE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return None


def _refusal(path: Path, config: PreTrainedConfig, names: list[str], why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} has {', '.join(names)}, and transformers makes a {type(config).__name__} of it, {why}: its positions "
        "would be lost. Take the checkpoint that the file was made from."
    )
