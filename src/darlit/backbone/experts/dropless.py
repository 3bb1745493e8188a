"""The dropless mixture of experts of megablocks (arXiv 2211.15841), computing on parameters that are ours.

Its dMoE lives here without parameters of its own: each pass lends it those of `Experts`. So checkpoints, sharding,
meta-device initialisation and optimiser groups do not know which backend runs.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from darlit.backbone.config import BackboneConfig
from darlit.backbone.experts import compiled_parts
from darlit.backbone.experts.routing import Routing
from darlit.errors import DarlitError


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Dropless:
    """megablocks' dMoE with grouped GLU experts.

    Raises:
        DarlitError: megablocks is not installed, or a token is on a device that its kernels cannot serve.
    """

    def __init__(self, config: BackboneConfig) -> None:
        if importlib.util.find_spec("megablocks") is None:
            raise DarlitError(
                "backbone.experts=megablocks needs megablocks: type `make megablocks` "
                "(or `python -m darlit.backbone.experts.install`), or choose backbone.experts=torch"
            )
        compiled_parts.provide()
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import dMoE

        if interpreted():
            _one_configuration_a_kernel()
        # The coefficients are one here: `Routing` is without them. So is the number of layers: a loss is one layer's.
        self.arguments = Arguments(
            hidden_size=config.width,
            ffn_hidden_size=config.ffn_width,
            num_layers=1,
            bias=False,
            return_bias=False,
            activation_fn=F.silu,
            moe_num_experts=config.num_experts,
            moe_top_k=config.experts_per_token,
            moe_normalize_expert_weights=1 if config.normalize_expert_weights else None,
            moe_loss_weight=1.0,
            moe_lbl_in_fp32=True,
            moe_zloss_weight=1.0,
            moe_zloss_in_fp32=True,
            mlp_type="glu",
            mlp_impl="grouped",
            memory_optimized_mlp=True,
            fp16=False,
            bf16=False,
            device=torch.device("meta"),
        )
        # Also in evaluation: "training" only decides whether the load-balancing loss is kept.
        self.dmoe = dMoE(self.arguments).train()

    def __call__(
        self, x_BTD: Tensor, router_ED: Tensor, gate_RD: Tensor, up_RD: Tensor, out_RD: Tensor
    ) -> tuple[Tensor, Routing]:
        """As `Experts.forward` after the norm; R = E F."""
        if not x_BTD.is_cuda and not interpreted():
            raise DarlitError(
                f"backbone.experts=megablocks runs on a GPU, not on {x_BTD.device.type}: choose backbone.experts=torch"
            )
        parameters = {
            "router.layer.weight": router_ED,
            "experts.mlp.w1": gate_RD,
            "experts.mlp.v1": up_RD,
            "experts.mlp.w2": out_RD,
        }
        _forget()
        try:
            y_BTD = functional_call(self.dmoe, parameters, (x_BTD,))
            return y_BTD, self._routing()
        finally:
            _forget()

    def _routing(self) -> Routing:
        from megablocks.layers.moe import batched_load_balancing_loss, get_load_balancing_loss
        from megablocks.layers.router import batched_router_zloss

        ((tokens_per_expert_E, _),) = get_load_balancing_loss()
        load_balancing: Any = batched_load_balancing_loss(self.arguments)
        z: Any = batched_router_zloss(self.arguments)
        return Routing(load_balancing, z.squeeze(0), tokens_per_expert_E)


def _forget() -> None:
    """Empty megablocks' module-wide lists of losses.

    Left alone they grow with every pass, a recomputed one and one in evaluation included, and the auxiliary losses
    with them.
    """
    from megablocks.layers.moe import clear_load_balancing_loss
    from megablocks.layers.router import clear_router_zloss

    clear_load_balancing_loss()
    clear_router_zloss()


def _one_configuration_a_kernel() -> None:
    """The autotuner measures on a GPU; in the interpreter every kernel keeps its last configuration."""
    from megablocks.backend import kernels
    from triton.runtime.autotuner import Autotuner

    for kernel in vars(kernels).values():
        if isinstance(kernel, Autotuner):
            kernel.configs = kernel.configs[-1:]
