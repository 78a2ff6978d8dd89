"""One suggestion: the wizard's and the plan's, fits included."""

import pytest

from shardkit.config.hardware import Device, Hardware
from shardkit.config.meaning import with_strategy
from shardkit.model.sources import describe
from shardkit.plan import devices, suggest
from shardkit.plan.answer import PlanRequest, row
from shardkit.wizard import numbers
from shardkit.wizard.answers import settle
from shardkit.wizard.situation import Situation

H100 = devices.DEVICES["h100-80"]


@pytest.mark.slow
@pytest.mark.parametrize("layers", [4, 26, 58, 60, 96])
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_the_wizard_and_the_plan_suggest_the_same(layers, gpus):
    """Also where the memory is nearly full: 58 layers (4.6 B parameters) fit whole but for what the driver needs."""
    model = describe(f"gpt:layers={layers},hidden=2560,heads=20,vocab=50257")
    hardware = Hardware((Device("H100", H100.memory_bytes, "cuda", 9.0),) * gpus, 64, 2**40)
    situation = settle(Situation(hardware, model=model), {})
    found = numbers.estimates(situation)
    request = PlanRequest(model, numbers._config(situation), gpus, gpus, H100, batch_size=1)
    planned = {strategy: row(request.with_config(with_strategy(request.config, strategy))) for strategy in found}
    for strategy, one in planned.items():
        assert numbers.device_of(situation).fits(found[strategy].memory.peak.total) == one.fits, strategy
    assert numbers.suggest_strategy(situation, list(found)) == suggest.suggest_from(list(planned.values()), H100)
