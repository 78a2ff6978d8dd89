"""The public names for editors and type checkers; `__init__.py` resolves them on first use."""

from shardkit.bars import tqdm as tqdm
from shardkit.config.files import load_config as load_config
from shardkit.config.schema import Config as Config
from shardkit.data.skipping import skip_first_batches as skip_first_batches
from shardkit.distributed.seed import set_seed as set_seed
from shardkit.errors import ShardkitError as ShardkitError
from shardkit.runtime.accelerator import Accelerator as Accelerator
from shardkit.runtime.batch_size import find_executable_batch_size as find_executable_batch_size
from shardkit.runtime.fsdp import fsdp as fsdp
from shardkit.runtime.logger import get_logger as get_logger
from shardkit.runtime.notebook import debug_launcher as debug_launcher
from shardkit.runtime.notebook import notebook_launcher as notebook_launcher
from shardkit.runtime.project import ProjectConfiguration as ProjectConfiguration
from shardkit.sharding.init import init_empty_weights as init_empty_weights
from shardkit.tracking.tracker import Tracker as Tracker

__version__: str
