"""One rank on a device of torch_openreg that uses plain tensors beside sharded ones, as tests/test_plain_operands.py.

python operands_on_device.py RESULT     # RESULT.0, RESULT.1: {use: what it gave}
"""

import json
import sys
from pathlib import Path

from shardkit import Accelerator
from tests import loops, openreg
from tests.loops.run import RanksRun
from tests.test_plain_operands import results


def main() -> None:
    openreg.prepare()
    accelerator = Accelerator(config={"mixed_precision": "no", "fsdp_config": dict(loops.LOOPS["usual"].fsdp)})
    found = results(RanksRun(accelerator=accelerator))
    Path(f"{sys.argv[1]}.{accelerator.process_index}").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
