"""Deferred modules: they run when one of their names is read."""

import subprocess
import sys
from importlib import import_module

import pytest

from feddg_bench.common.deferred import defer


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make a package whose modules record that they run; yield the record."""
    (tmp_path / "deferred_one" / "inner").mkdir(parents=True)
    for name, text in {
        "__init__": "from deferred_one import part\nshown = part.shown\n__all__ = ['shown']",
        "part": "shown = 'from the part'",
        "inner/__init__": "import deferred_one\nouter = vars(deferred_one).get('shown')",
        "inner/leaf": "value = 1",
        "broken": "raise ImportError('broken')",
    }.items():
        said = f"import builtins; builtins.deferred_ran.append({name!r})\n"
        (tmp_path / "deferred_one" / f"{name}.py").write_text(said + text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    ran: list[str] = []
    monkeypatch.setattr("builtins.deferred_ran", ran, raising=False)
    yield ran
    for name in [name for name in sys.modules if name.partition(".")[0] == "deferred_one"]:
        del sys.modules[name]


def test_it_runs_once_when_another_name_is_read(package):
    defer("deferred_one", {"given": 1, "shown": "until then"})
    module = import_module("deferred_one")
    assert (module.given, module.shown, package) == (1, "until then", [])
    assert not hasattr(module, "__wrapped__"), "tools look for such names everywhere"
    assert not package
    assert module.part.shown == module.shown == "from the part"
    assert package == ["__init__", "part"]
    assert not hasattr(module, "given"), "what stood for it is gone"
    assert "__getattr__" not in vars(module)
    assert import_module("deferred_one") is module
    defer("deferred_one", {"given": 1})
    assert import_module("deferred_one") is module, "it is there already"
    assert not hasattr(module, "given")


def test_from_imports_run_it_only_for_other_names(package):
    defer("deferred_one", {"given": 1})
    exec("from deferred_one import given")  # noqa: S102
    assert package == []
    names: dict[str, object] = {}
    exec("from deferred_one import *", names)  # noqa: S102
    assert names["shown"] == "from the part"


def test_a_package_runs_before_its_modules(package):
    defer("deferred_one")
    assert import_module("deferred_one.inner").outer == "from the part"
    assert package == ["__init__", "part", "inner/__init__"]


def test_a_deferred_module_runs_after_its_package(package):
    defer("deferred_one")
    defer("deferred_one.inner")
    assert package == []
    assert import_module("deferred_one").inner.outer == "from the part"
    assert package == ["__init__", "part", "inner/__init__"]
    assert import_module("deferred_one.inner.leaf").value == 1


def test_parts_are_imported_without_the_package(package):
    defer("deferred_one", parts={"shown": "deferred_one.part"})
    defer("deferred_one.inner", parts={})
    exec("from deferred_one import shown; import deferred_one.inner.leaf")  # noqa: S102
    assert package == ["part", "inner/leaf"]
    assert import_module("deferred_one").inner.outer is None
    assert package == ["part", "inner/leaf", "inner/__init__"]
    assert import_module("deferred_one").__all__ == ["shown"]
    assert package[-1] == "__init__"


def test_a_function_that_stands_for_another_runs_the_module(package):
    defer("deferred_one.inner", calls=("outer",))
    assert "deferred_one.inner" not in sys.modules, "its package was not imported"
    defer("deferred_one", calls=("shown",))
    with pytest.raises(TypeError, match="not callable"):
        import_module("deferred_one").shown()
    assert package == ["__init__", "part"]


@pytest.mark.usefixtures("package")
def test_what_does_not_exist_is_left_to_the_import():
    defer("deferred_two")
    defer("deferred_one")
    defer("deferred_one.nothing")
    assert {"deferred_two", "deferred_one.nothing"}.isdisjoint(sys.modules)
    with pytest.raises(ModuleNotFoundError, match="deferred_two"):
        import_module("deferred_two")


@pytest.mark.usefixtures("package")
def test_an_error_while_it_runs_is_raised_each_time():
    import_module("deferred_one")
    defer("deferred_one.broken", {"given": 1})
    for _ in range(2):
        with pytest.raises(ImportError, match="broken"):
            import_module("deferred_one.broken").other  # noqa: B018


STEP = """
import sys
import torch
from feddg_bench.core.lightning import Fabric, LightningModule
from feddg_bench.core.method import Method
from feddg_bench.engine.worker import Worker

def heavy():
    names = ("sympy", "matplotlib", "scipy", "pandas", "torchvision", "torch._inductor")
    return [name for name in names if name in sys.modules]

assert heavy() == [], heavy()
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
net(torch.ones(1, 2)).sum().backward()
optimizer.zero_grad()
optimizer.step()
assert heavy() == [], heavy()
"""
USE = """
from lightning.fabric.wrappers import OptimizedModule
assert not isinstance(net, OptimizedModule)

import torchvision.models
import torchvision.ops
assert heavy() == ["torchvision"], heavy()
from torchmetrics.functional.classification import multiclass_stat_scores
assert "scipy.signal" not in sys.modules

compiled = torch.compile(net, backend="eager")
assert isinstance(compiled, OptimizedModule)
assert torch._dynamo.OptimizedModule in type(compiled).__mro__
compiled(torch.ones(1, 2)).sum().backward()
optimizer.zero_grad()
optimizer.step()
Fabric(accelerator="cpu", devices=1).setup(compiled)
import torch._dynamo.utils
assert torch._dynamo.utils.is_compile_supported("cpu")
@torch._dynamo.disable
def alone(x):
    return x + 1
assert alone(torch.ones(1)).item() == 2 and alone.__name__ == "alone"
import torchmetrics
metric = torchmetrics.Accuracy(task="binary")
metric(torch.ones(1), torch.ones(1, dtype=torch.int64))
import matplotlib
matplotlib.use("agg")
assert metric.plot()[0].axes
assert torchmetrics.__version__ and torchmetrics.functional.accuracy
assert torchvision.ops.nms(torch.rand(1, 4), torch.rand(1), 0.5).tolist() == [0]
"""


@pytest.mark.parametrize("more", ["", pytest.param(USE, marks=pytest.mark.nightly)], ids=bool)
def test_a_worker_imports_no_compiler_and_whoever_needs_it_gets_it(more):
    subprocess.run([sys.executable, "-W", "ignore", "-c", STEP + more], check=True)
