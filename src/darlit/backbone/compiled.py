"""Names of tensors that stay the same when a part of a module is wrapped: ``layers[0] = torch.compile(layers[0])``.

The wrapper is a module of its own and adds ``_orig_mod.`` to every name below it; ``module.compile()`` adds nothing.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)

WRAPPER = "_orig_mod."


def keep_names(module: nn.Module) -> None:
    """Have ``state_dict`` and ``load_state_dict`` of a module use the names that it has without wrappers."""
    module.register_state_dict_post_hook(_unwrap_names)
    module.register_load_state_dict_pre_hook(_wrap_names)


def unwrapped(module: ModuleT) -> ModuleT:
    """The module that a wrapper of ``torch.compile`` holds; any other one itself."""
    return cast(ModuleT, getattr(module, "_orig_mod", module))


def _unwrap_names(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    named = {name.replace(WRAPPER, "") if name.startswith(prefix) else name: value for name, value in state.items()}
    state.clear()
    state.update(named)


def _wrap_names(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, _tensor in tensors:
        plain = prefix + name.replace(WRAPPER, "")
        if WRAPPER in name and plain in state:
            state[prefix + name] = state.pop(plain)
