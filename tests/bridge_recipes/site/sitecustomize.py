"""Packages that Megatron-Bridge imports and a training on a CPU does not use, as empty stand-ins that only Bridge can import.

Python runs this file at every start where its folder is on PYTHONPATH. Bridge declares Python 3.12; what it needs of that is one
name of `typing`.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import typing

PACKAGES = ("transformer_engine", "megatron.energon", "diffusers", "modelopt", "nvidia_resiliency_ext", "datasets", "webdataset")
CORE = """fp8_utils fp4_utils extensions.transformer_engine optimizer distributed models.gpt models.gpt.gpt_layer_specs
transformer.moe.moe_layer transformer.moe.experts transformer.moe.shared_experts transformer.multi_latent_attention
transformer.cuda_graphs pipeline_parallel dist_checkpointing datasets.gpt_dataset models.hybrid.hybrid_model
models.hybrid.hybrid_layer_specs ssm.mamba_mixer inference.utils transformer.transformer_block tensor_parallel
rerun_state_machine post_training.modelopt.layers quantization.utils utils models.T5 models.bert models.multimodal
models.vision"""
"""Modules of Megatron-Core that look for these packages: imported first, they find none."""

if not hasattr(typing, "override"):
    typing.override = lambda function: function


def asker() -> str:
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


class StandIn(types.ModuleType):
    __version__ = "0"
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__") or (self.__name__ == "transformer_engine.pytorch" and name not in SOME_OF_TE):
            raise AttributeError(name)
        if name == "ops":
            return importlib.import_module(f"{self.__name__}.ops")
        value = decorator if name[0].islower() else type(name, (Empty,), {})
        setattr(self, name, value)
        return value


class Empty:
    def __init__(self, *arguments, **named):
        pass

    def __class_getitem__(cls, _):
        return cls


SOME_OF_TE = ("Linear", "LayerNormLinear", "GroupedLinear", "FrozenState", "ops")


def decorator(*arguments, **named):
    if len(arguments) == 1 and callable(arguments[0]) and not named:
        return arguments[0]
    return (lambda function: function) if named and not arguments else None


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    ready = False

    def find_spec(self, name, path=None, target=None):
        if not any(map(name.startswith, PACKAGES)):
            return None
        if asker().startswith("tprimat.engines"):  # whether it is installed
            return importlib.machinery.ModuleSpec(name, self)
        if not (self.ready or asker().startswith("megatron.bridge")):
            return None
        if not self.ready:
            for module in CORE.split():
                with contextlib.suppress(ModuleNotFoundError):  # of an older Megatron-Core
                    importlib.import_module(f"megatron.core.{module}")
            Finder.ready = True
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


class Redirection(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "tprimat.bridge.compat":
            importlib.import_module("on_a_cpu").redirect()


sys.meta_path.insert(0, Redirection())
sys.meta_path.append(Finder())
if importlib.util.find_spec("tensorboard") is None:
    for module in ("torch.utils.tensorboard", "torch.utils.tensorboard.writer"):
        sys.modules[module] = StandIn(module)
