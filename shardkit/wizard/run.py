"""`shardkit config` with a person at the keyboard: from the first question to the saved file."""

from dataclasses import dataclass, field
from pathlib import Path

from shardkit.config.schema import Config


@dataclass(frozen=True)
class WizardOptions:
    """What the command line hands to the wizard."""

    model: str | None = None
    """Where the model is described: module:function, a config.json, safetensors; None: asked, or left out."""

    output: Path | None = None
    """Where the file goes; None: shardkit.yaml in `folder`."""

    force: bool = False
    """Start over even where the file exists (the old one is kept as .bak)."""

    dry_run: bool = False
    """Show the file and write nothing."""

    user: bool = False
    """Save as this user's file for all projects instead of in the folder."""

    plain: bool = False
    """Numbered lines and plain input: no redraw, no colour, ASCII."""

    no_input: bool = False
    """Never ask; where something would have to be asked, name the flags."""

    start: Config | None = None
    """Answers to begin with: from --defaults, --set, --template or --from."""

    folder: Path = field(default_factory=Path.cwd)
    """The project's folder."""


def run_wizard(options: WizardOptions) -> int:
    """Ask, review, save; the exit code: 0 saved or left on purpose, 130 stopped with Ctrl-C.

    Raises UsageError where nobody can be asked: no terminal, CI, or no_input.
    """
    raise NotImplementedError
