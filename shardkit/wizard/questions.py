"""All questions as records: key, title, when it is asked, options and their consequences.

The loop (`loop.py`), plain mode, the review and the docs page use QUESTIONS. A question whose `key` is a setting's name
sets it; `answers.py` converts the others into settings. A question that `applies` but is not `asked` has its default
unless it is changed in the review.
"""

from dataclasses import replace

from shardkit.wizard import conditions, defaults, numbers, options, readers
from shardkit.wizard.options import fixed, yes_no
from shardkit.wizard.prompter import Option
from shardkit.wizard.question import Question, always


def _in_review_only(one: Question) -> Question:
    when = "advanced" if one.asked_when == "always" else f"advanced; {one.asked_when}"
    return replace(one, asked=conditions.never, when=when)


_FIRST = (
    Question(
        key="model",
        title="Which model? (module:function, config.json, .safetensors; Enter: none)",
        default=always(None, "without a model, memory and traffic are not shown"),
        read=readers.model,
        when="without --model",
        help_text="module:function is a function without arguments that returns the model; it is called on the meta "
        "device in a separate process. Also accepted: an open model's name (llama-3.1-8b), a Transformers "
        "config.json, a .safetensors file, a folder with either, or sizes: gpt:layers=..,hidden=..,heads=... Nothing "
        "is downloaded.",
    ),
    Question(
        key="where",
        title="Where will it run?",
        options=options.where,
        default=defaults.where,
        help_text="The hardware of this machine is detected. Another machine: the file is written here, for GPUs "
        "elsewhere. Several machines: each uses the same file, and you run the launch command on each. "
        "SLURM: srun runs it once on each machine.",
    ),
    Question(
        key="tpu_use_cluster",
        title="Is it a TPU pod (several TPU machines)?",
        options=yes_no("the launch starts all of its machines, with gcloud", "one TPU machine"),
        default=always(False, "the usual case"),
        applies=conditions.tpu,
    ),
    Question(
        key="num_machines",
        title="How many machines?",
        default=defaults.machines,
        read=readers.machines,
        applies=conditions.counts_machines,
        asked=conditions.machines_are_asked,
        label="machines",
    ),
    Question(
        key="address",
        title="Address of machine 0? (host or host:port; none: set at launch)",
        default=defaults.address,
        read=readers.address,
        applies=conditions.several,
        label="address of machine 0",
        when="several machines, TPU pod",
        help_text="The other machines connect to it. Without a port, 29500. At launch: --main HOST:PORT.",
    ),
    Question(
        key="rdzv_backend",
        title="How do the machines find each other?",
        options=fixed(
            Option("c10d", "c10d", "rendezvous at machine 0, in any order; restarts possible"),
            Option("static", "static", "the same in shardkit; Accelerate with this file: no restarts"),
            Option("etcd-v2", "etcd-v2", "the same in shardkit (no etcd is used); only for Accelerate with this file"),
            Option("etcd", "etcd", "as etcd-v2, with etcd's older protocol"),
        ),
        default=always("c10d", "machines may start in any order"),
        applies=conditions.several,
        label="rendezvous",
    ),
    Question(
        key="use_cpu",
        title="Which device do the machines train on?",
        options=fixed(
            Option(False, "GPU", "one process per GPU"),
            Option(True, "CPU", "slow; for tests and small models"),
        ),
        default=defaults.use_cpu,
        applies=conditions.chooses_device,
        asked=conditions.no_gpu_here,
        label="trains on",
        when="several machines or another one, and no GPU here",
    ),
    Question(
        key="gpu",
        title="Which GPU do they have?",
        options=options.gpus,
        default=always("h100-80", "the default of shardkit plan"),
        applies=conditions.gpu_is_unknown,
        label="GPU",
        help_text="Its memory determines what fits. The answer is not written into the file; pass it to shardkit plan "
        "as --device.",
    ),
    Question(
        key="gpu_memory",
        title="How much memory has one GPU? (like 48GiB)",
        default=always("48GiB", "an example"),
        read=readers.gpu_memory,
        applies=conditions.another_gpu,
        label="GPU memory",
        help_text="As shown by the driver, in GiB or GB.",
    ),
    Question(
        key="processes_per_machine",
        title="Processes on each machine?",
        default=defaults.processes_per_machine,
        read=readers.processes_per_machine,
        note=options.processes_note,
        help_text="Usually one per GPU. num_processes in the file is the total: this number times the machines.",
    ),
    Question(
        key="mixed_precision",
        title="Precision?",
        options=options.precision,
        default=defaults.precision,
    ),
    Question(
        key="fsdp.sharding_strategy",
        title="Sharding strategy?",
        options=options.strategies,
        default=defaults.strategy,
        applies=conditions.splits,
        lines=numbers.strategy_lines,
        help_text="\n".join(f"{s.number} {s.value}: {text}." for s, text in options.STRATEGY_TEXTS.items()),
    ),
    Question(
        key="details",
        title="CPU offload, wrapping, prefetch, checkpoint format?",
        options=options.details,
        default=always("suggested", "all of them can also be changed in the review"),
        applies=conditions.shards,
        label="FSDP details",
        help_text="`one by one` asks for CPU offload, of all or of the optimizer's state, wrapping, the block classes "
        "or the minimum unit size, backward and forward prefetch, the state dict type and activation checkpointing.",
    ),
    Question(
        key="tpu_name",
        title="Name of the TPU? (none: set at launch)",
        default=always(None, "can be set later"),
        read=readers.optional_text,
        applies=conditions.pod,
    ),
    Question(
        key="tpu_zone",
        title="Zone of the TPU? (none: set at launch)",
        default=always(None, "can be set later"),
        read=readers.optional_text,
        applies=conditions.pod,
    ),
    Question(
        key="xla",
        title="Shard the model over the TPU cores (PyTorch/XLA FSDP)?",
        options=yes_no("parameters, gradients, optimizer state sharded", "every core has the whole model"),
        default=always(True, "larger models fit"),
        applies=conditions.tpu,
    ),
)

# Asked where the answer to `details` is so.
_DETAILS = (
    Question(
        key="fsdp.offload_params",
        title="CPU offload: parameters, gradients, optimizer state in host memory?",
        options=options.offload,
        default=defaults.offload,
        applies=conditions.shards,
    ),
    Question(
        key="shardkit.offload_optimizer",
        title="Optimizer state alone in host memory?",
        options=options.offload_state,
        default=defaults.offload_state,
        applies=conditions.may_offload_state,
    ),
    Question(
        key="fsdp.auto_wrap_policy",
        title="Wrapping: what is an FSDP unit?",
        options=options.wrapping,
        default=defaults.wrapping,
        applies=conditions.wraps,
    ),
    Question(
        key="fsdp.transformer_layer_cls_to_wrap",
        title="Which block classes become units?",
        options=options.class_options,
        takes_several=True,
        default=defaults.classes,
        read=readers.classes,
        applies=conditions.by_class,
    ),
    Question(
        key="fsdp.min_num_params",
        title="Minimum parameters of a unit? (such as 1e8 or 100M)",
        default=defaults.min_params,
        read=readers.whole_number(1),
        note=options.units_note,
        applies=conditions.by_size,
    ),
    Question(
        key="fsdp.backward_prefetch",
        title="Backward prefetch: when is the next unit gathered?",
        options=options.prefetch,
        default=always("BACKWARD_PRE", "communication overlaps with computation"),
        applies=conditions.shards,
    ),
    Question(
        key="fsdp.forward_prefetch",
        title="Forward prefetch: gather the next unit while this one computes?",
        options=yes_no("helps where kernel launches are slow", "most models already overlap"),
        default=always(False, "in most models, communication already overlaps"),
        applies=conditions.shards,
    ),
    Question(
        key="fsdp.state_dict_type",
        title="State dict type: how are checkpoints written?",
        options=fixed(
            Option("SHARDED_STATE_DICT", "SHARDED_STATE_DICT", "each rank writes its shard; fastest"),
            Option("FULL_STATE_DICT", "FULL_STATE_DICT", "full tensors, readable by other tools; slower to save"),
        ),
        default=always("SHARDED_STATE_DICT", "fastest; loads on any number of processes"),
        applies=conditions.shards,
    ),
    Question(
        key="fsdp.activation_checkpointing",
        title="Activation checkpointing: recompute activations in backward?",
        options=yes_no("much less memory, about a third more compute", "activations stay in memory"),
        default=always(False, "fastest, if the activations fit"),
        applies=conditions.shards,
    ),
)

_ADVANCED = (
    Question(
        key="fsdp.cpu_ram_efficient_loading",
        title="Let Transformers load weights on rank 0 alone?",
        options=yes_no("least host memory", "every rank loads the whole model first"),
        default=always(True, "least host memory"),
        applies=conditions.shards,
    ),
    Question(
        key="fsdp.sync_module_states",
        title="Copy rank 0's initial weights to every rank?",
        options=yes_no("correct with any seeds", "correct only if every rank builds equal weights"),
        default=always(True, "correct with any seeds"),
        applies=conditions.shards,
    ),
    Question(
        key="shardkit.precision.reduce_dtype",
        title="Dtype of gradient reduction over ranks?",
        options=options.reduce_dtypes,
        default=always(None, "fp32: smallest rounding error in the sum over ranks"),
        applies=conditions.shards,
    ),
    Question(
        key="shardkit.gradient_accumulation_steps",
        title="Gradient accumulation steps, unless the script sets them?",
        default=always(1, "no accumulation"),
        read=readers.whole_number(1),
    ),
    Question(
        key="shardkit.mesh.context_size",
        title="How many ranks share each sequence, if sequences are too long for one device?",
        options=options.context_sizes,
        default=always(1, "each rank has whole sequences"),
        applies=conditions.splits,
        label="ranks that share a sequence",
        help_text="The script splits its batches: with accelerator.context_parallel(tokens, targets). Results are "
        "those of whole sequences. Attention exchanges slices for heads: the number must divide the heads, and ranks "
        "of one machine are fastest.",
    ),
    Question(
        key="shardkit.seed",
        title="Seed? (none: set by the script)",
        default=always(None, "set by the script"),
        read=readers.seed,
    ),
    Question(
        key="shardkit.compile",
        title="Compile each unit (torch.compile)?",
        options=yes_no("faster steps after a slow first one", "no compile time"),
        default=always(False, "no compile time"),
        applies=conditions.not_tpu,
    ),
    Question(
        key="shardkit.launch.max_restarts",
        title="Maximum restarts after failures?",
        default=always(0, "a failure ends the run"),
        read=readers.whole_number(0),
    ),
    Question(
        key="shardkit.launch.min_machines",
        title="Elastic run: the fewest machines it goes on with? (none: it needs all)",
        default=always(None, "a lost machine ends the run, or restarts it"),
        read=readers.min_machines,
        applies=conditions.may_be_elastic,
        help_text="With a number, machines may leave and join: the run goes on from the newest checkpoint.",
    ),
    Question(
        key="machine_rank",
        title="Rank of this machine, from 0? (launch: set by --machine-rank)",
        default=always(0, "set at launch, so that all machines share one file"),
        read=readers.machine_rank,
        applies=conditions.launches_on_each,
    ),
    Question(
        key="same_network",
        title="Do the machines reach each other directly?",
        options=yes_no("same network", "over the internet or a tunnel"),
        default=always(True, "the usual case"),
        applies=conditions.several,
    ),
    Question(
        key="debug",
        title="Check every collective, and find where NaN gradients come from?",
        options=yes_no("finds mismatches and NaN; slow", "full speed"),
        default=always(False, "full speed"),
        applies=conditions.many,
    ),
    Question(
        key="xla_fsdp_v2",
        title="For Accelerate: the SPMD form of PyTorch/XLA's FSDP?",
        options=yes_no("FSDP v2", "FSDP v1"),
        default=always(False, "shardkit trains with SPMD in either case"),
        applies=conditions.tpu_fsdp,
    ),
    Question(
        key="xla_fsdp_grad_ckpt",
        title="Recompute activations in backward on the TPU?",
        options=yes_no("much less memory, more compute", "activations are kept"),
        default=always(False, "fastest, if the activations fit"),
        applies=conditions.tpu_fsdp,
    ),
    Question(
        key="downcast_bf16",
        title="On the TPU, keep every float in bf16, parameters too?",
        options=yes_no("half the memory", "parameters and optimizer state stay in fp32"),
        default=always(False, "small updates are not lost"),
        applies=conditions.tpu,
    ),
    Question(
        key="main_training_function",
        title="Name of the script's training function?",
        default=always("main", "the usual name"),
        read=readers.identifier,
        applies=conditions.tpu,
    ),
    Question(
        key="tpu_use_sudo",
        title="Does training on the TPU's machines need sudo?",
        options=yes_no("it is started with sudo", "it runs as you"),
        default=always(False, "the usual case"),
        applies=conditions.pod,
    ),
    Question(
        key="tpu_vm",
        title="Names of the TPU's machines, comma-separated? (none: all)",
        default=always([], "all of them"),
        read=readers.names,
        applies=conditions.pod,
    ),
    Question(
        key="tpu_env",
        title="Environment variables for the TPU's machines? (NAME=value, comma-separated)",
        default=always([], "none needed"),
        read=readers.pairs,
        applies=conditions.tpu,
    ),
    Question(
        key="commands",
        title="Commands before training on the TPU's machines? (separated by semicolons)",
        default=always([], "none needed"),
        read=readers.commands,
        applies=conditions.pod,
    ),
)

QUESTIONS: tuple[Question, ...] = (
    *_FIRST,
    *(
        replace(one, asked=conditions.each_detail, when=f"{one.asked_when}; advanced, or one by one")
        for one in _DETAILS
    ),
    *map(_in_review_only, _ADVANCED),
)


def by_key(key: str) -> Question:
    """The question with that key."""
    return next(question for question in QUESTIONS if question.key == key)
