"""darlit: Dual Attention Residuals and the residual pathways it is compared with."""

__version__ = "0.1.0"
