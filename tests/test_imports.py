"""The layers of the package: imports go one way, and the torch-free modules stay torch-free."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "shardkit"

# The half of `plan` that the wizard uses too.
PLAN_WITHOUT_TORCH = [
    f"shardkit.plan.{name}"
    for name in (
        *("activations", "answer", "averages", "closed_form", "context", "devices", "notes", "optimizers"),
        *("rank_memory", "request", "roofline", "search", "suggest", "tpu", "traffic", "unit_sizes"),
        *("whole_run", "whole_steps", "failures"),
    )
]

# The lowest layer first. A package imports from itself and from those in the rows above its own, from no other.
LAYERS = [
    ["shardkit", "shardkit.errors", "shardkit.env"],
    [
        "shardkit.dims",
        "shardkit.digits",
        "shardkit.signatures",
        "shardkit.systems",
        "shardkit.values",
        "shardkit.wording",
    ],
    ["shardkit.sizes"],
    [
        f"shardkit.{name}"
        for name in ("bars", "fast_exit", "log", "new_process", "open_files", "problems", "templates", "spinner")
    ],
    ["shardkit.storage"],
    ["shardkit.config"],
    ["shardkit.convert", "shardkit.model", "shardkit.launch", "shardkit.optim.division"],
    PLAN_WITHOUT_TORCH,
    ["shardkit.distributed"],
    ["shardkit.checkpoint", "shardkit.data", "shardkit.optim", "shardkit.sharding", "shardkit.tracking"],
    ["shardkit.wizard", "shardkit.submit"],
    ["shardkit.runtime"],
    ["shardkit.plan", "shardkit.compat", "shardkit.ray", "shardkit.doctor"],
    ["shardkit.cli"],
    ["shardkit.__main__"],
]


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def layer_of(module: str) -> int:
    matches = [
        (len(name), level)
        for level, names in enumerate(LAYERS)
        for name in names
        if module == name or (module.startswith(name + ".") and name != "shardkit") or module.startswith(name + "_")
    ]
    assert matches, f"{module} is in no layer of this table"
    return max(matches)[1]


@cache
def imports(path: Path) -> set[str]:
    """All shardkit modules that a file imports: those in functions and under TYPE_CHECKING too."""
    known = modules()
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & set(known)
            names |= inside or {node.module}
    return {name for name in names if name.split(".")[0] == "shardkit"}


def package_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_one_way(module):
    for imported in imports(modules()[module]):
        is_own = package_of(imported) == package_of(module)
        assert layer_of(imported) <= layer_of(module), f"{module} imports {imported}, which is a layer below it"
        assert is_own or layer_of(imported) < layer_of(module), f"{module} imports {imported}, which is beside it"


@pytest.mark.parametrize("module", sorted(name for name in modules() if name.startswith("shardkit.checkpoint.")))
def test_a_folder_of_checkpoint_uses_those_above_it_in_the_map(module):
    order = ["faults", "files", "states", "saving", "loading", "exporting", "commands"]
    for imported in imports(modules()[module]):
        if imported.startswith("shardkit.checkpoint."):
            assert order.index(imported.split(".")[2]) <= order.index(module.split(".")[2]), imported


def test_no_module_imports_itself_by_way_of_others():
    left = {module: imports(path) - {module} for module, path in modules().items()}
    while ready := [module for module, needed in left.items() if not needed & left.keys()]:
        for module in ready:
            del left[module]
    assert not left, f"these import each other: {sorted(left)}"


def test_the_accelerator_is_passed_nowhere():
    """What works on a run takes the Run; only the package itself exports its facade."""
    users = [module for module, path in modules().items() if "shardkit.runtime.accelerator" in imports(path)]
    assert users == ["shardkit.compat.facade"]  # a facade in another shape


TORCH_FREE = ["shardkit", "shardkit.config", "shardkit.convert", "shardkit.wizard", "shardkit.model.tree"]
TORCH_FREE += [
    "shardkit.model.blocks",
    "shardkit.model.cut",
    "shardkit.cli.main",
    "shardkit.model.sources",
    "shardkit.model.comment",
]
TORCH_FREE += [*PLAN_WITHOUT_TORCH, "shardkit.plan.report", "shardkit.plan.plot", "shardkit.cli.plan"]

TORCH_FREE += [
    f"shardkit.checkpoint.{name}"
    for name in ("faults", "saving.retention", "saving.lock", "loading.locate", "exporting.export")
]
TORCH_FREE += ["shardkit.values", "shardkit.checkpoint.commands.merge", "shardkit.checkpoint.commands.compare"]
TORCH_FREE += ["shardkit.cli.checkpoint", "shardkit.cli.submit", "shardkit.submit.engines", "shardkit.submit.sending"]
# A rank loads these before the script, which may set variables that torch reads when it is imported.
TORCH_FREE += [f"shardkit.compat.{name}" for name in ("startup", "modules", "names", "scan", "migrate", "members")]


def test_the_torch_free_modules_do_not_load_torch():
    packages = [*TORCH_FREE[1:4], "shardkit.checkpoint.files"]
    wanted = [name for name in modules() if name in TORCH_FREE or name.rpartition(".")[0] in packages]
    assert len(wanted) > 8
    code = "import sys\n" + "\n".join(f"import {name}" for name in sorted(wanted))
    code += "\nassert 'torch' not in sys.modules, 'torch was loaded'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_a_script_that_shards_nothing_loads_nothing_for_it():
    code = "import sys, torch; from shardkit import Accelerator; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    late = {"sympy", "torch.distributed.tensor", "torch.distributed.fsdp"}
    late |= {"shardkit.checkpoint.saving.put", "shardkit.compat"}
    assert not late & set(done.stdout.split())


def test_a_launch_loads_what_stands_in_for_accelerate_only_where_it_is_asked_for(tmp_path):
    (tmp_path / "train.py").write_text("print('here')")
    code = (
        "import sys; from shardkit.cli.main import run\n"
        "code = run(['launch', '-n', '2', '--use-cpu', '--dry-run', 'train.py'])\n"
        "print(code, *[name for name in sys.modules if name.startswith('shardkit.compat')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "0"


def test_editors_and_type_checkers_know_the_public_names():
    import shardkit

    stub = ast.parse((ROOT / "__init__.pyi").read_text())
    named = {name.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert named == shardkit._WHERE
    assert (ROOT / "py.typed").exists()
