"""The answer of `shardkit plan` for other programs (`--json`)."""

from dataclasses import asdict
from typing import Any

from shardkit.config.schema import Config
from shardkit.plan.answer import Answer, Row, checkpoint_bytes, retries
from shardkit.plan.devices import HOST_RESERVE_BYTES, Device
from shardkit.plan.failures import RESTART_S
from shardkit.plan.roofline import LINK_EFFICIENCY


def to_json(answer: Answer) -> dict[str, Any]:
    """The answer for other programs. Bytes are ints."""
    request = answer.request
    return {
        "model": {
            "spec": request.description.spec,
            "name": request.description.name,
            "parameters": request.description.numel,
            "facts": asdict(request.description.facts) if request.description.facts else None,
            "adapters": asdict(request.adapters) if request.adapters else None,
        },
        "world_size": request.world_size,
        "ranks_per_machine": request.ranks_of_a_machine,
        "ranks_joined": min(request.ranks_joined, request.world_size),
        "device": {
            "name": request.device.name,
            "memory_bytes": request.device.memory_bytes,
            "reserve_bytes": request.device.reserve_bytes,
            "host_bytes_per_rank": request.rank_device.host_bytes,
            "host_reserve_bytes": HOST_RESERVE_BYTES,
            "link_bytes_per_s": request.device.link_bytes_per_s,
            "network_bytes_per_s": request.device.network_bytes_per_s,
        },
        "settings": _settings_json(request.config),
        "optimizer": request.own_optimizer or request.optimizer,
        "loss": request.loss.value,
        "ema": request.ema.value,
        "batch": request.own_batch,
        "batch_size": request.batch_size,
        "seq_len": request.sequence_tokens,
        "context": {
            "size": request.shared_by,
            "rank_tokens": request.rank_tokens,
            "step_sequences": request.step_sequences,
        },
        "run": asdict(request.run) if request.run else None,
        "strategies": [_row_json(row, request.rank_device) for row in answer.rows],
        "chosen": answer.chosen.value,
        "suggested": answer.suggested.value if answer.suggested else None,
        "reason": answer.reason,
        "checkpoint_bytes": checkpoint_bytes(request, answer.chosen_row.estimate),
        "changes": [asdict(change) for change in answer.changes],
        "finding": asdict(answer.finding) if answer.finding else None,
        "assumptions": {
            "compute_efficiency": asdict(answer.chosen_row.time.efficiency) if answer.chosen_row.time else None,
            "link_efficiency": LINK_EFFICIENCY,
            "storage_bytes_per_s": request.written_per_s,
            "restart_s": RESTART_S,
        },
        "notes": list(answer.notes),
    }


def _settings_json(config: Config) -> dict[str, Any]:
    """The settings that decide memory and time, and are not in other parts of the answer."""
    section, recomputes = config.shardkit, config.fsdp.activation_checkpointing
    return {
        "mixed_precision": config.mixed_precision,
        "gradient_accumulation_steps": section.gradient_accumulation_steps,
        "activation_checkpointing": recomputes,
        "recompute": section.recompute if recomputes else None,
        "recompute_every": section.recompute_every if recomputes else None,
        "offload_params": config.fsdp.offload_params,
        "offload_activations": section.offload_activations,
        "offload_optimizer": section.offload_optimizer,
        "compile": section.compile,
    }


def _row_json(row: Row, device: Device) -> dict[str, Any]:
    traffic, time = row.estimate.traffic, row.time
    return {
        "strategy": row.strategy.value,
        "number": row.strategy.number,
        "shards": row.estimate.axes.shards,
        "replicas": row.estimate.axes.replicas,
        "units": row.estimate.units,
        "method": "simulation" if row.simulated else "closed form",
        "peak_bytes": row.memory.peak.total,
        "peak": asdict(row.memory.peak),
        "peak_moment": row.memory.moment,
        "reserved_bytes": row.memory.reserved_bytes,
        "reserved_expandable_bytes": row.memory.expandable_bytes,
        "runs_with_retries": retries(device, row.memory),
        "host": asdict(row.memory.host),
        "activations_known": row.memory.activations_known,
        "activations_left_out": list(row.memory.gaps),
        "fits": row.fits,
        "traffic": {
            "payload_bytes": traffic.payload_bytes,
            "sent_bytes": traffic.sent_bytes,
            "inside_bytes": traffic.inside_bytes,
            "between_bytes": traffic.between_bytes,
            "collectives": [asdict(collective) for collective in traffic.collectives],
        },
        "step_time_estimate": None
        if time is None
        else {
            "fastest_s": time.fastest_s,
            "slowest_s": time.slowest_s,
            "compute_s": list(time.compute_s),
            "tokens_per_s": [time.tokens / time.slowest_s, time.tokens / time.fastest_s],
            "inside_s": time.inside_s,
            "between_s": time.between_s,
            "exchange_s": time.exchange_s,
            "mfu": [time.worst_mfu, time.best_mfu],
        },
        "run_estimate": asdict(row.run) if row.run else None,
    }
