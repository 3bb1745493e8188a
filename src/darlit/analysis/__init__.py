"""Analyses of saved models: ``darlit analyze``. What is measured and drawn is in `darlit.probes`."""
