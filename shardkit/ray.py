"""shardkit inside Ray Train's workers: a whole script on each of them, checkpoints reported to Ray and taken from it.

    TorchTrainer(run_script, train_loop_config={...}, ...)     what `shardkit submit --to ray` writes
    report(accelerator, {"loss": ...}, accelerator.save_state())
    resume(accelerator)                                         after prepare

Ray starts the workers, says who is which, and brings the process group up; the Accelerator uses it as it is.
"""

import runpy
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shardkit import env
from shardkit.config import files
from shardkit.errors import MachineError


class Training(Protocol):
    """What is used of an Accelerator."""

    @property
    def is_main_process(self) -> bool: ...

    def load_state(self, input_dir: str | Path | None = None) -> Path: ...

    def resume(self) -> bool: ...


def report(accelerator: Training, metrics: Mapping[str, Any], checkpoint: Path | str | None = None) -> None:
    """Metrics for Ray, and with them a checkpoint's folder, which Ray copies into its storage under the same name.

    Every worker must call it, with the same folder: what `accelerator.save_state()` returns. Rank 0 hands it over. With
    `save_state(blocking=False)` the folder is not complete yet: report it at the next save.
    """
    train = _ray_train()
    name, found = None, None
    if checkpoint is not None:
        name = Path(checkpoint).name
        found = train.Checkpoint.from_directory(str(checkpoint)) if accelerator.is_main_process else None
    train.report(dict(metrics), checkpoint=found, checkpoint_dir_name=name)


def resume(accelerator: Training) -> bool:
    """Restores the newest checkpoint that was reported to Ray, else what `accelerator.resume()` finds; whether it did.

    To be called after `prepare`, by every worker. The number of workers may be another than when it was saved.
    """
    found = _ray_train().get_checkpoint()
    if found is None:
        return accelerator.resume()
    with found.as_directory() as folder:
        accelerator.load_state(folder)
    return True


def run_script(settings: Mapping[str, Any]) -> None:
    """The worker's whole work: `script` with its `arguments` as `__main__`, under the YAML in `configuration`.

    With another number of workers than the configuration's (elastic training) it holds for as many as there are. A
    script that ends with another code than 0 is an error of the worker.
    """
    context = _ray_train().get_context()
    with tempfile.TemporaryDirectory(prefix="shardkit-") as folder:
        path = Path(folder) / "shardkit.yaml"
        path.write_text(configuration_for(settings["configuration"], context.get_world_size()), encoding="utf-8")
        env.update({env.CONFIG: str(path)})
        script, arguments = str(settings["script"]), list(settings["arguments"])
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(Path.cwd() if settings["is_module"] else Path(script).resolve().parent))
        try:
            if settings["is_module"]:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise RuntimeError(f"{script} ended with code {stop.code}") from stop


def configuration_for(text: str, world_size: int) -> str:
    """The configuration for as many workers as there are: on as many machines as they fill, else as if on one."""
    loaded = files.read_text(text)
    config = loaded.config
    if config.num_processes == world_size:
        return text
    machines, rest = divmod(world_size, config.processes_per_machine)
    said = {"num_processes": world_size, "num_machines": machines if machines and not rest else 1}
    return files.dump_chosen(files.overlaid(config, said), {*loaded.chosen, *said})


def _ray_train() -> Any:
    try:
        from ray import train
    except ImportError as error:
        raise MachineError(
            f"shardkit.ray: needs Ray Train ({error}); install it with: pip install 'ray[train]'"
        ) from None
    return train
