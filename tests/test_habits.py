"""An option by the name that other tools give it: the error names ours."""

from importlib import import_module

import pytest
import typer

from shardkit.cli.habits import HABITS
from shardkit.cli.main import run
from shardkit.errors import EXIT_CONFIG


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("plan --gpus 8", "--world"),
        ("plan --gpu=h100", "--device"),
        ("plan --gradient-accumulation-steps 4", "--set shardkit.gradient_accumulation_steps=VALUE"),
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
