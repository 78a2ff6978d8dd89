"""An option by the name that other tools give it: the error names ours."""

from importlib import import_module

import pytest
import typer

from shardkit.cli.habits import COMMANDS, HABITS
from shardkit.cli.main import run
from shardkit.config.keys import NAMES_ELSEWHERE, all_keys
from shardkit.errors import EXIT_CONFIG


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("plan --gpus 8", "--world"),
        ("plan --cpu", "--device"),
        ("plan --gpu=h100", "--device"),
        ("plan --gradient-accumulation-steps 4", "--set shardkit.gradient_accumulation_steps=VALUE"),
        ("plan --gradient-checkpointing", "--set fsdp.activation_checkpointing=VALUE"),
        ("launch --cp-size 2 train.py", "--set shardkit.mesh.context_size=VALUE"),
        ("launch --num_gpus 2 train.py", "--num-processes"),
        ("config --num_processes 4", "--set num_processes=VALUE"),
        ("submit --partition gpu train.py", "--option partition=VALUE"),
        ("submit --dry-run train.py", "--check"),
        ("plan --batch_size 2", "--batch, --batch-size"),
    ],
)
def test_an_unknown_option_is_told_with_the_one_that_is_meant(command, meant, capsys):
    assert run(command.split()) == EXIT_CONFIG
    assert capsys.readouterr().err.endswith(f"(Possible options: {meant})\n")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("config update", "No such command: update (Possible command: shardkit config)"),
        ("config get num_processes", "No such command: get (Possible command: shardkit config show)"),
        ("config --check", "No such option: --check (Possible command: shardkit config validate)"),
        ("checkpoint ls", "No such command: ls (Possible command: shardkit checkpoint list)"),
        ("estimate-memory gpt2", "unknown verb (got 'estimate-memory'); did you mean plan?"),
        ("merge-weights a b", "unknown verb (got 'merge-weights'); did you mean checkpoint merge?"),
        ("lanch", "unknown verb (got 'lanch'); did you mean launch?"),
    ],
)
def test_a_command_by_the_name_that_other_tools_give_it_is_told_with_ours(command, says, capsys):
    assert run(command.split()) == EXIT_CONFIG
    assert capsys.readouterr().err.rstrip().endswith(says)


def test_a_setting_by_the_name_that_other_tools_give_it_is_told_with_ours(tmp_path, capsys):
    assert run(["config", "show", "--set", "cp_size=2"]) == EXIT_CONFIG
    assert "did you mean shardkit.mesh.context_size?" in capsys.readouterr().err
    (tmp_path / "shardkit.yaml").write_text("fsdp_config:\n  gradient_checkpointing: true\n")
    assert run(["config", "validate", str(tmp_path / "shardkit.yaml")]) == EXIT_CONFIG
    assert "did you mean fsdp_config.fsdp_activation_checkpointing?" in capsys.readouterr().err
    assert all(key in {one.name for one in all_keys().values()} for key in NAMES_ELSEWHERE)


@pytest.mark.parametrize("verb", COMMANDS)
def test_habits_name_commands_that_exist_and_no_word_twice(verb):
    for name in COMMANDS[verb]:
        own, *rest = name.split()
        command = typer.main.get_command(import_module(f"shardkit.cli.{own}").app)
        options = {name for option in command.params for name in option.opts}
        assert {*rest} <= options | {*getattr(command, "commands", ())}
    words = [word for words in COMMANDS[verb].values() for word in words]
    assert len(words) == len(set(words))


def test_an_option_that_nothing_is_like_is_told_alone(capsys):
    assert run(["checkpoint", "list", "--partition"]) == EXIT_CONFIG
    assert capsys.readouterr().err.endswith("Error: No such option: --partition\n")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("launch -n", "Option '-n' requires an argument."),
        ("checkpoint prune . --keep-last", "Option '--keep-last' requires an argument."),
        ("launch --cpu=true train.py", "Option '--cpu' does not take a value."),
    ],
)
def test_an_option_that_lacks_its_value_or_has_none_is_told(command, says, capsys):
    assert run(command.split()) == EXIT_CONFIG
    assert capsys.readouterr().err.endswith(f"Error: {says}\n")


@pytest.mark.parametrize("verb", HABITS)
def test_habits_name_options_that_exist_and_no_word_twice(verb):
    command = typer.main.get_command(import_module(f"shardkit.cli.{verb}").app)
    options = {name.lstrip("-") for option in command.params for name in option.opts}
    assert {option.lstrip("-") for option in HABITS[verb]} <= options
    words = [word for words in HABITS[verb].values() for word in words]
    assert len(words) == len(set(words)) and not options & set(words)
