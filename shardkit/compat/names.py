"""The supported names of `accelerate` with their places in shardkit, and the refused ones with what to use instead.

Keys are modules below `accelerate`; "" is the package itself. A name in none of these tables does not exist. It has the
same place in all modules that have it.
"""

from functools import cache

from shardkit.compat.machine import NAMES as ASKED
from shardkit.tracking.trackers import KNOWN
from shardkit.wording import alternatives

# module of accelerate -> {our module: names}
STANDS_IN: dict[str, dict[str, str]] = {
    "accelerator": {"shardkit.compat.facade": "Accelerator"},
    "state": {
        "shardkit.compat.states": "AcceleratorState PartialState is_initialized",
        "shardkit.compat.window": "GradientState",
    },
    "logging": {"shardkit.runtime.logger": "MultiProcessAdapter:RankLogger get_logger"},
    "launchers": {"shardkit.runtime.notebook": "debug_launcher notebook_launcher"},
    "parallelism_config": {"shardkit.compat.mesh_sizes": "ParallelismConfig"},
    "data_loader": {
        "shardkit.compat.loaders": (
            "BatchSamplerShard DataLoaderDispatcher DataLoaderShard IterableDatasetShard SeedableRandomSampler "
            "SkipBatchSampler get_sampler prepare_data_loader skip_first_batches"
        ),
        "shardkit.data.loader": "DataLoaderAdapter:PreparedLoader DataLoaderStateMixin:PreparedLoader",
    },
    "local_sgd": {"shardkit.compat.local_sgd": "LocalSGD"},
    "tracking": {
        "shardkit.compat.trackers": "GeneralTracker get_available_trackers on_main_process",
        "shardkit.tracking.installed": (
            "MLflowTracker:Mlflow TensorBoardTracker:TensorBoard TrackioTracker:Trackio WandBTracker:WeightsAndBiases"
        ),
    },
    "optimizer": {"shardkit.runtime.optimizer": "AcceleratedOptimizer"},
    "scheduler": {"shardkit.compat.schedulers": "AcceleratedScheduler"},
    "big_modeling": {
        "shardkit.compat.models": "init_empty_weights init_on_device load_checkpoint_in_model",
    },
    "hooks": {
        "shardkit.compat.forward_hooks": (
            "ModelHook SequentialHook add_hook_to_module remove_hook_from_module remove_hook_from_submodules"
        ),
    },
    "test_utils.training": {
        "shardkit.compat.trials": "RegressionDataset RegressionModel",
    },
    "test_utils.testing": {
        "shardkit.compat.trials": "are_the_same_tensors assert_exception execute_subprocess_async torch_device",
    },
    "utils.constants": {
        "shardkit.compat.constants": (
            "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME "
            "SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME "
            "SCALER_NAME SCHEDULER_NAME TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_LAUNCH_PARAMS WEIGHTS_INDEX_NAME "
            "WEIGHTS_NAME WEIGHTS_PATTERN_NAME XPU_PROFILING_AVAILABLE_PYTORCH_VERSION FSDP_MODEL_NAME "
            "FSDP_SHARDING_STRATEGY FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_STATE_DICT_TYPE "
            "FSDP2_STATE_DICT_TYPE FSDP_PYTORCH_VERSION FSDP2_PYTORCH_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION"
        ),
    },
    "utils.dataclasses": {
        "shardkit.compat.kinds": (
            "ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType DynamoBackend FP8BackendType "
            "LoggerType PrecisionType RNGType SageMakerDistributedType"
        ),
        "shardkit.compat.handlers": (
            "AutocastKwargs DistributedDataParallelKwargs GradScalerKwargs InitProcessGroupKwargs KwargsHandler "
            "ProfileKwargs"
        ),
        "shardkit.compat.plugins": (
            "DataLoaderConfiguration FullyShardedDataParallelPlugin GradientAccumulationPlugin TorchDynamoPlugin "
            "get_module_class_from_name"
        ),
        "shardkit.compat.mesh_sizes": "DeepSpeedSequenceParallelConfig TorchContextParallelConfig",
        "shardkit.runtime.project": "ProjectConfiguration",
    },
    "utils.environment": {
        "shardkit.compat.machine": (
            "are_libraries_initialized check_cuda_fp8_capability check_cuda_p2p_ib_support clear_environment "
            "convert_dict_to_env_variables get_cpu_distributed_information get_current_device_type get_gpu_info "
            "get_int_from_env parse_choice_from_env parse_flag_from_env patch_environment purge_accelerate_environment "
            "set_numa_affinity str_to_bool"
        ),
    },
    "utils.imports": {"shardkit.compat.machine": " ".join(ASKED)},
    "utils.versions": {"shardkit.compat.machine": "compare_versions is_torch_version"},
    "utils.modeling": {
        "shardkit.compat.models": (
            "calculate_maximum_sizes check_tied_parameters_in_config compute_module_sizes convert_file_size_to_int "
            "dtype_byte_size find_tied_parameters get_balanced_memory get_max_memory "
            "get_mixed_precision_context_manager get_non_persistent_buffers id_tensor_storage load_state_dict "
            "named_module_tensors retie_parameters set_module_tensor_to_device"
        ),
        "shardkit.compat.operations": "is_peft_model",
        "shardkit.compat.trainer_files": "get_grad_scaler",
    },
    "utils.operations": {
        "shardkit.compat.operations": (
            "CannotPadNestedTensorWarning TensorInformation broadcast concatenate "
            "convert_outputs_to_fp32 convert_to_fp32 copy_tensor_to_devices find_batch_size find_device gather "
            "gather_object get_data_structure honor_type ignorant_find_batch_size initialize_tensors is_namedtuple "
            "is_tensor_information is_torch_tensor listify pad_across_processes pad_input_tensors recursively_apply "
            "reduce send_to_device slice_tensors"
        ),
        "shardkit.distributed.collectives": "broadcast_object_list",
        "shardkit.errors": "DistributedOperationException:UsageError",
    },
    "utils.fsdp_utils": {
        "shardkit.compat.trainer_files": (
            "disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied "
            "fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model "
            "get_fsdp2_grad_scaler get_parameters_from_modules load_fsdp_model load_fsdp_optimizer save_fsdp_model "
            "save_fsdp_optimizer"
        ),
    },
    "utils.memory": {
        "shardkit.compat.memory": "clear_device_cache release_memory",
        "shardkit.runtime.batch_size": "find_executable_batch_size should_reduce_batch_size:is_out_of_memory",
    },
    "utils.other": {
        "shardkit.compat.operations": (
            "clean_state_dict_for_safetensors extract_model_from_parallel get_module_children_bottom_up "
            "get_pretty_name has_compiled_regions is_compiled_module load merge_dicts model_has_dtensor "
            "recursive_getattr save"
        ),
        "shardkit.compat.machine": "check_os_kernel convert_bytes is_port_in_use",
        "shardkit.distributed.collectives": "wait_for_everyone",
    },
    "utils.random": {
        "shardkit.distributed.seed": "set_seed",
        "shardkit.compat.operations": "synchronize_rng_state synchronize_rng_states",
    },
    "utils.tqdm": {"shardkit.bars": "tqdm"},
}

# Modules of accelerate, and the names that they take from others.
TAKEN: dict[str, str] = {
    "": (
        "Accelerator AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs "
        "DistributedType FullyShardedDataParallelPlugin GradScalerKwargs InitProcessGroupKwargs ParallelismConfig "
        "PartialState ProfileKwargs debug_launcher find_executable_batch_size init_empty_weights init_on_device "
        "is_rich_available load_checkpoint_in_model notebook_launcher skip_first_batches synchronize_rng_states"
    ),
    "accelerator": (
        "AcceleratorState DataLoaderConfiguration DistributedType DynamoBackend FullyShardedDataParallelPlugin "
        "GradientAccumulationPlugin GradientState LoggerType ParallelismConfig PartialState PrecisionType "
        "ProjectConfiguration RNGType TorchDynamoPlugin"
    ),
    "state": "DistributedType",
    "big_modeling": "remove_hook_from_submodules",
    "hooks": "named_module_tensors set_module_tensor_to_device",
    "test_utils": (
        "RegressionDataset RegressionModel are_the_same_tensors assert_exception execute_subprocess_async torch_device"
    ),
    "utils": "ParallelismConfig",
    "utils.dataclasses": "TensorInformation",
    "utils.modeling": "load_checkpoint_in_model",
}

_DISPATCH = (
    "distributing layers over devices and offloading for inference are not supported; train sharded (FSDP, with "
    "fsdp_offload_params for host memory), or call model.to(device)"
)
_DEEPSPEED = "DeepSpeed is not supported; for ZeRO 2 use SHARD_GRAD_OP, for ZeRO 3 FULL_SHARD in fsdp_config"
_MEGATRON = "Megatron-LM is not supported; use FSDP"
_FP8 = "shardkit converts models with torchao; use mixed_precision fp8"
_BNB = "quantization is not supported; load a model that Transformers quantizes, and train adapters"
_AXES = (
    "tensor parallelism is not supported; use FSDP, with dp_replicate_size, dp_shard_size and cp_size of "
    "ParallelismConfig"
)
_LAUNCHED = "start the script itself with shardkit launch, such as -m trl.scripts.sft for `trl sft`"
_TPU = "shardkit does not install packages; pip install 'shardkit[tpu]' in a separate environment"
_WRITTEN = "write a configuration file with shardkit config"
_TRACKERS = f"use {alternatives([*KNOWN])}, or a tracker class in the script"
_COMPILE = "set shardkit.compile: true, which compiles each unit"
_MERGED = "use shardkit checkpoint merge"

# module of accelerate -> {what to do instead: names}
REFUSED: dict[str, dict[str, str]] = {
    "": {
        _DEEPSPEED: "DeepSpeedPlugin",
        _DISPATCH: (
            "cpu_offload cpu_offload_with_hook disk_offload dispatch_model infer_auto_device_map "
            "load_checkpoint_and_dispatch"
        ),
        "pipeline parallelism is not supported; use FSDP": "prepare_pippy",
        "import the package rich directly": "rich",
    },
    "accelerator": {_DEEPSPEED: "DeepSpeedPlugin", _MEGATRON: "MegatronLMPlugin"},
    "inference": {"pipeline parallelism is not supported; use FSDP": "prepare_pippy"},
    "big_modeling": {
        _DISPATCH: (
            "attach_layerwise_casting_hooks check_device_map cpu_offload cpu_offload_with_hook disk_offload "
            "dispatch_model infer_auto_device_map load_checkpoint_and_dispatch"
        ),
    },
    "tracking": {
        _TRACKERS: "AimTracker ClearMLTracker CometMLTracker DVCLiveTracker SwanLabTracker filter_trackers",
    },
    "hooks": {
        _DISPATCH: (
            "AlignDevicesHook CpuOffload LayerwiseCastingHook UserCpuOffloadHook attach_align_device_hook "
            "attach_align_device_hook_on_blocks attach_execution_device_hook"
        ),
    },
    "commands": {},
    "commands.config": {_WRITTEN: "config_args default_config_file load_config_from_file"},
    "commands.config.config_args": {_WRITTEN: "ClusterConfig default_config_file load_config_from_file"},
    "commands.merge": {_MERGED: "merge_command merge_command_parser"},
    "commands.launch": {_LAUNCHED: "launch_command launch_command_parser"},
    "test_utils": {"call shardkit launch in the test": "DEFAULT_LAUNCH_COMMAND get_launch_command"},
    "test_utils.testing": {"call shardkit launch in the test": "get_launch_command"},
    "test_utils.training": {
        "create data loaders in the script": "mocked_dataloaders mocked_dataloaders_for_autoregressive_models"
    },
    "utils.ao": {
        _FP8: (
            "convert_model_to_fp8_ao filter_first_and_last_linear_layers filter_linear_layers "
            "find_first_last_linear_layers has_ao_layers"
        ),
    },
    "utils.dataclasses": {
        _FP8: "AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs",
        _BNB: "BnbQuantizationConfig",
        _DEEPSPEED: "DeepSpeedPlugin",
        _MEGATRON: "MegatronLMPlugin add_model_config_to_megatron_parser",
        _AXES: "TorchTensorParallelConfig TorchTensorParallelPlugin",
    },
    "utils.imports": {_DEEPSPEED: "deepspeed_required", _FP8: "torchao_required"},
    "utils.modeling": {
        _DISPATCH: (
            "align_module_device check_device_map check_tied_parameters_on_same_device clean_device_map "
            "get_max_layer_size has_offloaded_params infer_auto_device_map load_offloaded_weights"
        ),
    },
    "utils.offload": {
        _DISPATCH: (
            "OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight "
            "offload_state_dict offload_weight save_offload_index"
        ),
    },
    "utils.operations": {_DEEPSPEED: "GatheredParameters"},
    "utils.bnb": {_BNB: "has_4bit_bnb_layers load_and_quantize_model"},
    "utils.fsdp_utils": {
        "prepare does it, for the block classes in fsdp_config": "fsdp2_apply_ac",
        "prepare does it, for every optimizer of the model": "fsdp2_switch_optimizer_parameters",
        _MERGED: "merge_fsdp_weights",
    },
    "utils.launch": {
        _LAUNCHED: (
            "PrepareForLaunch _filter_args prepare_deepspeed_cmd_env prepare_multi_gpu_env "
            "prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu"
        ),
    },
    "utils.megatron_lm": {
        _MEGATRON: (
            "AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader "
            "MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper T5TrainStep "
            "avg_losses_across_data_parallel_group gather_across_data_parallel_groups initialize prepare_data_loader "
            "prepare_model_optimizer_scheduler prepare_optimizer prepare_scheduler"
        ),
    },
    "utils.other": {
        _COMPILE: "compile_regions compile_regions_deepspeed compile_regions_fsdp2",
        _AXES: "get_model_tp_size",
        _WRITTEN: "write_basic_config",
    },
    "utils.torch_xla": {_TPU: "install_xla"},
    "utils.transformer_engine": {
        _FP8: "apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers",
    },
    "utils.deepspeed": {
        _DEEPSPEED: (
            "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim DummyScheduler "
            "HfDeepSpeedConfig get_active_deepspeed_plugin map_pytorch_optim_to_deepspeed"
        ),
    },
}


@cache
def modules() -> frozenset[str]:
    """All modules below `accelerate`, by dotted name; "" is the package."""
    return frozenset({*TAKEN, *STANDS_IN, *REFUSED})


@cache
def places(module: str) -> dict[str, tuple[str, str]]:
    """{name: (module of shardkit, name in it)}, for one module of accelerate."""
    found = _read(STANDS_IN.get(module, {})) | {name: _everywhere()[name] for name in TAKEN.get(module, "").split()}
    if module == "utils":
        below = [one for one in STANDS_IN if one.startswith("utils.")]
        found |= {name: place for one in below for name, place in places(one).items()}
    return found


@cache
def _everywhere() -> dict[str, tuple[str, str]]:
    return {name: place for table in STANDS_IN.values() for name, place in _read(table).items()}


def _read(table: dict[str, str]) -> dict[str, tuple[str, str]]:
    words = [(ours, word) for ours, names in table.items() for word in names.split()]
    return {word.partition(":")[0]: (ours, word.partition(":")[2] or word) for ours, word in words}


@cache
def refusals(module: str) -> dict[str, str]:
    """{name: what to use instead}, for one module of accelerate."""
    if module == "utils":
        below = [one for one in REFUSED if one.startswith("utils.")]
        return {name: instead for one in below for name, instead in refusals(one).items()}
    return {name: instead for instead, names in REFUSED.get(module, {}).items() for name in names.split()}
