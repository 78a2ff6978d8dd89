"""Simulates training steps on fake tensors. Run in a child process by `simulation.py`, because it loads torch and user
code and starts a process group."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)

from shardkit.config.meaning import dtypes, eight_bits
from shardkit.config.schema import Config
from shardkit.errors import ShardkitError, UsageError
from shardkit.model import gpt, gpt_module
from shardkit.model.adapters import Adapters, chosen
from shardkit.model.builtin import BUILTIN
from shardkit.model.cut import as_trained, cut
from shardkit.model.live import tree_of
from shardkit.model.probe import build_factory, build_transformers, error_text, in_library, where
from shardkit.model.tree import ModuleNode
from shardkit.optim.stepping import needs_whole_tensors
from shardkit.plan import batches, fake_world, repeats, simulated_optimizers
from shardkit.plan.allocator import replay, two_steps
from shardkit.plan.averages import Ema
from shardkit.plan.memory_tracker import MemoryTracker
from shardkit.plan.rank_memory import Moment
from shardkit.plan.repeats import RepeatedBlocks
from shardkit.plan.simulation import Job
from shardkit.plan.training_step import tracked_forward, tracked_step
from shardkit.plan.unit_sizes import optimizers_of
from shardkit.sharding.context_parallel.region import Region


@dataclass(frozen=True)
class Step:
    """One simulated step: its moments, bytes of its collectives, and trained parameters without a gradient.

    `reserved`: what CUDA's allocator would reserve ("segments", or "expandable" segments); None for shortened steps.
    `host_bytes`: offloaded activations. `is_stepped_in_chunks`: what the optimizer holds does not grow with the blocks.
    """

    moments: list[Moment]
    payload_bytes: dict[str, int]
    unused: tuple[str, ...] = ()
    reserved: dict[str, int] | None = None
    host_bytes: int = 0
    is_stepped_in_chunks: bool = False


def main() -> None:
    """With the arguments JOB RESULT: reads the job, writes the steps or the error."""
    job_file, result = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        job = Job(**json.loads(job_file.read_text()))
        sys.path.insert(0, job.here)
        answer: dict[str, Any] = {"steps": [_to_json(*simulated(job, Config(**c))) for c in job.configs]}
    except ShardkitError as error:
        answer = {"refused": str(error)}
    except (Exception, SystemExit) as error:
        answer = {"error": error_text(error), "where": where(error), "in_library": in_library(error)}
    result.write_text(json.dumps(answer))


def simulated(job: Job, config: Config) -> tuple[Step, str | None]:
    """The step of the whole model, and a note if it could not be shortened."""
    has_equal_settings = not config.fsdp.activation_checkpointing or config.shardkit.recompute_every == 1
    tree = _tree(job) if has_equal_settings and not job.is_exact else None
    runs = [] if tree is None else repeats.runs_of(tree)
    if tree is None or not runs:
        return _step(job, config, []), None
    try:
        found = _extrapolated(job, config, tree, runs)
    except Exception:  # the model counts its blocks, or names them; an error of another cause comes again below
        gc.collect()
        found = _DOES_NOT_RUN
    if isinstance(found, Step):
        return found, None
    return _step(job, config, []), f"Every layer was simulated: {found}."


_DOES_NOT_RUN = "the model does not run with fewer"


def _extrapolated(job: Job, config: Config, tree: ModuleNode, runs: Sequence[RepeatedBlocks]) -> Step | str:
    """The step of the whole model, from steps with a few blocks of each run; or why these do not tell it."""
    fewest, more = repeats.shortened(runs)
    if not all(_is_cut_alike(job, config, tree, those) for those in (fewest, *more)):
        return "fewer layers would be divided into other units"
    if not _is_computed_alike(job, config, runs):
        return "equal layers do not all add the same memory"
    short = _step(job, config, fewest)
    if short.is_stepped_in_chunks:
        return "the optimizer needs whole tensors, of which it gathers some at a time"
    longer = [_step(job, config, those) for those in more]
    moments = repeats.whole_step(runs, short.moments, [step.moments for step in longer])
    if moments is None:
        return _DOES_NOT_RUN
    payload, host_bytes = Counter(short.payload_bytes), short.host_bytes
    for run, step in zip(runs, longer, strict=True):
        left_out = run.length - repeats.KEPT
        host_bytes += (step.host_bytes - short.host_bytes) * left_out
        for kind, size in step.payload_bytes.items():
            payload[kind] += (size - short.payload_bytes.get(kind, 0)) * left_out
    return Step(moments, dict(payload), short.unused, host_bytes=host_bytes)


def _tree(job: Job, runs: Sequence[RepeatedBlocks] = ()) -> ModuleNode:
    """The modules of `_shortened`; the model is built only if the sizes alone do not determine them."""
    if job.kind == "gpt" and job.adapters is None:
        return gpt.tree(_shape(job, runs))
    with fake_world.fake_tensors():
        return tree_of(_shortened(job, runs))


def _is_cut_alike(job: Job, config: Config, tree: ModuleNode, runs: Sequence[RepeatedBlocks]) -> bool:
    """Whether the shortened model's units are the whole model's, except those of omitted blocks."""
    if config.mode != "fsdp":
        return True
    short = _tree(job, runs)
    found = {repeats.original_name(fqn, runs)[0] for fqn in _units_of(short, config)}
    whole = set(_units_of(tree, config))
    present = {repeats.original_name(node.fqn, runs)[0] for node in short.walk()}
    return found == whole & present


def _is_computed_alike(job: Job, config: Config, runs: Sequence[RepeatedBlocks]) -> bool:
    """Whether forward of all layers, unsharded, holds what is extrapolated from a few. It does not if the code looks at
    a layer's number: every second one recomputed, the first half without a gradient, features of every eighth kept."""
    if job.kind == "gpt":
        return True
    fewest, more = repeats.shortened(runs)
    short, longer = _forward(job, config, fewest), [_forward(job, config, those) for those in more]
    return repeats.whole_step(runs, short, longer) == _forward(job, config, runs)


def _forward(job: Job, config: Config, runs: Sequence[RepeatedBlocks]) -> list[Moment]:
    """The moments of forward and loss, without the runtime."""
    world = job.world_size, job.ranks_per_machine
    with fake_world.joined(config, *world), fake_world.shared_sequences(config) as region:
        model = _shortened(job, runs)
        fake_world.keep_in_place(model)
        loss = _loss(job, model, region)
        blocks = {
            f"{run.container}.{index}".lstrip("."): block
            for run in runs
            for index, block in enumerate(model.get_submodule(run.container).children())
        }
        moments = tracked_forward(model, blocks, loss).moments
        del model, loss, blocks
    gc.collect()
    return moments


def _units_of(tree: ModuleNode, config: Config) -> list[str]:
    compute = dtypes(config).param
    return [unit.fqn for unit in cut(as_trained(tree, compute), config.fsdp, compute).units]


def _shape(job: Job, runs: Sequence[RepeatedBlocks] = ()) -> gpt.GptShape:
    shape = BUILTIN.get(job.spec) or gpt.parse(job.spec.removeprefix("gpt:"))
    return replace(shape, layers=runs[0].kept) if runs else shape


def _built(job: Job) -> nn.Module:
    """The whole model with fake tensors. A constructor that reads tensor values or moves modules (PEFT) is run on the
    meta device instead, as when the model was described."""
    build = build_transformers if job.kind == "transformers" else build_factory
    try:
        return build(job.spec)
    except (DataDependentOutputException, DynamicOutputShapeException):
        pass
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):  # nn.Module._apply on fake parameters that something refers to weakly
            raise
    with unset_fake_temporarily(), torch.device("meta"):
        model = build(job.spec)
    return fake_world.with_fake_tensors(model)


def _shortened(job: Job, runs: Sequence[RepeatedBlocks]) -> nn.Module:
    """The model with the `kept` blocks of each run; all of them if `runs` is empty. With the job's adapters, if any,
    which peft moves: it is built on the meta device then."""
    if job.adapters is None:
        return _plain(job, runs)
    with unset_fake_temporarily(), torch.device("meta"):
        model = _adapted(_plain(job, runs), Adapters(**job.adapters))
    return fake_world.with_fake_tensors(model)


def _plain(job: Job, runs: Sequence[RepeatedBlocks]) -> nn.Module:
    """The model with the `kept` blocks of each run, without adapters."""
    if job.kind == "gpt":
        return gpt_module.GPT(_shape(job, runs))
    model = _built(job)
    repeats.shorten(model, runs)
    return model


def _adapted(model: nn.Module, adapters: Adapters) -> nn.Module:
    """The model with adapters, as peft puts them in; its own weights are frozen, in their dtype."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UsageError(
            "--lora: a simulation needs peft (not installed); pip install peft, or leave --simulate out."
        ) from None
    layers, dtype = chosen(tree_of(model), adapters), getattr(torch, adapters.dtype)
    frozen = {p: nn.Parameter(p.detach().to(dtype), requires_grad=False) for p in model.parameters()}
    for module in model.modules():
        module._parameters.update({name: frozen[p] for name, p in module._parameters.items() if p is not None})
    return inject_adapter_in_model(LoraConfig(r=adapters.rank, target_modules=layers), model)


def _step(job: Job, config: Config, runs: Sequence[RepeatedBlocks]) -> Step:
    """One step; repeated if some parameters get no gradient, and so have no optimizer state."""
    found = _tracked(job, config, runs, ())
    return _tracked(job, config, runs, found.unused) if found.unused else found


def _tracked(job: Job, config: Config, runs: Sequence[RepeatedBlocks], stateless: tuple[str, ...]) -> Step:
    # Broadcasting rank 0's values and compiling do not change the simulated memory.
    config = config.changed(fsdp={"sync_module_states": False}, shardkit={"compile": False})
    if eight_bits(config):  # needs the device's kernels; memory is that of bf16
        config = config.changed(mixed_precision="bf16")
    world = job.world_size, job.ranks_per_machine
    with fake_world.joined(config, *world) as (process, mesh), fake_world.shared_sequences(config) as region:
        model = _shortened(job, runs)
        fake_world.keep_in_place(model)
        loss = _loss(job, model, region)
        if job.loss == "dropped":
            loss = batches.without_output(loss)
        has_buckets = config.mode == "ddp" and job.world_size > 1
        kinds = None if ":" in job.optimizer else optimizers_of(tree_of(model), job.optimizer)
        make, needs_whole = simulated_optimizers.optimizer_factory(job.optimizer, kinds), list[bool]()

        def factory(parameters: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
            optimizers = make(parameters)
            needs_whole.extend(map(needs_whole_tensors, optimizers))
            return optimizers

        ema = Ema(job.ema)
        tracker, unused = tracked_step(model, config, mesh, process, factory, loss, has_buckets, stateless, ema)
        reserved = None if runs else _reserved(tracker)
        in_chunks = config.mode == "fsdp" and any(needs_whole)
        step = Step(tracker.moments, tracker.payload_bytes, unused, reserved, tracker.host_bytes, in_chunks)
        del model, loss, tracker
    gc.collect()
    return step


def _reserved(tracker: MemoryTracker) -> dict[str, int]:
    found = tracker.recording
    steps = list(two_steps(found.before, found.events, found.optimizer_at))
    return {"segments": replay(steps), "expandable": replay(steps, is_expandable=True)}


def _loss(job: Job, model: nn.Module, region: Region) -> batches.LossFunction:
    is_fused = job.loss == "fused"
    if is_fused and (job.batch is not None or not batches.fuse_loss(model)):
        what = "with --batch the model computes its own loss" if job.batch else "the model's head is unknown"
        raise UsageError(f"--loss fused: {what} (got {job.spec}); use --loss dropped.")
    if job.batch is not None:
        return batches.of_slices(region, batches.given_batch(job.batch), batches.given_loss)
    if job.kind == "gpt":
        shape = _shape(job)
        tokens = torch.zeros(job.batch_size, job.seq_len or shape.seq, dtype=torch.long)
        loss_of = batches.given_loss if is_fused else partial(batches.next_token_loss, vocabulary=shape.vocab)
        return batches.of_slices(region, tokens, loss_of)
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        batch = batches.transformers_batch(model, job.batch_size, job.seq_len)
        if is_fused:
            batch.pop("labels", None)
        return batches.of_slices(region, batch, batches.given_loss)
    raise UsageError(
        f"--simulate: the inputs of {job.spec} are unknown (got no --batch); "
        "add --batch module:function, a function that returns one micro-batch."
    )


def _unused_remark(unused: tuple[str, ...]) -> list[str]:
    if not unused:
        return []
    modules = dict.fromkeys(name.rpartition(".")[0] for name in unused)
    first = next(iter(modules))
    others = " and others" if len(modules) > 1 else ""
    return [
        f"No gradient in the simulated step, and so no optimizer state: {first}{others}. If your batches use them, "
        "add --batch module:function."
    ]


def _to_json(step: Step, remark: str | None) -> dict[str, Any]:
    return {
        "moments": [[m.phase, m.unit, list(asdict(m.memory).values())] for m in step.moments],
        "payload_bytes": step.payload_bytes,
        "reserved": step.reserved,
        "host_bytes": step.host_bytes,
        "remarks": [*([remark] if remark else []), *_unused_remark(step.unused)],
    }
