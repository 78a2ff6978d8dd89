"""A script with our Accelerator started by `accelerate launch`: settings of the latter are not lost silently."""

import pytest

from shardkit.runtime import settings

TOLD = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_USE_FSDP": "true",
}


@pytest.fixture
def warned(monkeypatch, tmp_path, caplog):
    """What is warned of where the configuration is looked for with these variables set."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level("WARNING", "shardkit")

    def look(variables: dict[str, str], **arguments: object) -> str:
        caplog.clear()
        for name in TOLD:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        settings.settings(None, **arguments)
        return caplog.text

    return look


def test_what_it_was_told_and_what_does_not_run_is_said(warned):
    assert "accelerate launch was given mixed_precision bf16, 4 micro-batches, FSDP settings, which" in warned(TOLD)
    text = warned({"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert "accelerate launch was given mixed_precision bf16, which is not read here; start with `shardkit la" in text


def test_what_runs_anyway_is_not_spoken_of(warned):
    assert not warned({})
    assert not warned({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"})
    assert not warned({"ACCELERATE_MIXED_PRECISION": "bf16"}, mixed_precision="bf16")
    steps = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    assert not warned(steps, gradient_accumulation_steps=4)
