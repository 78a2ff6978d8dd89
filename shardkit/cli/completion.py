"""`shardkit completion bash`: a script for shell completion of verbs, commands, flags and their values.

The script contains all completions, so that pressing Tab does not start Python.
"""

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Annotated, Any, get_args

import typer

from shardkit.cli import HELP
from shardkit.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
_shardkit() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""
    case "${COMP_WORDS[1]} $before" in
%(values)s
        *) case "${COMP_WORDS[1]} ${COMP_WORDS[2]}" in
%(words)s
            *) [[ $COMP_CWORD == 1 ]] && words="%(verbs)s" ;;
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    # A value follows the = of a setting.
    [[ "${COMPREPLY[0]}" != *= ]] || ! type compopt > /dev/null 2>&1 || compopt -o nospace
}
complete -o default -F _shardkit shardkit
"""
_ZSH = """\
(( $+functions[compdef] )) || { autoload -U compinit && compinit }
autoload -U +X bashcompinit && bashcompinit
"""


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> int:
    """Print the completion script for a shell. bash and zsh: eval "$(shardkit completion bash)"; fish: source it."""
    if shell not in SHELLS:
        raise UsageError(f"completion: unknown shell (got {shell!r}); use {', '.join(SHELLS)}.")
    print(_fish() if shell == "fish" else (_ZSH if shell == "zsh" else "") + _bash(), end="")
    return 0


def _commands() -> dict[tuple[str, ...], list[str]]:
    """{(verb,) or (verb, command): commands and flags that may follow}."""
    found: dict[tuple[str, ...], list[str]] = {}
    verbs = _of_verbs()
    for verb, command in verbs.items():
        inner = getattr(command, "commands", {})
        for name, one in inner.items():
            found[verb, name] = _flags(one)
        found[verb,] = [*inner, *_flags(command)]
    found["completion",] += SHELLS
    found["help",] = list(verbs)
    return found


def _with_any_value() -> Iterator[tuple[str, str]]:
    """(verb, flag) of the flags that take any value, for which the shell offers files."""
    known = _values()
    for verb, command in _of_verbs().items():
        for one in (command, *getattr(command, "commands", {}).values()):
            options = (option for option in one.params if not getattr(option, "is_flag", False))
            flags = (name for option in options for name in option.opts if name.startswith("-"))
            yield from ((verb, flag) for flag in flags if known.keys().isdisjoint({(verb, flag), ("*", flag)}))


def _of_verbs() -> dict[str, Any]:
    """{verb: its command}."""
    from shardkit.cli.main import VERBS

    return {verb: typer.main.get_command(import_module(f"shardkit.cli.{verb}").app) for verb in VERBS}


def _flags(command: Any) -> list[str]:
    return [name for option in command.params for name in option.opts if name.startswith("-")] + ["--help"]


def _values() -> dict[tuple[str, str], list[str]]:
    """{(verb, flag): the flag's values}, for flags with a fixed set of values; `*`: of every verb."""
    from shardkit import templates
    from shardkit.compat import differences
    from shardkit.config.keys import all_keys
    from shardkit.config.schema import LaunchConfig, MixedPrecision, ShardingStrategy
    from shardkit.plan.activations import Loss
    from shardkit.plan.averages import Ema
    from shardkit.plan.devices import DEVICES
    from shardkit.plan.search import Question
    from shardkit.submit.engines import ENGINES

    return {
        ("*", "--set"): [f"{key.name}=" for key in all_keys().values()],
        ("*", "--template"): templates.names(),
        ("*", "--strategy"): [strategy.value for strategy in ShardingStrategy],
        ("*", "--mixed-precision"): list(get_args(MixedPrecision)),
        ("*", "--device"): list(DEVICES),
        ("*", "--find"): [one.value for one in Question],
        ("*", "--loss"): [one.value for one in Loss],
        ("*", "--ema"): [one.value for one in Ema],
        ("*", "--start"): list(get_args(LaunchConfig.model_fields["start"].annotation)),
        ("*", "--accelerates-meaning"): differences.choices(),
        ("config", "--to"): ["accelerate"],
        ("submit", "--to"): list(ENGINES),
        ("*", "--dtype"): ["fp32", "bf16", "fp16", "fp64"],
    }


def _verbs(words: Iterable[tuple[str, ...]]) -> list[str]:
    return [path[0] for path in words if not path[1:]]


def _bash() -> str:
    words = _commands()
    values = [f'        {verb}" {flag}") words="{" ".join(choices)}" ;;' for (verb, flag), choices in _values().items()]
    free = "|".join(dict.fromkeys(f'{verb}" {flag}"' for verb, flag in _with_any_value()))
    values.append(f"        {free}) ;;")
    two = [f'            "{" ".join(path)}") words="{" ".join(found)}" ;;' for path, found in words.items() if path[1:]]
    one = [f'            "{path[0]} "*) words="{" ".join(found)}" ;;' for path, found in words.items() if not path[1:]]
    verbs = " ".join(_verbs(words))
    return _BASH % {"values": "\n".join(values), "words": "\n".join([*two, *one]), "verbs": verbs}


def _fish() -> str:
    lines = ["complete -c shardkit -n __fish_use_subcommand -f"]  # a verb is no file; what follows it may be one
    words = _commands()
    lines += [f"complete -c shardkit -n __fish_use_subcommand -a {verb}" for verb in _verbs(words)]
    for path, found in words.items():
        seen = " and ".join(f"__fish_seen_subcommand_from {name}" for name in path).replace(" and ", "; and ")
        lines.append(f"complete -c shardkit -n '{seen}' -a '{' '.join(found)}'")
    for (verb, flag), choices in _values().items():
        of = "" if verb == "*" else f" -n '__fish_seen_subcommand_from {verb}'"
        lines.append(f"complete -c shardkit{of} -l {flag.removeprefix('--')} -x -a '{' '.join(choices)}'")
    return "\n".join(lines) + "\n"
