"""The command defers modules of its libraries; other programs find them as they are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from feddg_bench.common.startup import SWITCH

PLAIN = """
import os, sys
from types import ModuleType, SimpleNamespace
import feddg_bench.runs.driver, feddg_methods.fedavg
assert SimpleNamespace not in map(type, sys.meta_path) and "FEDDG_QUICK_START" not in os.environ
import torch, torchmetrics, torch._dynamo
import lightning.fabric.wrappers, lightning.pytorch.core.module
for module in (torch._dynamo, torch._dynamo.utils, torchmetrics):
    assert type(module) is ModuleType and module is sys.modules[module.__name__]
assert lightning.fabric.wrappers.OptimizedModule is torch._dynamo.eval_frame.OptimizedModule
assert lightning.pytorch.core.module.Metric is torchmetrics.metric.Metric
assert torch._dynamo.disable.__module__ == "torch._dynamo.decorators"
"""

QUICK = """
import sys
import torch
from feddg_bench.common.lightning import LightningModule
from feddg_bench.engine.worker import Worker
from feddg_bench.records.metrics import macro_f1

def heavy():
    names = ("sympy", "matplotlib", "scipy", "torch._inductor", "torchmetrics.metric")
    return [name for name in names if name in sys.modules]

net, batch = torch.nn.Linear(2, 2), (torch.ones(4, 2), torch.tensor([0, 1, 1, 1]))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def step(images, labels):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(images), labels)
    loss.backward()
    optimizer.step()
    return loss
step(*batch)
assert macro_f1(batch[1].numpy(), batch[1].numpy()) == 1
from lightning.fabric.wrappers import OptimizedModule
assert not isinstance(net, OptimizedModule)
import torchvision.ops
assert heavy() == [], heavy()
"""

USES = {
    "a compiled module and step": """
compiled = torch.compile(net, backend="eager")
assert isinstance(compiled, OptimizedModule) and not isinstance(net, OptimizedModule)
assert torch.equal(compiled(batch[0]), net(batch[0]))
before = step(*batch)
assert torch.compile(step, backend="eager")(*batch) < before
""",
    "modules of the compiler": """
import torch._dynamo.config as config
from torch._dynamo.utils import counters
assert torch._dynamo.config is config is sys.modules["torch._dynamo.config"]
assert torch._dynamo.utils.counters is counters
image, box = torch.arange(16.0).reshape(1, 1, 4, 4), torch.tensor([[0.0, 0, 0, 2, 2]])
assert torchvision.ops.roi_align(image, box, 1).item() == 5
""",
    "a fit of Lightning's Trainer": """
from lightning import Trainer
from lightning.pytorch.core.module import Metric
from torchmetrics.classification import MulticlassAccuracy
import torchmetrics
assert torchmetrics.classification.MulticlassAccuracy is MulticlassAccuracy

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.accuracy = net, MulticlassAccuracy(2, average="micro")
        assert isinstance(self.accuracy, Metric) and not isinstance(net, Metric)
    def training_step(self, batch, index):
        scores = self.net(batch[0])
        loss = torch.nn.functional.cross_entropy(scores, batch[1])
        self.accuracy(scores, batch[1])
        self.log_dict({"loss": loss, "accuracy": self.accuracy}, on_step=False, on_epoch=True)
        return loss
    def configure_optimizers(self):
        return optimizer

off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
trainer = Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **off)
data = torch.utils.data.TensorDataset(*batch)
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4))
assert trainer.callback_metrics["accuracy"] * 4 in range(5), trainer.callback_metrics  # of 4 images
assert trainer.callback_metrics["loss"] > 0
""",
}


def run(script: str, **more: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != SWITCH} | more
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_import_in_a_program_changes_no_other_package() -> None:
    run(PLAIN)


@pytest.mark.parametrize("use", [pytest.param(u, marks=pytest.mark.nightly) for u in USES])
def test_deferred_modules_run_when_they_are_used(use: str) -> None:
    run(QUICK + USES[use], **{SWITCH: "1"})
