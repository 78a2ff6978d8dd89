"""Rules across settings: what contradicts is refused, what runs differently is said."""

import pytest

from shardkit.config import files
from shardkit.config.schema import Config
from shardkit.config.validation import settled
from shardkit.errors import ConfigError


def complaint(text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        files.read_text(text)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "num_processes: 7\nnum_machines: 2\n",
            "1:16: num_processes: is not divisible by the number of machines (got 7 on 2); write the total, such as",
        ),
        (
            "num_processes: 2\nnum_machines: 4\n",
            "1:16: num_processes: is fewer than one per machine (got 2 on 4 machines); write the total.",
        ),
        (
            "num_processes: 4\nnum_machines: 2\nmachine_rank: 2\n",
            "3:15: machine_rank: is not one of the machines 0 to 1 (got 2); write one of them, or more machines.",
        ),
        (
            "machine_rank: 3\n",
            "1:15: machine_rank: is not 0, of a run on one machine (got 3); leave it out, or give num_machines.",
        ),
        (
            "main_process_ip: 10.0.0.1:29500\n",
            "1:18: main_process_ip: is the host alone (got 10.0.0.1:29500); write 10.0.0.1, and its port",
        ),
        ("main_process_ip: $MASTER_ADDR\n", "1:18: main_process_ip: is not a host (got '$MASTER_ADDR'); write its"),
        ("main_process_ip: <address of node 0>\n", "1:18: main_process_ip: is not a host (got '<address of node 0>')"),
        ("main_process_ip: http://node-a\n", "1:18: main_process_ip: is not a host (got 'http://node-a'); write its"),
        ("main_process_ip: fd00::1:29500\n", "main_process_ip: is not an IPv6 address (got fd00::1:29500); write one"),
        (
            "distributed_type: NO\nnum_processes: 2\n",
            "1:19: distributed_type: NO is one process (got num_processes 2); write FSDP, MULTI_GPU or MULTI_CPU, or",
        ),
        (
            "distributed_type: XLA\ntpu_env: [A=, B]\n",
            "2:10: tpu_env: is not NAME=value (got 'B'); correct it, or remove it.",
        ),
        (
            "fsdp_config: {fsdp_sharding_strategy: 3, fsdp_offload_params: true}\n",
            "1:63: fsdp_config.fsdp_offload_params: needs a sharding strategy (got NO_SHARD); write FULL_SHARD",
        ),
        (
            "num_processes: 8\nfsdp_config: {fsdp_sharding_strategy: 4}\n"
            "shardkit: {mesh: {replicate_size: 2, shard_size: 3}}\n",
            "3:35: shardkit.mesh.replicate_size: 2 replicas x 3 ranks is not the world size (got 8)",
        ),
        (
            "num_processes: 8\nfsdp_config: {fsdp_sharding_strategy: 4}\nshardkit: {mesh: {shard_size: 3}}\n",
            "3:31: shardkit.mesh.shard_size: does not divide the number of ranks (got 3 of 8); choose a divisor.",
        ),
        (
            "num_processes: 8\nfsdp_config: {fsdp_sharding_strategy: 1}\nshardkit: {mesh: {replicate_size: 2}}\n",
            "3:35: shardkit.mesh.replicate_size: mesh sizes are for the hybrid strategies (got FULL_SHARD); write",
        ),
        ("num_processes: 2\ngpu_ids: 0\n", "2:10: gpu_ids: is fewer GPUs than processes on a machine (got 1 for 2)"),
        ("gpu_ids: first\n", "1:10: gpu_ids: is not numbers with commas (got 'first'); write all, or 0,1."),
        ("num_processes: 2\ngpu_ids: 1, 1\n", "2:10: gpu_ids: names a GPU twice (got 1, 1); name each once."),
        (
            "shardkit: {checkpoint: {max_shard_size: big}}\n",
            "max_shard_size: is not a size (got 'big'); write it with its unit, such",
        ),
        ("shardkit: {checkpoint: {max_shard_size: '1.5'}}\n", "max_shard_size: is not a size (got '1.5'); write it"),
        ("shardkit: {checkpoint: {max_shard_size: 0.1B}}\n", "max_shard_size: is not a size (got '0.1B'); write it"),
        ("shardkit: {launch: {show: some}}\n", "show: is not all, nor ranks with commas (got 'some'); write all, or"),
        ("fsdp_config: {fsdp_ignored_modules: '('}\n", "fsdp_ignored_modules: is not a regular expression (got '(':"),
    ],
)
def test_contradictions_are_refused(text, words):
    assert words in complaint(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "distributed_type: MULTI_GPU\nfsdp_config: {fsdp_offload_params: yes}\n",
            "has no effect with distributed_type",
        ),
        (
            "fsdp_config: {fsdp_wrap_policy: NO_WRAP, fsdp_min_num_params: 5}\n",
            "has no effect with NO_WRAP; SIZE_BASED",
        ),
        (
            "fsdp_config: {fsdp_wrap_policy: NO_WRAP, fsdp_transformer_layer_cls_to_wrap: A}\n",
            "fsdp_transformer_layer_cls_to_wrap: has no effect with NO_WRAP; TRANSFORMER_BASED_WRAP wraps classes.",
        ),
        (
            "fsdp_config: {fsdp_use_orig_params: no}\n",
            "FSDP2 always keeps the original parameters; false changes nothing.",
        ),
        (
            "fsdp_config: {fsdp_limit_all_gathers: no}\n",
            "FSDP2 always limits how many all-gathers run at once; false changes nothing.",
        ),
        (
            "fsdp_config: {fsdp_version: 1, fsdp_backward_prefetch: BACKWARD_POST}\n",
            "BACKWARD_POST uses FSDP2's",
        ),
        (
            "num_processes: 2\nfsdp_config: {fsdp_sharding_strategy: 4}\n",
            "a hybrid strategy has one replica",
        ),
        ("use_cpu: yes\nmixed_precision: fp16\n", "fp16 is slow on a CPU; bf16 needs no loss scaling."),
        ("use_cpu: true\nshardkit: {precision: {param_dtype: fp16}}\n", "fp16 is slow on a CPU"),
        ("downcast_bf16: yes\n", "1:16: downcast_bf16: is for TPUs only; it has no effect with distributed_type FSDP."),
        ("tpu_name: a\n", "1:11: tpu_name: is for TPUs only; it has no effect with distributed_type FSDP."),
        ("num_machines: 2\nnum_processes: 2\n", "main_process_ip: several machines need the address of machine 0"),
        (
            "num_machines: 2\nnum_processes: 2\nmain_process_ip: a\nrdzv_backend: etcd-v2\n",
            "rdzv_backend: no etcd server is used",
        ),
        ("num_machines: 2\nnum_processes: 2\nmain_process_ip: a\nsame_network: no\n", "same_network: has no effect"),
        ("distributed_type: XLA\nmixed_precision: fp16\n", "TPUs compute in bf16, not in fp16; write bf16."),
        ("distributed_type: MULTI_GPU\nuse_cpu: yes\n", "the ranks train on the CPU, although the type is MULTI_GPU."),
    ],
)
def test_what_runs_differently_is_said(text, words):
    notes = files.read_text(text).notes
    assert len(notes) == 1 and words in notes[0]


@pytest.mark.requirement("A9")
@pytest.mark.parametrize("kind", ["MULTI_CPU", "MULTI_GPU", "FSDP"])
def test_plain_configurations_have_nothing_to_say(kind):
    loaded = files.read_text(f"distributed_type: {kind}\nnum_processes: 4\n")
    assert loaded.notes == [] and loaded.config.num_processes == 4


def test_a_rule_is_silent_about_a_value_that_is_wrong_itself():
    text = complaint("num_machines: none\nnum_processes: 7\nmachine_rank: 3\n")
    assert text.count("\n") == 0 and "num_machines: is not a whole number" in text


def test_no_rule_judges_by_a_number_of_processes_that_nobody_gave():
    text = "num_machines: 2\nmain_process_ip: a\nfsdp_config: {fsdp_sharding_strategy: 4}\n"
    text += "shardkit: {mesh: {shard_size: 8}}\n"
    assert files.read_text(text).notes == []
    with pytest.raises(ConfigError, match="does not divide the number of ranks"):
        files.read_text(text + "num_processes: 4\n")


def test_resharding_said_in_python_is_a_strategy():
    assert settled(Config()) == Config()
    keeps = settled(Config(fsdp={"reshard_after_forward": False}))
    assert (keeps.fsdp.sharding_strategy.value, keeps.fsdp.reshard_after_forward) == ("SHARD_GRAD_OP", None)
    with pytest.raises(ConfigError, match="means SHARD_GRAD_OP, but sharding_strategy says FULL_SHARD"):
        settled(Config(fsdp={"reshard_after_forward": False, "sharding_strategy": 1}))


def test_a_configuration_made_in_python_is_checked_when_settings_are_laid_over_it():
    config = files.overlaid(Config(num_processes=4), {"num_machines": "2", "main_process_ip": "a"})
    assert config.processes_per_machine == 2
    with pytest.raises(ConfigError, match=r"num_processes: is not divisible by the number of machines \(got 4 on 3\)"):
        files.overlaid(config, {"num_machines": "3"})


def test_numbers_of_gpus_say_nothing_about_ranks_on_the_cpu():
    for on_cpu in ("use_cpu: true", "distributed_type: MULTI_CPU"):
        files.read_text(f"{on_cpu}\nnum_processes: 2\ngpu_ids: 0\n")


def test_an_ipv6_address_is_read_with_and_without_brackets():
    for text in ("fd00::1", '"[fd00::1]"'):
        assert files.read_text(f"main_process_ip: {text}\n").config.main_process_ip == "fd00::1"
