"""The backbone that every arm shares."""

from darlit.backbone.build import build_transformer
from darlit.backbone.config import BackboneConfig
from darlit.backbone.transformer import Transformer

__all__ = ["BackboneConfig", "Transformer", "build_transformer"]
