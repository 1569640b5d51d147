"""A stand-in for GPUs: devices ``standin:0`` and ``standin:1``, emulated on the CPU.

It is PyTorch's Python back end for the key PrivateUse1. A tensor reports the device and keeps its
values in a CPU tensor; an operation unwraps, runs on the CPU, and wraps. So numbers equal the CPU's
bit for bit, and what would fail on a GPU fails here: operations that mix devices, draws from
another device's generator, NumPy's view of a device tensor; and with
``torch.use_deterministic_algorithms``, operations that PyTorch documents to have no deterministic
algorithm on CUDA.

PyTorch loads it on import through an entry point of its group ``torch.backends`` (``conftest.py``
writes it), in every process with these folders on its path, including those of the benchmark.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

NAME = "standin"
COUNT = 2
GIB = 2**30
_CPU = torch.device("cpu")

_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)

_MIXES = {"aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::_foreach_copy_"}
"""Operations that copy between devices."""

_TAKES_CPU_SCALARS = {"aten::masked_fill", "aten::masked_fill_", "aten::fill_", "aten::index_put_"}
"""Operations, besides pointwise ones, that accept a single number on the CPU."""

_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""Operations whose indices may lie on the CPU."""

_NO_DETERMINISTIC_CUDA = {
    *("put_", "put", "histc", "median.dim", "nanmedian.dim", "scatter_reduce", "scatter_reduce_"),
    *("nll_loss2d_forward", "_ctc_loss_backward", "max_unpool2d", "max_unpool3d"),
    *("adaptive_max_pool2d_backward", "avg_pool3d_backward"),
    *(f"{mark}adaptive_avg_pool{n}d_backward" for mark in ("", "_") for n in (2, 3)),
    *(f"fractional_max_pool{n}d_backward" for n in (2, 3)),
    *(f"reflection_pad{n}d_backward" for n in (1, 2, 3)),
    *(f"grid_sampler_{n}d_backward" for n in (2, 3)),
    *(f"upsample_{mode}_backward" for mode in ("linear1d", "bilinear2d", "bicubic2d")),
    "upsample_trilinear3d_backward",
}
"""Documented to raise on CUDA under ``torch.use_deterministic_algorithms(True)``."""


class _Tensor(torch.Tensor):
    """A tensor on a stand-in device; ``held`` has its values on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> _Tensor:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
        )
        wrapper.held = held
        return wrapper

    def __repr__(self) -> str:
        return f"{self.held}, {self.device}"

    def tolist(self) -> Any:
        return self.held.tolist()

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index), value)

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"cannot convert a {self.device} tensor to numpy: use Tensor.cpu()")
        return self.held.detach().numpy()

    __array__ = numpy

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


def _indices(index: Any) -> Any:
    """Return an index with lists as tensors; PyTorch's own constructor cannot create them here."""
    if isinstance(index, tuple):
        return tuple(_indices(part) for part in index)
    return torch.tensor(index) if isinstance(index, list) else index


def _device(given: Any) -> torch.device:
    device = torch.device(given)
    if device.type != NAME or device.index is not None:
        return device
    return torch.device(NAME, device_module.current_device())


def _home(op: Any, args: Any, kwargs: Any) -> torch.device:
    """Return the common device of an operation's tensors.

    Raises:
        RuntimeError: If they lie on several devices, as on CUDA.
    """
    name = op._schema.name
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    home = next((t.device for t in tensors if t.device.type == NAME), _CPU)
    if name in _MIXES or home == _CPU:
        return tensors[0].device if tensors else home
    numbers = torch.Tag.pointwise in op.tags or name in _TAKES_CPU_SCALARS
    for place, argument in enumerate(args):
        for tensor in tree_leaves(argument):
            if not isinstance(tensor, torch.Tensor) or tensor.device == home:
                continue
            written = op._schema.arguments[place].is_write
            if numbers and tensor.dim() == 0 and tensor.device == _CPU and not written:
                continue
            positions = name in _INDEXING and place == 1 and args[0].device == home
            if positions and tensor.device == _CPU:
                continue
            _refuse(name, home, tensor.device)
    for tensor in tree_leaves(kwargs):
        if isinstance(tensor, torch.Tensor) and tensor.device != home:
            _refuse(name, home, tensor.device)
    return home


def _refuse(name: str, one: torch.device, other: torch.device) -> None:
    raise RuntimeError(f"{name}: expected all tensors to be on one device, not {one} and {other}")


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU with the held values of its tensors."""
    name = op._schema.name
    short = name.removeprefix("aten::")
    names = {short, f"{short}.{op._schema.overload_name}"}
    if torch.are_deterministic_algorithms_enabled() and names & _NO_DETERMINISTIC_CUDA:
        raise RuntimeError(f"{name} does not have a deterministic implementation on CUDA")
    if short.startswith("_foreach_") and (parts := _one_by_one(args)):
        made = [_run(op, part, kwargs) for part in parts]
        return None if made[0] is None else [tensor for (tensor,) in made]
    home = _home(op, args, kwargs)
    target = home
    kwargs = dict(kwargs)
    if kwargs.get("device") is not None:
        target = _device(kwargs["device"])
        kwargs["device"] = _CPU
    wrappers = {id(t.held): t for t in tree_leaves((args, kwargs)) if isinstance(t, _Tensor)}

    def unwrap(x: Any) -> Any:
        return x.held if isinstance(x, _Tensor) else x

    def wrap(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, _Tensor) or target.type != NAME:
            return x
        return wrappers[id(x)] if id(x) in wrappers else _Tensor(x, target)

    with _drawing(op, target, args, kwargs):
        made = op(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    for wrapper in wrappers.values():
        held = wrapper.held
        if (wrapper.shape, wrapper.stride()) != (held.shape, held.stride()):  # as by unsqueeze_
            torch.ops.aten.as_strided_.default.redispatch(
                _META, wrapper, held.shape, held.stride(), held.storage_offset()
            )
    if name == "aten::_to_copy" and target.type != NAME and target != _CPU:
        raise RuntimeError(f"no copy from {home} to {target}")
    return tree_map(wrap, made)


def _one_by_one(args: Any) -> list[Any]:
    """Return the arguments per list position if the positions lie on different devices."""
    if len({tensor.device for tensor in args[0]}) == 1:
        return []
    return [[[a[i]] if isinstance(a, list) else a for a in args] for i in range(len(args[0]))]


@contextmanager
def _drawing(op: Any, target: torch.device, args: Any, kwargs: Any) -> Iterator[None]:
    """Let random operations draw from the device's generator."""
    if target.type != NAME or torch.Tag.nondeterministic_seeded not in op.tags:
        yield
        return
    if any(isinstance(x, torch.Generator) for x in tree_leaves((args, kwargs))):
        raise RuntimeError(f"{op}: expected a generator of {target}, found one of the CPU")
    own, others = device_module.default_generators[target.index], torch.default_generator
    state = others.get_state()
    others.set_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(others.get_state())
        others.set_state(state)


# ------------------------------------------------------------------------------ torch.standin


class _Module(ModuleType):
    """``torch.standin``, with the same names as ``torch.cuda``."""

    default_generators = tuple(torch.Generator() for _ in range(COUNT))
    names = tuple(os.environ.get("STANDIN_NAMES", "Stand-in,Stand-in").split(","))
    current = 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return COUNT

    def current_device(self) -> int:
        return self.current

    def set_device(self, device: Any) -> None:
        self.current = _device(device).index

    def get_device_name(self, device: Any = None) -> str:
        return self.names[_device(device or NAME).index]

    def synchronize(self, device: Any = None) -> None:
        pass

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        free = float(os.environ.get("STANDIN_FREE_GIB", 80))
        return int(free * GIB), 80 * GIB

    def max_memory_allocated(self, device: Any = None) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: Any = NAME) -> torch.Tensor:
        return self.default_generators[_device(device).index].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = NAME) -> None:
        self.default_generators[_device(device).index].set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


device_module = _Module(f"torch.{NAME}")

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Give the devices to this process; PyTorch calls it on import."""
    from torch.utils import backend_registration

    if _libraries:
        return
    # Use one thread for backward: PyTorch counts all devices of a Python back end as one.
    torch._C._set_multithreading_enabled(False)
    # As on CUDA, moving a module keeps its parameter objects.
    torch.__future__.set_swap_module_params_on_conversion(True)
    backend_registration._setup_privateuseone_for_python_backend(NAME, device_module)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run_with, "PrivateUse1")
    library.fallback(torch.library.fallthrough_kernel, _AUTOCAST)
    _libraries.extend([library, _factories(), _autocast()])
    for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray")):
        setattr(owner, name, _made_on_cpu(getattr(owner, name)))
    torch.clear_autocast_cache = _forget_casts(torch.clear_autocast_cache)
    torch.Tensor.new_tensor = _new_tensor  # type: ignore[method-assign]
    torch.Tensor.pin_memory = _pinned  # type: ignore[method-assign]
    torch.Tensor.is_pinned = _is_pinned  # type: ignore[method-assign]


def _factories() -> torch.library.Library:
    """Implement constructors that would make an empty tensor and let it grow."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "range"):
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        library.impl(name, functools.partial(_run_with, op), "PrivateUse1")
    return library


def _run_with(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(op, args, kwargs)


def _made_on_cpu(made: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a constructor from Python numbers, which PyTorch itself does not support here."""

    @functools.wraps(made)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != NAME:
            return made(*args, device=device, **kwargs)
        if torch._C._is_torch_function_mode_enabled():  # PyTorch modes see the call first
            seen: torch.Tensor = torch.overrides.handle_torch_function(
                make, (), *args, device=device, **kwargs
            )
            return seen
        return made(*args, **kwargs).to(device)

    return make


def _pinned(self: torch.Tensor) -> torch.Tensor:
    if self.device != _CPU:
        raise RuntimeError(f"cannot pin a tensor on {self.device}, only one on the CPU")
    copy = self.clone()
    copy.pinned = True  # type: ignore[attr-defined]
    return copy


def _is_pinned(self: torch.Tensor) -> bool:
    return getattr(self, "pinned", False)


def _new_tensor(self: torch.Tensor, data: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)


# ------------------------------------------------------------------------------ bf16-mixed

_LOWER = {
    *("mm", "bmm", "addmm", "addbmm", "baddbmm", "linear", "matmul", "linalg_vecdot", "prelu"),
    *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
    *("conv_tbc", "_convolution", "_addmm_activation", "scaled_dot_product_attention"),
    *("_native_multi_head_attention", "mkldnn_rnn_layer"),
}
"""Operations that autocast on the CPU computes in bfloat16; its other operations use float32."""

_WIDEST = {"cat", "stack", "index_copy"}
"""Operations that autocast computes in the widest type of their tensors."""


def _autocast() -> torch.library.Library:
    """Cast like autocast on the CPU, for the same numbers."""
    library = torch.library.Library("aten", "IMPL")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("aten::") and has(full, "AutocastCPU"):
            name = full.removeprefix("aten::")
            base, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            library.impl(name, functools.partial(_cast_and_run, op, _policy(name)), _AUTOCAST)
    return library


_AUTOCAST = "AutocastPrivateUse1"
_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def _forget_casts(clear: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        _casts.clear()
        clear()

    return both


def _policy(name: str) -> str:
    base = name.partition(".")[0]
    return "lower" if base in _LOWER else "widest" if base in _WIDEST else "float32"


def _cast_and_run(op: Any, policy: str, *args: Any, **kwargs: Any) -> Any:
    lower = torch.get_autocast_dtype(NAME)
    dtype = {"lower": lower, "float32": torch.float32}.get(policy)
    if policy == "widest":
        found = {t.dtype for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
        dtype = torch.float32 if torch.float32 in found else lower

    def cast(x: Any) -> Any:
        floats = isinstance(x, torch.Tensor) and x.is_floating_point() and x.device.type == NAME
        if not floats or x.dtype == torch.float64 or x.dtype == dtype:
            return x
        if not (x.is_leaf and x.requires_grad and dtype == lower):
            return x.to(dtype)
        if id(x) not in _casts:  # once per block, or gradients would be summed in another order
            _casts[id(x)] = (x, x.to(dtype))
        return _casts[id(x)][1]

    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _AUTOCAST))
    with torch._C._ExcludeDispatchKeyGuard(key):
        return op(*tree_map(cast, args), **tree_map(cast, kwargs))
