"""One rank of `benchmarks.memory`: trains the case's model for real and notes how far its resident memory rose."""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.memory import Case, configuration, ranks_per_machine
from shardkit.config.schema import Config
from shardkit.distributed.process import Process
from shardkit.optim.stepping import stepper_of
from shardkit.plan import simulated_optimizers, worker
from shardkit.runtime.measure import resident_bytes
from shardkit.sharding import precision
from shardkit.sharding.context_parallel.groups import build_group
from shardkit.sharding.context_parallel.region import Region
from shardkit.sharding.mesh import build_mesh
from shardkit.sharding.parallelize import parallelize


def main() -> None:
    """`python -m benchmarks.memory_rank ORDER`, under torch.distributed.run."""
    order = json.loads(Path(sys.argv[1]).read_text())
    case = Case(**order["case"])
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    near = ranks_per_machine(case)
    process = Process(rank, rank % near, size, near, torch.device("cpu"), "gloo")
    config = configuration(case)
    trained(order["small"], case, config, process)  # libraries and their buffers
    start = settled()
    peak = trained(order["spec"], case, config, process)
    Path(order["folder"], f"rank{rank}.txt").write_text(str(peak - start))
    dist.destroy_process_group()


def trained(spec: str, case: Case, config: Config, process: Process) -> int:
    """Three steps; the highest resident memory in the last, in bytes. DDP lays its buckets out anew in the second."""
    kind = "gpt" if spec.startswith("gpt:") else "transformers"
    job = worker.Job(
        kind, spec, [], process.world_size, process.local_world_size, "adamw", None, case.batch_size, None, True
    )
    torch.manual_seed(0)
    model = worker._shortened(job, [])
    loss = worker._loss(job, model, Region(build_group(config, process), process.control, process.device))
    precision.autocast_forward(model, config, process.device)
    parallel = parallelize(model, config, build_mesh(config, process), process)
    trained = {name: p for name, p in parallel.named_parameters() if p.requires_grad}
    (optimizer,) = simulated_optimizers.optimizer_factory(case.optimizer)(trained)
    stepper = stepper_of(optimizer)
    for _ in range(3):
        settled()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        dist.barrier()
        output, value = loss(parallel)
        value.backward()
        stepper.step()
        optimizer.zero_grad()
        del output, value
    return resident_bytes("VmHWM")


def settled() -> int:
    """Resident memory after everything that can be let go is."""
    gc.collect()
    return resident_bytes()


if __name__ == "__main__":
    main()
