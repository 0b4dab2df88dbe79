"""A callback that proves, gates and records a swap in any Trainer."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_posswap.checkpoints.adapters import refuse_lost_positions
from hf_posswap.checkpoints.load import set_as_trained
from hf_posswap.errors import (
    CheckpointError,
    NotPatchedError,
    NumericError,
    OptionError,
    SwapVerificationError,
    TrainingError,
    TrainingWarning,
)
from hf_posswap.patching.apply.applied import check_structure, unread_record
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.patching.record.training import NAME, TrainingRecord, plain_name, swap_digest
from hf_posswap.patching.verify.verify_swap import Verification, verify_swap
from hf_posswap.schemes import Scheme, make_scheme
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.training.trainer_proof import (
    SequenceWatch,
    base_digest,
    check_scheme,
    check_written,
    dataset_digest,
    first_loss_limit,
    is_sharded,
    model_inside,
    trained_part,
    versions,
)
from hf_posswap.utils.sentence_models import ANY_KIND, inner_model, is_sentence_model
from hf_posswap.utils.user_paths import without_folder

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def _ends_watch(event: Callable[..., None]) -> Callable[..., None]:
    """Have an event of the callback that raises leave no hook on the model: the Trainer tells nobody of its end."""

    @functools.wraps(event)
    def run(self: PosswapCallback, *args: object, **kwargs: object) -> None:
        try:
            event(self, *args, **kwargs)
        except BaseException:
            if self._watch is not None:
                self._watch.detach()
            raise

    return run


class PosswapCallback(TrainerCallback, ExportableState):
    """Proves, gates and records the swap of a model in the Trainer of transformers, or one derived from it.

    Before the first step it runs `verify_swap` on the model that the Trainer has: inside PEFT, DDP or torch.compile,
    and after a resume. Around every step it checks that the swap is still intact. It stops the training before its
    second step if the first loss is higher than expected, and whenever a training sequence is longer than the swap's
    `max_length`. Every checkpoint and every later save holds the swap and, as `config.posswap_training`, base model,
    digests of base and data, steps, tokens and versions, which `hf_posswap.load`, `explain` and model cards show.

    A training that was stopped, by an error or by Ctrl-C, can begin again: with this callback or a new one, `train()`
    proves and gates anew, and limits of the stopped training no longer hold.

    Under FSDP, ZeRO-3 or tensor parallelism weights are sharded when training begins. There the proof is made when the
    Trainer is, so give the callback to its constructor (`callbacks=[...]`); each step checks the structure.

    Args:
        scheme: that must be in force, as for `patch_model`; None: whichever the model carries.
        max_first_loss: highest loss of the first step, also after a resume. None: ln(vocabulary) + 1.5, for models with
            a vocabulary head; `math.inf`: any finite loss. A tighter limit finds more: the loss of your unswapped model
            on the same data, and 0.25 nats more for a swap that needs no training or 1.5 for one that does.
        max_length: positions that a training sequence may have; None: the swap's `max_length`.
        require: refuse a model without a swap; False: train it, gate it and record that there was none (a control).
        digests: compute digests of the base's weights (about a second per GB) and of the rows of the dataset (about a
            minute per 100 M tokens), where the Trainer's dataset is a `datasets.Dataset` or a list.

    Attributes:
        verification: what `verify_swap` found; None: nothing yet, or the model has no swap.
        first_loss: of the first step of this session; None: not yet known.
        record: what the next checkpoint records; None: training has not begun.
        resumed: what a checkpoint holds of the run before it; set by a Trainer that restores callbacks.

    Raises:
        OptionError: an argument of the wrong type.
        SchemeError, UnknownNameError: `scheme` is none.

    Training then raises:
        NotPatchedError: the model carries no swap.
        SwapVerificationError: the swap is not in force, not `scheme`, or was lost during training.
        TrainingError, NumericError: the first loss is too high, or not finite; or a run is resumed with another swap.
        PositionRangeError: a sequence is too long.
        CheckpointError: a checkpoint was written without the swap.

    Example:
        >>> import tempfile
        >>> import hf_posswap
        >>> from transformers import Trainer, TrainingArguments
        >>> model = hf_posswap.patch_model(hf_posswap.load_example(), "rope", max_length=256)
        >>> rows = [{"input_ids": list(range(n, n + 64)), "labels": list(range(n, n + 64))} for n in range(4)]
        >>> proof = hf_posswap.PosswapCallback("rope")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     arguments = TrainingArguments(folder, max_steps=2, report_to=[], disable_tqdm=True, use_cpu=True)
        ...     result = Trainer(model, arguments, train_dataset=rows, callbacks=[proof]).train()  # doctest: +ELLIPSIS
        {'loss': ...
        >>> list(proof.verification.checks)[0], proof.record.steps, proof.first_loss < 9
        ('edits', 2, True)
    """

    def __init__(
        self,
        scheme: Scheme | str | dict[str, object] | None = None,
        *,
        max_first_loss: float | None = None,
        max_length: int | None = None,
        require: bool = True,
        digests: bool = True,
    ) -> None:
        if max_first_loss is not None and not (
            isinstance(max_first_loss, int | float) and not isinstance(max_first_loss, bool) and max_first_loss > 0
        ):
            raise OptionError(f"max_first_loss must be a loss above 0, or None, got {max_first_loss!r}.")
        if max_length is not None and not (type(max_length) is int and max_length > 0):
            raise OptionError(f"max_length must be a number of tokens above 0, or None, got {max_length!r}.")
        if not isinstance(require, bool) or not isinstance(digests, bool):
            raise OptionError(f"require and digests must be True or False, got {require!r} and {digests!r}.")
        if scheme is not None and not require:
            raise OptionError("require=False allows a model without a swap, and scheme names one: leave one out.")
        self.scheme = None if scheme is None else make_scheme(scheme)
        self.max_first_loss, self.max_length, self.require, self.digests = max_first_loss, max_length, require, digests
        self.verification: Verification | None = None
        self.first_loss: float | None = None
        self.record: TrainingRecord | None = None
        self.resumed: dict[str, object] = {}
        self._watch: SequenceWatch | None = None
        self._trained: ref[PreTrainedModel] | None = None
        self._proved: tuple[ref[object], Verification] | None = None
        self._base: str | None = None
        self._step, self._limit, self._before = 0, math.inf, 0
        self._swap: dict[str, object] | None = None

    def state(self) -> dict[str, object]:
        """Return what a Trainer stores in its checkpoints, so that a resumed run continues the record."""
        arguments = {name: getattr(self, name) for name in ("max_first_loss", "max_length", "require", "digests")}
        scheme = None if self.scheme is None else self.scheme.to_dict()
        record = None if self.record is None else self.record.to_dict()
        model = None if self._trained is None else self._trained()
        swap = self._swap if model is None else getattr(model.config, "posswap", None)  # a blend moves in a step's end
        return {
            "args": arguments | {"scheme": scheme},
            "attributes": {"resumed": {"record": record, "swap": swap}},
        }

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel | None = None,
        **kwargs: object,
    ) -> None:
        """Prove a swap while the weights are whole, where several processes may shard them before training begins."""
        if model is None or args.world_size < 2:
            return
        inside = model_inside(model)
        if getattr(inside, "_posswap", None) is not None and not is_sharded(inside):
            self._proved = ref(inside), verify_swap(inside)
            self._base = base_digest(inside) if self.digests and args.process_index == 0 else None

    @_ends_watch
    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        train_dataloader: object = None,
        **kwargs: object,
    ) -> None:
        """Prove the swap, before the first step and after a checkpoint is loaded."""
        from accelerate.utils import extract_model_from_parallel

        if self._watch is not None:  # an earlier training may have been stopped in a step
            self._watch.detach()
        self.verification = self.first_loss = self.record = self._watch = None
        self._step = state.global_step
        inside = model_inside(model)
        assert model is not None
        plan = self._prove(inside)
        self._trained, saved = ref(inside), _saved_in(state) if state.global_step else {}
        self._refuse_another_swap(saved, inside, state.global_step)
        _warn_of_decay(inside, kwargs.get("optimizer"))
        try:
            if not is_sharded(inside):
                whole = extract_model_from_parallel(model, keep_torch_compile=False)
                refuse_lost_positions(inner_model(whole) if is_sentence_model(whole, ANY_KIND) else whole)
        except CheckpointError as error:  # the user may mean to merge it at the end
            warnings.warn(f"this adapter cannot be saved, nor can checkpoints: {error}", TrainingWarning, stacklevel=2)
        expected = first_loss_limit(inside, model) if self.max_first_loss is None else self.max_first_loss
        self._limit = math.inf if expected is None else expected
        self._watch = SequenceWatch(plan, None if plan is None else self.max_length or plan.max_length)
        self._watch.attach(inside, model, state)
        earlier = saved.get("record") or {}
        self._before = earlier.get("tokens", 0)
        computes = self.digests and state.is_world_process_zero
        values = getattr(inside.config, "posswap", None)
        base, self._base = self._base, None  # of the weights before the first training only
        self.record = TrainingRecord(
            base=earlier.get("base") or plain_name(str(without_folder(inside.name_or_path) or type(inside).__name__)),
            base_weights=earlier.get("base_weights") or (base_digest(inside) or base if computes else None),
            recipe=None,
            objective=plain_name(type(args).__name__),
            what=trained_part(model),
            steps=state.global_step,
            tokens=self._before,
            data=dataset_digest(getattr(train_dataloader, "dataset", None)) if computes else None,
            held_out={},
            swap=None if values is None else swap_digest(SwapRecord.from_dict(values)),
            software=versions(),
        )
        self._write(inside, state.global_step, args)

    def _prove(self, model: PreTrainedModel) -> SwapPlan | None:
        """Prove the swap of `model` and return its plan; None: it has none, and needs none."""
        swap = getattr(model, "_posswap", None)
        if swap is None:
            if self.require:
                raise NotPatchedError(
                    f"{type(model).__name__}, which this Trainer trains, carries no swap.{unread_record(model)} Call "
                    "hf_posswap.patch_model(model, ...) before the Trainer is made, and give the Trainer that model "
                    "instead of a name; PosswapCallback(require=False) trains a control without a swap."
                )
            return None
        plan: SwapPlan = swap.plan
        if self.scheme is not None:
            check_scheme(model, self.scheme)
        if not is_sharded(model):
            self.verification = verify_swap(model)
            return plan
        check_structure(model)
        if self._proved is not None and self._proved[0]() is model:
            self.verification = self._proved[1]
            return plan
        warnings.warn(
            f"the weights of {type(model).__name__} are sharded, so only the structure of its swap was checked: give "
            "PosswapCallback to the Trainer's constructor (callbacks=[...]), which proves it while they are whole.",
            TrainingWarning,
            stacklevel=2,
        )
        return plan

    def _refuse_another_swap(self, saved: dict[str, object], model: PreTrainedModel, step: int) -> None:
        """Refuse to resume with another mechanism than the checkpoint's, and restore the weight of a blend from it."""
        values = getattr(model.config, "posswap", None)
        now = None if values is None else SwapRecord.from_dict(values)
        self._swap = values
        if "swap" not in saved or saved.get("record") is None:
            return
        then = None if saved["swap"] is None else SwapRecord.from_dict(saved["swap"])
        if then is None and now is None:
            return
        if then is not None and now is not None and _of_any_weight(then).is_same_mechanism(_of_any_weight(now)):
            set_as_trained(model, then)
            return
        was, is_now = (None if record is None else record.scheme for record in (then, now))
        raise TrainingError(
            f"the checkpoint of step {step} was trained with {was or 'no swap'}, and the model now has "
            f"{is_now or 'no swap'}. Patch the model as before to resume, or train anew without resume_from_checkpoint."
        )

    @_ends_watch
    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: object,
    ) -> None:
        """Check that the swap is still there; and, before the second step, that the first loss was seen."""
        self._check_intact(model_inside(model), state)
        if state.global_step == self._step + 1 and self.first_loss is None:
            warnings.warn(
                "this Trainer logged no loss for its first step, so PosswapCallback could not check it.",
                TrainingWarning,
                stacklevel=2,
            )

    @_ends_watch
    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: object,
    ) -> None:
        """Update the record for a callback that saves at the end of this step before ours (enable_jit_checkpoint)."""
        inside = model_inside(model)
        self._check_intact(inside, state)
        self._write(inside, state.global_step + 1, args)

    @_ends_watch
    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: object,
    ) -> None:
        """Have the first loss logged, and update the record that the next save writes."""
        inside = model_inside(model)
        self._check_intact(inside, state)
        self._write(inside, state.global_step, args)
        if state.global_step == self._step + 1:
            control.should_log = True

    @_ends_watch
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Gate on the loss of the first step."""
        if self.first_loss is not None or state.global_step != self._step + 1 or not logs or "loss" not in logs:
            return
        loss, norm = float(logs["loss"]), logs.get("grad_norm")
        # a Trainer with logging_nan_inf_filter logs 0 for NaN; with fp16 the first gradients overflow by design
        if not math.isfinite(loss) or (norm is not None and not math.isfinite(float(norm)) and not args.fp16):
            raise NumericError(
                f"the first loss is {loss} with a gradient of norm {norm}: not finite. Likely causes: no token of the "
                "batch has a label, or the precision is too low (use bf16 or float32). Nothing was saved."
            )
        if loss == 0 and not norm and math.isfinite(self._limit):
            raise NumericError(
                "the first loss is 0 with no gradient: no token of the batch has a label (all are -100), or the loss "
                "is not finite and the Trainer hides it (logging_nan_inf_filter). Nothing was saved. If 0 is right for "
                "this Trainer's loss, pass PosswapCallback(max_first_loss=math.inf)."
            )
        self.first_loss = loss
        if loss <= self._limit:
            return
        known = "max_first_loss" if self.max_first_loss is not None else "guessing and 1.5 nats"
        raise TrainingError(
            f"the first loss is {loss:.3f}, above {self._limit:.3f} ({known}), so training was stopped before its "
            "next step; nothing was saved. Likely causes: another tokenizer than the model's, labels that are not "
            "shifted as the model expects, or a scheme whose fields (base, factor, layout, original_length) do not fit "
            "the model: compare the loss of the unswapped model on this batch. If the Trainer's loss is another "
            "quantity, pass PosswapCallback(max_first_loss=...)."
        )

    @_ends_watch
    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: object,
    ) -> None:
        """Check that the checkpoint which was just written names the swap."""
        inside = model_inside(model)
        values = getattr(inside.config, "posswap", None)
        folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if values is None or not state.is_world_process_zero or not folder.is_dir():  # a search saves elsewhere
            return
        if not check_written(folder, SwapRecord.from_dict(values)):
            warnings.warn(
                f"{folder} holds no config.json and no adapter, so nothing there names the swap: save the finished "
                "model with trainer.save_model() or hf_posswap.save.",
                TrainingWarning,
                stacklevel=2,
            )

    @_ends_watch
    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: object,
    ) -> None:
        """Restore blend and record of the best checkpoint, if the Trainer loaded that, and check the swap."""
        inside, trained = model_inside(model), None
        best = Path(state.best_model_checkpoint or "", "trainer_state.json")
        if args.load_best_model_at_end and state.best_model_checkpoint and best.is_file():
            saved = _saved_in(TrainerState.load_from_json(str(best)))
            values, trained = saved.get("swap"), saved.get("record")
            if values is not None and getattr(inside, "_posswap", None) is not None:
                set_as_trained(inside, SwapRecord.from_dict(values))
        if self._watch is not None:
            steps, tokens = (state.global_step, None) if trained is None else (trained["steps"], trained["tokens"])
            self._write(inside, steps, args, tokens)
            self._watch.detach()
        self._trained = None
        self._check_intact(inside, state)

    def _check_intact(self, model: PreTrainedModel, state: TrainerState) -> None:
        if self.record is None or self.record.swap is None:
            return
        if getattr(model, "_posswap", None) is None:
            raise SwapVerificationError(
                f"{type(model).__name__} lost its swap by step {state.global_step}: something called unpatch_model, or "
                "gave the Trainer another model. Checkpoints before that step are as they should be; resume from one "
                "without that call."
            )
        check_structure(model)
        if self.scheme is not None:
            check_scheme(model, self.scheme)

    def _write(self, model: PreTrainedModel, steps: int, args: TrainingArguments, tokens: int | None = None) -> None:
        """Put the record into the config, where every save takes it along; `tokens` None: those read until now."""
        assert self.record is not None
        assert self._watch is not None
        self._swap = getattr(model.config, "posswap", None)
        self.record = replace(
            self.record,
            steps=steps,
            tokens=self._before + self._watch.tokens * args.world_size if tokens is None else tokens,
            swap=None if self._swap is None else swap_digest(SwapRecord.from_dict(self._swap)),
        )
        setattr(model.config, NAME, self.record.to_dict())


def _warn_of_decay(model: PreTrainedModel, optimizer: object) -> None:
    """Warn of weight decay on vectors that a mechanism learns: of a slope before its softplus 0 is not neutral."""
    groups = getattr(optimizer, "param_groups", ())
    rates = {id(parameter): group.get("weight_decay", 0) for group in groups for parameter in group["params"]}
    decayed = {
        f"{path}.{name}": rates[id(parameter)]
        for path, module in model.named_modules()
        if isinstance(module, Mechanism)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim < 2 and rates.get(id(parameter))
    }
    if decayed:
        warnings.warn(
            f"weight decay of {max(decayed.values())} pulls {', '.join(decayed)} towards 0, which changes the position "
            "mechanism without any gradient. Set weight_decay=0, or give the Trainer optimizers= with these parameters "
            "in a group without decay.",
            TrainingWarning,
            stacklevel=2,
        )


def _saved_in(state: TrainerState) -> dict[str, Any]:
    """Return the record and the swap that the callback stored in a checkpoint; {}: there was no callback."""
    stored = vars(state)["stateful_callbacks"].get(PosswapCallback.__name__)
    last = stored[-1] if isinstance(stored, list) else stored
    saved = (last or {}).get("attributes", {}).get("resumed")
    return saved if isinstance(saved, dict) else {}


def _of_any_weight(record: SwapRecord) -> SwapRecord:
    """Return a record whose blends are all at weight 0."""
    main, *stacks = (
        scheme | {"weight": 0.0} if scheme.get("name") == "blend" else scheme
        for scheme in (record.scheme, *(record.stacks or {}).values())
    )
    return replace(record, scheme=main, stacks=record.stacks and dict(zip(record.stacks, stacks, strict=True)))
