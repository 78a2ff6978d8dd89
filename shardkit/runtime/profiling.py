"""torch.profiler traces, one per rank: `accelerator.profile()`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from shardkit.checkpoint.files.paths import on_disk
from shardkit.config.code import with_given
from shardkit.config.schema import Config, ProfileConfig
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.runtime import settings_objects
from shardkit.runtime.run import Run

log = get_logger(__name__)


@contextmanager
def traced(run: Run, handler: Any = None) -> Iterator[profile]:
    """torch.profiler over the block, configured by `shardkit.profile` or by `handler`, a settings object.

    Where a folder is set, each rank writes its trace into it (`profile_<rank>.json`; with a schedule
    `profile_<rank>.<cycle>.json`), for chrome://tracing or ui.perfetto.dev. With a schedule the loop must call
    `profiler.step()` after each step. A handler's `on_trace_ready(profiler)` replaces writing the file.
    """
    section = run.config.shardkit.profile if handler is None else _section_of(handler)
    of_user = _of_handlers(run) if handler is None else getattr(handler, "on_trace_ready", None)
    folder = _folder(run, section, of_user)
    written: list[Path] = []
    writer = None if folder is None else _writer(folder, run.process.rank, bool(section.active), written)
    with profile(
        activities=_activities(section),
        schedule=_schedule(section),
        on_trace_ready=of_user or writer,
        record_shapes=section.record_shapes,
        profile_memory=section.profile_memory,
        with_stack=section.with_stack,
        with_flops=section.with_flops,
        with_modules=section.with_modules,
    ) as profiler:
        yield profiler
    if folder is None:
        return
    if written:
        log.info("profile: traces of all ranks are in %s.", folder)
        return
    log.warning(
        "profile: no trace was written, since the schedule begins to record after %d calls of profiler.step() (got "
        "%d); call it after each step, or lower skip_first, wait and warmup of shardkit.profile.",
        section.skip_first + section.wait + section.warmup,
        profiler.step_num,
    )


def _section_of(handler: Any) -> ProfileConfig:
    if not settings_objects.says_settings(handler):
        text = (
            settings_objects.foreign_text(handler)
            or f"is not a settings object (got {handler!r}); use shardkit.profile in the YAML"
        )
        raise UsageError(f"profile: {text}.")
    config, _, _ = with_given(Config(), {}, [settings_objects.said_by(handler, "profile_handler")])
    return config.shardkit.profile


def _of_handlers(run: Run) -> Callable[[profile], None] | None:
    found = (getattr(handler, "on_trace_ready", None) for handler in run.handlers)
    return next((call for call in found if call is not None), None)


def _folder(run: Run, section: ProfileConfig, of_user: Any) -> Path | None:
    """The folder of the traces; None where the user's code handles them, or no folder is set."""
    if of_user is not None:
        return None
    if section.folder is None and run.project.logging_dir is None:
        log.info(
            "profile: no traces are written, as no folder is set; set shardkit.profile.folder, or give "
            "Accelerator(project_dir=...)."
        )
        return None
    folder = on_disk(section.folder, "profile") if section.folder else Path(str(run.project.logging_dir)) / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _activities(section: ProfileConfig) -> list[ProfilerActivity]:
    names = [name.upper() for name in section.activities]
    return [getattr(ProfilerActivity, name) for name in names] or list(supported_activities())


def _schedule(section: ProfileConfig) -> Any:
    if not section.active:
        return None
    return schedule(
        skip_first=section.skip_first,
        wait=section.wait,
        warmup=section.warmup,
        active=section.active,
        repeat=section.repeat,
    )


def _writer(folder: Path, rank: int, has_cycles: bool, written: list[Path]) -> Callable[[profile], None]:
    """A function that writes the trace of each cycle, and adds its path to `written`."""

    def write(profiler: profile) -> None:
        name = f"profile_{rank}.{len(written) + 1}.json" if has_cycles else f"profile_{rank}.json"
        profiler.export_chrome_trace(str(folder / name))
        written.append(folder / name)

    return write
