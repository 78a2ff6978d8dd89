"""An Answer as text for a terminal, 80 columns wide, without colour."""

from collections.abc import Sequence
from textwrap import fill, wrap

from shardkit.config.meaning import dtypes, eight_bits, offloads_state
from shardkit.config.schema import Config
from shardkit.plan import whole_run
from shardkit.plan.activations import LOSS_TEXTS
from shardkit.plan.answer import Answer, PlanRequest, Row, checkpoint_bytes, retries, yes_no
from shardkit.plan.averages import Ema
from shardkit.plan.closed_form import keeps_on_host, keeps_shards_on_host
from shardkit.plan.devices import HOST_RESERVE_BYTES
from shardkit.plan.rank_memory import CATEGORIES
from shardkit.plan.roofline import COMPILE_SPEEDUP, LINK_EFFICIENCY
from shardkit.sizes import GIB, MIB, in_words
from shardkit.wording import count_text, counted

_HEADS = {
    "parameters": "param",
    "gradients": "grad",
    "optimizer_state": "optim",
    "gathered": "gather",
    "reduction": "reduce",
    "activations": "activ",
}


def render(answer: Answer) -> str:
    """The whole report."""
    parts = [
        _headline(answer.request),
        _memory_table(answer),
        _step_table(answer),
        _run_table(answer),
        _suggestion(answer),
        _changes(answer),
        _filled(answer.finding.text) if answer.finding else "",
        _notes(answer),
    ]
    return "\n\n".join(part for part in parts if part)


def _headline(request: PlanRequest) -> str:
    config = request.config
    where = counted(request.world_size, "rank")
    if request.machines > 1:
        where += f" on {counted(request.machines, 'machine')}"
    load = [where, request.device.name, _precision(config)]
    if request.adapters:
        trained = sum(p.numel for _, p in request.description.tree.owned() if p.trainable)
        load += f"{request.adapters.text}: {count_text(trained)} trained".split(", ")
    load.append(request.own_optimizer or request.optimizer)
    if request.own_batch:
        load.append(f"micro-batch of {request.own_batch}")
    if request.batch_size and request.sequence_tokens:
        by_formula = " in the closed form" if request.own_batch else ""
        tokens, ranks = counted(request.sequence_tokens, "token"), request.shared_by
        each = "a rank" if ranks == 1 else f"for {ranks} ranks, which share each sequence"
        load.append(f"micro-batch {request.batch_size:,} x {tokens} {each}{by_formula}")
    elif request.shared_by > 1:
        load.append(f"sequences shared by {request.shared_by} ranks")
    if config.shardkit.gradient_accumulation_steps > 1:
        load.append(f"{config.shardkit.gradient_accumulation_steps} micro-batches a step")
    if config.fsdp.activation_checkpointing:
        every = config.shardkit.recompute_every
        part = f" of 1 block in {every}" if every > 1 else ""
        load.append(f"activation checkpointing{part}" + (" by operator" if _by_operator(config) else ""))
    if keeps_on_host(config):
        load.append("activations on the host")
    if request.ema is not Ema.NO:
        load.append("EMA of the model" if request.ema is Ema.MODEL else "EMA of trained parameters")
    if keeps_shards_on_host(config):
        load.append("offload to the host")
    if offloads_state(config):
        load.append("optimizer state on the host")
    lines = [_wrapped(request.description.text.split(", ")), _wrapped(load)]
    if request.has_unusual_sequences:
        lines.append("(the longest sequences that the model takes; --seq-len plans shorter ones)")
    return "\n".join(lines)


def _precision(config: Config) -> str:
    compute, kind = dtypes(config).param or "fp32", eight_bits(config)
    return f"{compute} and {kind}" if kind else compute


def _by_operator(config: Config) -> bool:
    return config.shardkit.recompute == "operators"


def _wrapped(parts: Sequence[str], width: int = 80) -> str:
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(joined) > width:
            lines.append(part)
        else:
            lines[-1] = joined
    return ",\n".join(lines)


def _memory_table(answer: Answer) -> str:
    known = all(row.memory.activations_known for row in answer.rows)
    counted = any(moment.memory.activations for row in answer.rows for moment in row.memory.timeline)
    scale, unit = _unit(max(row.memory.peak.total for row in answer.rows))
    limit = answer.request.device.memory_bytes
    of_device = f"; the device has {limit / GIB:,.1f} GiB" if limit else ""
    columns = [name for name in CATEGORIES if counted or name != "activations"]
    table = [[_number(getattr(row.memory.peak, name) / scale) for name in [*columns, "total"]] for row in answer.rows]
    head, *aligned = _aligned([_HEADS[name] for name in columns] + ["peak"], table, [7] * len(columns) + [8])
    lines = wrap(f"Memory of one rank at its peak, {unit} ({_method(answer)}{of_device})", 80)
    lines.append(f"  {'strategy':<20}{head}  fits")
    for row, cells in zip(answer.rows, aligned, strict=True):
        lines.append(f"{_mark(answer, row)}{row.label:<20}{cells}  {yes_no(row.fits)}")
        if row.memory.host.total:
            over = "" if answer.request.rank_device.host_has_room(row.memory.host.total) else ", more than its part"
            lines.append(f"  {'':<20}  and {_number(row.memory.host.total / scale)} in the host's memory{over}")
    lines.append(f"  * configured; its peak is in {answer.chosen_row.memory.moment}")
    lines += _reserved_lines(answer)
    if not known:
        lines += [f"  {line}" for line in wrap(_left_out(answer, counted), 78)]
    return "\n".join(lines)


def _aligned(heads: list[str], table: list[list[str]], least: list[int]) -> list[str]:
    """The heads and each row as one line; columns are at least so wide, and wider where a cell needs it."""
    widths = [max(width, *(len(row[index]) + 1 for row in table)) for index, width in enumerate(least)]
    return ["".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in [heads, *table]]


def _number(value: float) -> str:
    """One digit after the point; 0 is "0", other values below 0.05 are "<0.1"."""
    if value < 0.05:
        return "<0.1" if value else "0"
    return f"{value:,.1f}" if value < 999.95 else f"{value:,.0f}"


def _method(answer: Answer) -> str:
    simulated = [row for row in answer.rows if row.simulated]
    if len(simulated) == len(answer.rows):
        return "simulated"
    return "* simulated, the others closed form" if simulated else "closed form"


def _reserved_lines(answer: Answer) -> list[str]:
    """Reserved memory of each row that was simulated with all its layers."""
    if not answer.request.device.has_caching_allocator:
        return []
    simulated = [row for row in answer.rows if row.simulated and not row.memory.host.parameters]
    texts = [_reserved_text(answer, row) for row in simulated if row.memory.reserved_bytes is not None]
    if len(texts) < len(simulated):
        texts.append("Add --exact for the memory that CUDA's allocator reserves.")
    return [f"  {line}" for text in texts for line in wrap(text, 78)]


def _reserved_text(answer: Answer, row: Row) -> str:
    device, memory = answer.request.rank_device, row.memory
    reserved, expandable = memory.reserved_bytes or 0, memory.expandable_bytes or 0
    text = f"{row.strategy.number} reserves {reserved / GIB:,.2f} GiB (CUDA's allocator, replayed)"
    text += f"; {expandable / GIB:,.2f} with expandable segments."
    if not retries(device, memory):
        return text
    text += " That exceeds the device's memory: the allocator retries, and steps are slower."
    if device.fits(expandable):
        return f"{text} Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    return f"{text} Use a smaller micro-batch, or lower the peak otherwise."


def _left_out(answer: Answer, counted: bool) -> str:
    """Which activations the table does not count."""
    unknown = [row for row in answer.rows if not row.memory.activations_known]
    gaps = dict.fromkeys(gap for row in unknown for gap in row.memory.gaps)
    strategies = f"{'strategy' if len(unknown) == 1 else 'strategies'} "
    strategies += " and ".join(str(row.strategy.number) for row in unknown)
    whose = "" if len(unknown) == len(answer.rows) else f" under {strategies}"
    if not counted:
        return f"Not counted{whose}: {'; '.join(gaps)}. Without them the plan cannot say that a rank fits."
    how = (
        "--strategy all simulates every strategy"
        if any(row.simulated for row in answer.rows)
        else "--simulate counts everything"
    )
    return f"A peak{whose} is a lower bound; not counted: {'; '.join(gaps)}. {how}."


def _unit(largest: int) -> tuple[int, str]:
    return (GIB, "GiB") if largest >= GIB else (MIB, "MiB")


def _mark(answer: Answer, row: Row) -> str:
    return "* " if row.strategy is answer.chosen else "  "


def _step_table(answer: Answer) -> str:
    """Traffic and time of a step; one rank sends nothing."""
    sends = _sends(answer)
    several = sends and _leaves(answer.request)
    timed = any(row.time for row in answer.rows)
    if not sends and not timed:
        return ""
    scale, unit = _unit(max(row.estimate.traffic.sent_bytes for row in answer.rows))
    titles = [f"what one rank sends in one step, {unit}"] if sends else []
    titles += ["time of the step, an estimate"] if timed else []
    columns = (
        ({f"in its {answer.request.device.joined_name}": 14} if sends else {})
        | ({"to others": 11} if several else {})
        | ({"step": 21, "MFU": 12} if timed else {})
    )
    table = []
    for row in answer.rows:
        sent = row.estimate.traffic
        sizes = ([sent.inside_bytes] if sends else []) + ([sent.between_bytes] if several else [])
        table.append([*(_number(size / scale) for size in sizes), *(_time_cells(row) if timed else [])])
    head, *aligned = _aligned(list(columns), table, list(columns.values()))
    title = "; ".join(titles)
    lines = [title[0].upper() + title[1:], f"  {'strategy':<20}{head}"]
    for row, cells in zip(answer.rows, aligned, strict=True):
        lines.append(f"{_mark(answer, row)}{row.label:<20}{cells}".rstrip())
    return "\n".join(lines)


def _run_table(answer: Answer) -> str:
    """The whole run, by each strategy that does not exceed the device."""
    request = answer.request
    if request.run is None:
        return ""
    found = [(row, row.run) for row in answer.rows if row.run and row.fits is not False]
    if not found:
        no_time = "no time of a step is known" if request.batch_size else "add --batch-size"
        why = "no strategy fits" if all(row.fits is False for row in answer.rows) else no_time
        return _filled(f"A run of {whole_run.tokens_text(request.run)}: its time is not known: {why}.")
    heads = ["time", "device-hours", *(["price"] if request.run.price else [])]
    head, *aligned = _aligned(heads, [whole_run.cells(run) for _, run in found], [18, 20, 20][: len(heads)])
    lines = [whole_run.title(request.run, found[0][1]), f"  {'strategy':<20}{head}"]
    lines += [f"{_mark(answer, row)}{row.label:<20}{cells}" for (row, _), cells in zip(found, aligned, strict=True)]
    return "\n".join(lines)


def _sends(answer: Answer) -> bool:
    """Whether a rank sends anything to others."""
    return any(row.estimate.traffic.sent_bytes for row in answer.rows)


def _leaves(request: PlanRequest) -> bool:
    """Whether some ranks are not joined by the devices' own links."""
    return request.world_size > request.ranks_joined


def _time_cells(row: Row) -> list[str]:
    """Time and MFU, from fastest to slowest."""
    if row.time is None:
        return ["", ""]
    seconds = f"{_seconds(row.time.fastest_s)} - {_seconds(row.time.slowest_s)}"
    return [seconds, f"{row.time.worst_mfu:.0%} - {row.time.best_mfu:.0%}"]


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:,.1f} ms" if seconds >= 5e-5 else "<0.1 ms"
    return f"{seconds:,.1f} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _suggestion(answer: Answer) -> str:
    if answer.suggested is None:
        return _filled(f"No strategy is suggested: {answer.reason}.") if answer.reason else ""
    if answer.finding and answer.finding.question == "strategy":  # which is said below
        return ""
    return _filled(f"Suggested: {answer.suggested.number} {answer.suggested.value} ({answer.reason}).")


def _changes(answer: Answer) -> str:
    if not answer.changes:
        return ""
    chosen = answer.chosen_row
    peak = chosen.memory.peak.total
    by_formula = " and by the closed form" if chosen.simulated else ""
    scale, unit = _unit(peak)
    least = "" if chosen.memory.activations_known else "at least "
    needs = f"{chosen.label} needs {least}{peak / scale:,.1f} {unit}."
    lines = wrap(f"{needs} Changes that lower it, each by itself{by_formula} (--set KEY=VALUE plans KEY: VALUE):", 80)
    lines.append(f"{'effect':>12}  fits  change")
    for change in answer.changes:
        saved = change.saved_bytes / scale
        effect = f"-{saved:,.1f} {unit}" if saved >= 0.05 else f"<0.1 {unit}" if saved else "not known"
        columns = f"{effect:>12}  {yes_no(change.fits):<4}  "
        for text in change.text.split(" and "):
            lines += wrap(text, 80, initial_indent=columns, subsequent_indent=" " * 20, break_on_hyphens=False)
            columns = f"{'and':>17}   "
        if change.host_bytes:
            over = "" if answer.request.rank_device.host_has_room(change.host_bytes) else ": more than its part"
            held = f"{_number(change.host_bytes / scale)} {unit} of host memory a rank"
            lines.append(f"{'':>20}with {held}{over}")
    return "\n".join(lines)


def _notes(answer: Answer) -> str:
    device = answer.request.device
    notes = list(answer.notes)
    if any(moment.memory.activations for moment in answer.chosen_row.memory.timeline) and _has_logits(answer):
        notes.append(LOSS_TEXTS[answer.request.loss])
    if device.reserve_bytes and device.memory_bytes:
        notes.append(
            f"It fits if the peak and {device.reserve_bytes / GIB:.0f} GiB for context, communication buffers and "
            f"workspaces are within {device.memory_bytes / GIB:,.1f} GiB. Fragmentation is not counted."
        )
    elif device.name == "CPU" and device.memory_bytes:
        notes.append(
            f"It fits if the peak is within a rank's share of the host memory, {device.memory_bytes / GIB:,.1f} GiB, "
            "of which Python and torch take a quarter of a GiB."
        )
    elif device.memory_bytes is None:
        share = ", a rank's share of the host's" if device.name == "CPU" else ""
        notes.append(f"Whether it fits is not known: add --memory, for example 16GiB{share}.")
    if any(row.memory.host.total for row in answer.rows) or any(change.host_bytes for change in answer.changes):
        notes.append(_of_host_memory(answer))
    if (size := checkpoint_bytes(answer.request, answer.chosen_row.estimate)) is not None:
        notes.append(_of_storage(answer.request, size))
    if (time := answer.chosen_row.time) is not None:
        found = time.efficiency
        faster = f", up to {COMPILE_SPEEDUP} times that with compile" if answer.request.config.shardkit.compile else ""
        notes.append(
            f"Times are estimates: {found.low:.0%} to {found.high:.0%} of the device's peak arithmetic ({found.source})"
            f"{faster}{_links(answer.request) if _sends(answer) else ''}."
        )
    run, found_run = answer.request.run, answer.chosen_row.run
    if run is not None and found_run is not None:
        notes.append("A run: without evaluation, waits for data, saves and failures.")
        if found_run.failures is not None:
            notes.append(whole_run.failures_text(run, found_run, found_run.failures))
    return "\n".join(_filled(note) for note in notes)


def _of_storage(request: PlanRequest, size: int) -> str:
    """What a checkpoint takes of storage."""
    speed = request.written_per_s
    time = whole_run.span_text(size / speed)
    source = "" if request.storage_bytes_per_s else " (1 a machine; --storage)"
    return (
        f"A checkpoint (save_state) takes about {in_words(size)} on disk: {time} where storage writes "
        f"{speed / 1e9:,.4g} GB/s{source}."
    )


def _of_host_memory(answer: Answer) -> str:
    """What the configured strategy has in a machine's host memory, and what that is compared with."""
    request, ranks = answer.request, answer.request.ranks_of_a_machine
    held = answer.chosen_row.memory.host.total * ranks
    text = f"{held / GIB:,.1f} GiB, pinned, for {counted(ranks, 'rank')} of a machine; " if held else ""
    if (share := request.rank_device.host_bytes) is None:
        return f"Host memory: {text}what a machine has is not known, and not compared: add --host-memory."
    has_room = request.rank_device.host_has_room(answer.chosen_row.memory.host.total)
    short = "" if has_room else " That is too little: keep less there, or use more machines or larger ones."
    whose = "from --host-memory" if request.host_bytes else f"usual for {request.device.name}; --host-memory sets it"
    return (
        f"Host memory: {text}a rank's part is {share / GIB:,.1f} GiB ({whose}), less "
        f"{HOST_RESERVE_BYTES / GIB:.0f} GiB for Python, libraries and loaders.{short}"
    )


def _filled(text: str) -> str:
    return fill(text, 80, break_on_hyphens=False)


def _has_logits(answer: Answer) -> bool:
    facts = answer.request.description.facts
    return facts is not None and facts.vocabulary is not None


def _links(request: PlanRequest) -> str:
    device = request.device
    speed = f"{device.link_bytes_per_s / 1e9:,.4g} GB/s in a {device.joined_name}"
    if _leaves(request):
        speed += f", {device.network_bytes_per_s / 1e9:,.4g} GB/s a rank to others"
    return f"; {LINK_EFFICIENCY:.0%} of its links ({speed}), from everything overlapped to nothing"
