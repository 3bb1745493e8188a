"""Sparse feed-forward branches: a router sends every token to a few experts, none is ever dropped."""

from darlit.backbone.experts.module import Experts
from darlit.backbone.experts.routing import Routing, mean_routing

__all__ = ["Experts", "Routing", "mean_routing"]
